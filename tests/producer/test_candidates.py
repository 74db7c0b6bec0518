from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import Json, Prompt, Refusal, Turn
from producer.candidates import (
    Candidate,
    Known,
    NotDrawn,
    Outcome,
    RowReader,
    candidate_of,
)
from producer.known import KnownLines, high_halves
from producer.limits import Abilities, Limits
from producer.rules import Draws, Rules, path_of
from producer.schemas import Shape
from producer.sources.inputs import Lines
from tests.producer.row_by_row import read_candidates

PLAIN = Rules()


def fates_of(rows: list[Json], rules: Rules = PLAIN, path: str = "f.jsonl") -> list[Outcome]:
    """Of rows that come as lines of a file."""
    lines = [(f"{path}:{n}", orjson.dumps(row)) for n, row in enumerate(rows, start=1)]
    return list(read_candidates(lines, rules))


def candidate(row: Json, rules: Rules = PLAIN) -> Candidate:
    (fate,) = fates_of([row], rules)
    assert isinstance(fate, Candidate), fate
    return fate


def prompt(row: Json, rules: Rules = PLAIN) -> Prompt:
    return load(Prompt, candidate(row, rules).line)


def reason(row: Json, rules: Rules = PLAIN) -> str:
    (fate,) = fates_of([row], rules)
    assert isinstance(fate, Refusal), fate
    return fate.reason


def ids(fates: list[Outcome]) -> list[str]:
    return [load(Prompt, fate.line).id for fate in fates if isinstance(fate, Candidate)]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def user(text: Any) -> Json:
    return {"role": "user", "content": text}


def test_a_candidates_line_is_the_prompt_that_will_be_planned() -> None:
    row = {"id": "p", "messages": [user("a")], "topic": "x", "sampling": {"temperature": 1}}

    drawn = candidate(row)

    assert load(Prompt, drawn.line) == Prompt(
        key=sha256("p")[:32],
        id="p",
        turns=[Turn([user("a")])],
        tools=[],
        heldout=False,
        source="f.jsonl:1",
        sampling={"temperature": 1.0},
        metadata={"topic": "x"},
    )
    assert (drawn.key, drawn.row_key, drawn.schema) == (sha256("p")[:32],) * 2 + ("messages",)


@pytest.mark.parametrize("name", ["id", "custom_id", "uuid"])
def test_the_users_id_makes_the_key(name: str) -> None:
    planned = prompt({name: 17, "user_turns": ["a"]})

    assert (planned.id, planned.key) == ("17", sha256("17")[:32])
    assert planned.metadata == {}


@pytest.mark.parametrize("unusable", [True, 1.5, ["p"], {}, 2**64 + 1])
def test_an_id_that_is_neither_text_nor_whole_is_refused_rather_than_lost(unusable: object) -> None:
    line = json.dumps({"id": unusable, "user_turns": ["a"]}).encode()

    (fate,) = read_candidates([("f.jsonl:1", line)], PLAIN)

    assert isinstance(fate, Refusal)
    assert fate.reason == "bad_id"


@pytest.mark.parametrize("digits", ["18446744073709551616", "-9223372036854775809", "9" * 300])
@pytest.mark.parametrize(
    "row",
    [
        '{"user_turns":["a"],"at":{"x":[1,%s]}}',
        '{"user_turns":["a"],"tools":[{"name":"f","parameters":{"default":%s}}]}',
        '{"messages":[{"role":"user","content":"a"},{"role":"assistant",'
        '"tool_calls":[{"name":"f","arguments":{"n":%s}}]},{"role":"user","content":"b"}]}',
    ],
)
def test_an_integer_that_would_be_rounded_is_refused_and_named(row: str, digits: str) -> None:
    (fate,) = read_candidates([("f.jsonl:1", (row % digits).encode())], PLAIN)

    assert isinstance(fate, Refusal)
    assert fate.reason == "unsupported_value"
    assert f"integer {digits[:40]} has over 64 bits" in fate.detail


@pytest.mark.parametrize("number", ["18446744073709551615", "-9223372036854775808", "1e19", "1.5"])
def test_every_number_that_can_be_kept_stays_what_it_is(number: str) -> None:
    line = b'{"user_turns":["a"],"n":%s}' % number.encode()

    (fate,) = read_candidates([("f.jsonl:1", line)], PLAIN)

    assert isinstance(fate, Candidate), fate
    assert load(Prompt, fate.line).metadata == {"n": json.loads(number)}


def test_a_whole_number_that_a_table_keeps_as_a_float_is_an_id() -> None:
    assert prompt({"id": 17.0, "user_turns": ["a"]}).id == "17"


def test_a_rows_own_id_never_takes_the_place_of_another_rows_sample() -> None:
    rows = [{"id": "a", "user_turns": ["x"]}, {"id": "a#1", "user_turns": ["y"]}]
    thrice = Rules(draws=Draws(samples=3))

    keys = [
        {fate.key for fate in fates_of(order, thrice) if isinstance(fate, Candidate)}
        for order in (rows, rows[::-1])
    ]

    assert len(keys[0]) == 6
    assert keys[0] == keys[1]


@pytest.mark.parametrize(("text", "heldout"), [("true", True), ("False", False), ("", False)])
def test_a_table_of_texts_can_say_that_a_row_is_held_out(text: str, heldout: bool) -> None:
    assert prompt({"user_turns": ["a"], "heldout": text}).heldout is heldout


@pytest.mark.parametrize("unusable", [None, ""])
def test_without_an_id_the_content_makes_it(unusable: object) -> None:
    plain = prompt({"user_turns": ["a"]})
    with_unusable = prompt({"id": unusable, "messages": [user("a")]})
    other_text = prompt({"user_turns": ["b"]})

    assert plain.key == sha256(plain.id)[:32] == with_unusable.key != other_text.key


def test_content_is_turns_tools_and_overrides_and_nothing_else() -> None:
    row: Json = {"user_turns": ["a"], "tools": [{"name": "now", "parameters": {"a": 1, "b": 2}}]}
    digest = candidate(row).content_digest

    same = [
        {**row, "id": "p", "topic": "x", "heldout": True},
        {**row, "tools": [{"parameters": {"b": 2, "a": 1}, "name": "now"}]},
        {"messages": [{"content": "a", "role": "user"}], "tools": row["tools"], "sampling": {}},
    ]
    other = [
        {**row, "user_turns": ["b"]},
        {**row, "tools": [{"name": "then"}]},
        {**row, "sampling": {"temperature": 0.5}},
        {**row, "sampling": {"temperature": 0.6}},
    ]
    assert {candidate(r).content_digest for r in same} == {digest}
    assert len({digest, *(candidate(r).content_digest for r in other)}) == 5


def test_a_plan_keeps_the_order_of_keys_that_the_target_will_see() -> None:
    tool = {"parameters": {"b": 2, "a": 1}, "name": "now"}

    (function,) = (t["function"] for t in prompt({"user_turns": ["a"], "tools": [tool]}).tools)

    assert json.dumps(function["parameters"]) == '{"b": 2, "a": 1}'


def test_a_retried_prompt_keeps_key_and_digest() -> None:
    first = candidate({"id": "p", "user_turns": ["a"], "heldout": True})

    again = candidate_of(load(Prompt, first.line), first.content_digest)

    assert again._replace(
        line_digest=first.line_digest, row_key=first.key, schema="user_turns"
    ) == (first._replace(line=again.line))
    assert load(Prompt, again.line) == load(Prompt, first.line)


def test_a_row_says_itself_whether_it_is_held_out_or_a_draw_by_its_id_does() -> None:
    half = Rules(draws=Draws(heldout_share=0.5))
    drawn = [prompt({"id": n, "user_turns": ["a"]}, half).heldout for n in range(400)]
    again = [prompt({"id": n, "user_turns": ["b"]}, half).heldout for n in range(400)]

    assert drawn == again
    assert 150 < sum(drawn) < 250
    every = Rules(draws=Draws(heldout_share=1.0))
    assert prompt({"user_turns": ["a"]}, every).heldout
    assert prompt({"heldout": True, "user_turns": ["a"]}).heldout
    assert not prompt({"heldout": False, "user_turns": ["a"]}, every).heldout
    assert {reason({"heldout": x, "user_turns": ["a"]}) for x in ("yes", 1)} == {"bad_heldout"}


def test_samples_of_a_row_have_ids_of_their_own_and_share_the_rest() -> None:
    rules = Rules(draws=Draws(samples=3, heldout_share=0.5))

    fates = fates_of([{"id": f"p{n}", "user_turns": ["a"]} for n in range(50)], rules)

    candidates = [fate for fate in fates if isinstance(fate, Candidate)]
    assert ids(fates)[:4] == ["p0", "p0#1", "p0#2", "p1"]
    assert [c.key for c in candidates[::3]] == [sha256(f"p{n}")[:32] for n in range(50)]
    assert len({c.key for c in candidates}) == 150
    assert [c.sample for c in candidates] == [0, 1, 2] * 50
    for n in range(50):
        shared = {
            (c.row_key, c.content_digest, c.heldout, c.source, load(Prompt, c.line).heldout)
            for c in candidates[3 * n : 3 * n + 3]
        }
        assert len(shared) == 1


def test_only_a_rows_last_sample_vouches_for_its_line() -> None:
    first, second = fates_of([{"user_turns": ["a"]}], Rules(draws=Draws(samples=2)))

    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert (first.line_digest, len(second.line_digest)) == ("", 32)


def test_a_files_weight_is_the_expected_number_of_its_samples() -> None:
    def num_drawn(weight: float, samples: int) -> list[int]:
        rules = Rules(draws=Draws(samples, {"a.jsonl": weight}))
        rows = [{"id": n, "user_turns": ["a"]} for n in range(400)]
        fates = fates_of(rows, rules, "a.jsonl")
        assert fates == fates_of(rows, rules, "a.jsonl")
        counts = dict.fromkeys((f"a.jsonl:{n}" for n in range(1, 401)), 0)
        for fate in fates:
            counts[fate.source] += isinstance(fate, Candidate)
        return list(counts.values())

    assert set(num_drawn(0.0, 2)) == {0}
    assert set(num_drawn(1.5, 2)) == {3}
    assert set(num_drawn(0.75, 2)) == {1, 2}
    assert 150 < sum(num_drawn(0.5, 1)) < 250
    assert set(num_drawn(0.5, 1)) == {0, 1}


def test_a_row_that_was_not_drawn_says_so_and_other_files_keep_theirs() -> None:
    rules = Rules(draws=Draws(weights={"a.jsonl": 0.0}))

    assert fates_of([{"user_turns": ["a"]}], rules, "a.jsonl") == [NotDrawn("a.jsonl:1")]
    assert len(ids(fates_of([{"user_turns": ["a"]}], rules, "b.jsonl"))) == 1


def test_duplicates_get_a_suffix_that_neither_samples_nor_other_rows_have() -> None:
    rules = Rules(duplicates="suffix", draws=Draws(samples=2))
    rows = [{"id": i, "user_turns": [str(n)]} for n, i in enumerate(["a", "a~2", "a", "a", "a#1"])]

    made = ids(fates_of(rows, rules))

    assert made == ["a", "a#1", "a~2", "a~2#1", "a~3", "a~3#1", "a~4", "a~4#1", "a#1", "a#1#1"]


@pytest.mark.parametrize("duplicates", ["suffix", "error"])
def test_where_every_duplicate_counts_no_line_is_known(duplicates: str) -> None:
    fates = fates_of([{"user_turns": ["a"]}], Rules(duplicates=duplicates))

    assert [fate.line_digest for fate in fates if isinstance(fate, Candidate)] == [""]


def lines_known(fates: list[Outcome]) -> set[str]:
    return {f.line_digest for f in fates if isinstance(f, Candidate) and f.line_digest}


def test_a_known_line_is_not_parsed_again() -> None:
    known = KnownLines(high_halves(lines_known(fates_of([{"user_turns": ["a"]}]))))
    row = orjson.dumps({"user_turns": ["a"]})

    def items() -> Iterator[tuple[str, bytes]]:
        yield "g.jsonl:7", row
        yield "g.jsonl:8", row + b" "

    known_line, other = read_candidates(items(), PLAIN, known)

    assert known_line == Known()
    assert isinstance(other, Candidate)


def test_lines_in_one_piece_have_the_outcomes_that_each_has_alone() -> None:
    rows = [orjson.dumps({"user_turns": [f"question {n}"]}) for n in range(8)]
    texts = [rows[0], b"", b" \r", rows[1] + b"\r", rows[2], b"{", b"", rows[3], *rows[4:], b""]
    piece = Lines("f.jsonl", 5, b"\n".join(texts))
    fresh = list(read_candidates(piece.items(), PLAIN))
    known = KnownLines(high_halves(lines_known([fresh[0], fresh[1], fresh[2], fresh[-1]])))

    outcomes = list(RowReader(PLAIN, known).read_lines(piece))

    assert outcomes == [Known(3), *fresh[3:-1], Known(1)]
    assert list(RowReader(PLAIN).read_lines(piece)) == fresh
    assert [outcome.source for outcome in fresh[2:5] if not isinstance(outcome, Known)] == [
        "f.jsonl:9",
        "f.jsonl:10",
        "f.jsonl:12",
    ]


@pytest.mark.parametrize(
    "other",
    [
        Rules(shape=Shape(system="Be brief.")),
        Rules(shape=Shape(fields={"user_turns": "questions"})),
        Rules(multi_turn="first"),
        Rules(limits=Limits(max_new_tokens=5)),
        Rules(limits=Limits(abilities=Abilities(tools=False))),
        Rules(limits=Limits(control_policy="reject", control_tokens=("x",))),
        Rules(limits=Limits(too_long=lambda turns, tools, overrides: None)),
        Rules(draws=Draws(samples=2)),
        Rules(draws=Draws(heldout_share=0.1)),
        Rules(draws=Draws(weights={"f.jsonl": 2.0})),
    ],
)
def test_a_line_is_not_known_under_other_options(other: Rules) -> None:
    row: Json = {"user_turns": ["a"]}

    assert lines_known(fates_of([row])) == lines_known(fates_of([row], path="elsewhere"))
    assert not lines_known(fates_of([row])) & lines_known(fates_of([row], other))


def test_a_row_that_came_as_no_line_has_no_digest_of_one() -> None:
    (fate,) = read_candidates([("rows#1", {"user_turns": ["a"]})], PLAIN)

    assert isinstance(fate, Candidate)
    assert fate.line_digest == ""


def test_what_the_sources_refused_stays_refused() -> None:
    refusal = Refusal("f.jsonl:1", "malformed_json", "", "{")

    assert list(read_candidates([("f.jsonl:1", refusal)], PLAIN)) == [refusal]
    (fate,) = read_candidates([("f.jsonl:2", b"{")], PLAIN)
    assert isinstance(fate, Refusal)
    assert (fate.source, fate.reason, fate.excerpt) == ("f.jsonl:2", "malformed_json", "{")


@pytest.mark.parametrize("depth", [200, 300, 1000])
def test_a_row_nested_too_deeply_is_refused_wherever_the_depth_is(depth: int) -> None:
    deep = orjson.loads("[" * depth + "]" * depth)

    for row in (
        {"user_turns": ["a"], "metadata": deep},
        {"user_turns": ["a"], "tools": [{"name": "now", "parameters": {"x": deep}}]},
    ):
        (fate,) = read_candidates([("f:1", row)], PLAIN)
        assert isinstance(fate, Candidate) == (depth == 200)
        assert isinstance(fate, Candidate) or fate.reason == "malformed_json"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "path"),
    [("a.jsonl:12", "a.jsonl"), ("s3://b/k7#3", "s3://b/k7"), ("row:7", "row"), ("a:1:2", "a:1")],
)
def test_a_sources_path_is_what_stands_before_its_number(source: str, path: str) -> None:
    assert path_of(source) == path


@pytest.mark.parametrize(
    "make",
    [
        lambda: Draws(samples=0),
        lambda: Draws(heldout_share=1.5),
        lambda: Draws(weights={"a": -1.0}),
        lambda: Draws(weights={"a": float("inf")}),
        lambda: Draws(weights={"a": float("nan")}),
        lambda: Rules(duplicates="often"),
    ],
)
def test_rules_that_mean_nothing_are_refused(make: Any) -> None:
    with pytest.raises(BadInput):
        make()


texts = st.text(alphabet='ab {}[]":,\n\u2028é\U0001f600', max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts
json_values: st.SearchStrategy[Any] = st.deferred(
    lambda: (
        scalars
        | st.lists(json_values, max_size=3)
        | st.dictionaries(texts, json_values, max_size=3)
    )
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": json_values}
)
rows = st.dictionaries(
    st.sampled_from(["id", "messages", "user_turns", "tools", "system", "topic", "heldout"]),
    json_values | st.lists(messages, max_size=4) | st.lists(texts, max_size=3),
)


@given(rows)
def test_every_row_has_one_fate_and_the_same_row_always_the_same(row: Json) -> None:
    (fate,) = fates_of([row])
    (reversed_fate,) = fates_of([dict(reversed(row.items()))])

    assert [fate] == fates_of([row])
    if isinstance(fate, Candidate):
        assert isinstance(reversed_fate, Candidate)
        assert (fate.key, fate.content_digest) == (reversed_fate.key, reversed_fate.content_digest)
    else:
        assert isinstance(fate, Refusal)
        assert isinstance(reversed_fate, Refusal)
        assert fate.reason == reversed_fate.reason


@given(st.lists(texts.filter(str.strip), min_size=1, max_size=4))
def test_normalising_what_was_normalised_changes_nothing(questions: list[str]) -> None:
    once = prompt({"user_turns": questions})
    said = {"role": "assistant", "content": "recorded"}
    conversation = [message for turn in once.turns for message in (*turn.messages, said)]

    twice = prompt({"messages": conversation})

    assert (twice.key, twice.turns) == (once.key, once.turns)
