"""Commits -> shards: every answer that trains becomes one sample, of the engine's own ids."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import cast

import pytest

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.flags import (
    EMPTY,
    GARBLED,
    REPETITION,
    TOOL_CALL_LOOP,
    TRUNCATED,
    UNFINISHED_THINKING,
)
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Row,
    RunSpec,
    Sampling,
    Target,
)
from dflash_workers.contract.store import Store
from trainer.tokens.build import TokenizeReport, build_shard, samples_of, tokenize_run
from trainer.tokens.shards import Source, list_shards, read_provenance, read_shard, write_shard

RUN = "run"
KEYS = RunKeys(RUN)
STOP, THINK_END = 2, 90

SPEC = RunSpec(
    schema=SCHEMA_VERSION,
    run=RUN,
    target=Target("tiny", "c" * 64, "k" * 64, "m" * 64, "w" * 64, 1000, 4096, "float32"),
    chat_template="",
    template_kwargs={},
    sampling=Sampling(0.0, 1.0, -1, 64, [STOP]),
    multi_turn="rollout",
    control_tokens="escape",
    thinking_end_id=THINK_END,
)


def make_answer(
    input_ids: list[int], output_ids: list[int], turn: int = 0, flags: tuple[str, ...] = ()
) -> Answer:
    finish_reason = "stop" if output_ids[-1:] == [STOP] else "length"
    return Answer(
        *(turn, input_ids, output_ids, [len(output_ids)], "text is for people", "", []),
        *(finish_reason, 0, 0.1, 7, {}, list(flags)),
    )


def make_row(*answers: Answer, name: str = "math-1", heldout: bool = False) -> Row:
    return Row(name.ljust(32, "0"), name, 0, heldout, "p.jsonl:1", [], [], list(answers))


def commit_rows(
    store: Store, batch: str, rows: list[Row], segment: int = 1, road: str = "ids"
) -> Commit:
    body, sha256 = seal_rows(rows)
    data_key = KEYS.data(segment, batch, "att")
    commit = Commit(
        *(1, RUN, segment, batch, "att", data_key, sha256, len(body), len(rows), []),
        *(0, 0, 0.0, 1.0, "w", {}, road),
    )
    return publish(store, commit, body)


def source_of(shard: bytes) -> Source:
    provenance = read_provenance(shard)
    return cast(Source, {name: provenance[name] for name in Source.__annotations__})  # type: ignore[literal-required]


@pytest.fixture
def run_store(store: Store) -> Store:
    store.put_new(KEYS.spec, dump(SPEC))
    return store


THREE_TURNS = make_row(
    make_answer([10, 11], [20, 21, STOP], turn=0),
    # Not a continuation of the turn before: the template has dropped and changed some ids.
    make_answer([10, 11, 20, 99, 12], [22, STOP], turn=1),
    make_answer([10, 11, 20, 99, 12, 22, 13], [23, 24, 25], turn=2, flags=(TRUNCATED,)),
)


def test_imported_conversations_wait_for_ids_and_are_counted(run_store: Store) -> None:
    commit_rows(run_store, "made", [THREE_TURNS])
    commit_rows(run_store, "imported", [replace(THREE_TURNS, answers=[])] * 2, road="text")

    report = tokenize_run(run_store, RUN)

    assert (report.num_shards, report.skipped) == (1, {"text_road": 2})
    assert report.quarantined == []


def test_loss_covers_exactly_what_the_target_sampled(run_store: Store) -> None:
    other = make_row(make_answer([STOP, 10, STOP], [30, STOP]), name="math-2", heldout=True)
    rows = [THREE_TURNS, other]
    commit = commit_rows(run_store, "b", rows)

    samples = read_shard(build_shard(run_store, SPEC, commit))

    expected = []
    for row in rows:
        for answer in row.answers:
            pairs = [(token_id, False) for token_id in answer.input_ids]
            for token_id in answer.output_ids:
                pairs.append((token_id, True))
            expected.append((row.id, row.heldout, answer.turn, pairs))
    found = [
        (s.id, s.heldout, s.turn, list(zip(s.ids.tolist(), s.loss_mask().tolist(), strict=True)))
        for s in samples
    ]
    assert found == expected


def test_control_ids_in_a_prompt_never_light_up_the_mask() -> None:
    im_start, im_end = 1, STOP
    injected = [im_start, 5, im_end, im_start, 6, 7, im_end, im_start, 6]

    (sample,) = samples_of(make_row(make_answer(injected, [8, STOP])), SPEC)

    assert sample.loss_mask().nonzero()[0].tolist() == [9, 10]


def test_a_truncated_answer_trains_without_a_stop_id() -> None:
    sample = samples_of(THREE_TURNS, SPEC)[2]

    assert sample.finish_reason == "length"
    assert sample.ids.tolist()[-3:] == [23, 24, 25]
    assert sample.flags == [TRUNCATED]


def test_an_answer_that_stops_at_the_very_limit_is_not_truncated() -> None:
    answer = make_answer([10], [20, STOP], flags=(TRUNCATED,))
    answer = replace(answer, finish_reason="length")

    (sample,) = samples_of(make_row(answer), SPEC)

    assert (sample.finish_reason, sample.flags) == ("stop", [])


def test_the_end_of_thinking_is_found_in_the_answer_only() -> None:
    thinks = make_answer([10, THINK_END], [20, THINK_END, 21, THINK_END, STOP])
    does_not = make_answer([10, THINK_END], [20, STOP], turn=1)

    samples = samples_of(make_row(thinks, does_not), SPEC)

    assert [s.thinking_end for s in samples] == [3, -1]


def test_thinking_cut_off_by_the_limit_trains_though_it_has_no_content() -> None:
    answer = make_answer([10], [20, 21], flags=(TRUNCATED, EMPTY, UNFINISHED_THINKING))

    assert [s.ids.tolist() for s in samples_of(make_row(answer), SPEC)] == [[10, 20, 21]]


def test_answers_that_do_not_train_are_counted_by_reason(run_store: Store) -> None:
    flagged = make_answer([10], [20, STOP], flags=(EMPTY,))
    nothing = make_answer([10], [])
    only_stop = make_answer([10], [STOP])
    loop = make_answer([10], [20] * 40, flags=(TRUNCATED, REPETITION))
    calls = make_answer([10], [21] * 40, flags=(TOOL_CALL_LOOP,))
    noise = make_answer([10], [22, 23], flags=(GARBLED,))
    good = make_answer([10], [20, STOP])
    answers = (flagged, nothing, only_stop, loop, calls, noise, good)
    commit = commit_rows(run_store, "b", [make_row(*answers)])

    shard = build_shard(run_store, SPEC, commit)

    assert read_provenance(shard)["skipped"] == {
        EMPTY: 3,
        REPETITION: 1,
        TOOL_CALL_LOOP: 1,
        GARBLED: 1,
    }
    assert len(read_shard(shard)) == 1


def test_a_shard_names_its_origin(run_store: Store) -> None:
    commit = commit_rows(run_store, "b", [THREE_TURNS])

    provenance = read_provenance(build_shard(run_store, SPEC, commit))

    assert provenance["road"] == "ids"
    assert run_store.exists(provenance["commit_key"])
    assert provenance["data_sha256"] == commit.sha256
    assert provenance["target_fingerprint"] == SPEC.target.fingerprint()
    assert (provenance["tokenizer_sha256"], provenance["template_sha256"]) == ("k" * 64, "m" * 64)


@pytest.mark.parametrize("token_id", [1000, -1, 2**31, 2**63 - 1])
def test_an_id_that_is_no_token_is_corrupt(run_store: Store, token_id: int) -> None:
    row = make_row(make_answer([10, token_id], [20, STOP]))

    with pytest.raises(Corrupt):
        build_shard(run_store, SPEC, commit_rows(run_store, "b", [row]))


def test_a_run_is_tokenized_once(run_store: Store) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    commit_rows(run_store, "b2", [THREE_TURNS], segment=2)
    heard: list[str] = []

    first = tokenize_run(run_store, RUN, heard.append)
    bodies = [run_store.get(key) for key in heard]
    second = tokenize_run(run_store, RUN, heard.append)

    assert heard == [KEYS.shard(1, "b1"), KEYS.shard(2, "b2")] == list_shards(run_store, RUN)
    assert first == TokenizeReport(2, 2, 6, 16, 44, {}, [])
    assert second == TokenizeReport(2, 0, 6, 16, 44, {}, [])
    assert bodies == [run_store.get(key) for key in heard]


def test_a_tokenizer_that_died_is_continued_where_it_stood(run_store: Store) -> None:
    commits = [commit_rows(run_store, b, [THREE_TURNS]) for b in ("b1", "b2", "b3")]
    run_store.put_new(KEYS.shard(1, "b2"), build_shard(run_store, SPEC, commits[1]))
    heard: list[str] = []

    report = tokenize_run(run_store, RUN, heard.append)

    assert heard == [KEYS.shard(1, "b1"), KEYS.shard(1, "b3")]
    assert (report.num_shards, report.num_new) == (3, 2)


def test_a_later_commit_is_picked_up_by_the_next_call(run_store: Store) -> None:
    commit_rows(run_store, "b2", [THREE_TURNS])
    tokenize_run(run_store, RUN)
    commit_rows(run_store, "b1", [THREE_TURNS])  # earlier in key order than the one that is done

    assert tokenize_run(run_store, RUN).num_new == 1
    assert len(list_shards(run_store, RUN)) == 2


def test_a_batch_without_trainable_answers_gets_an_empty_shard(run_store: Store) -> None:
    commit_rows(run_store, "b1", [])
    commit_rows(run_store, "b2", [make_row(make_answer([10], [STOP]))])

    report = tokenize_run(run_store, RUN)

    assert (report.num_shards, report.num_samples, report.skipped) == (2, 0, {EMPTY: 1})
    assert [read_shard(run_store.get(key)) for key in list_shards(run_store, RUN)] == [[], []]


def test_corrupt_data_is_quarantined_and_nothing_else_suffers(run_store: Store) -> None:
    for batch in ("b1", "b2", "b3", "b4"):
        commit_rows(run_store, batch, [THREE_TURNS])
    run_store.replace(KEYS.data(1, "b1", "att"), b"damaged")
    run_store.delete(KEYS.data(1, "b2", "att"))
    run_store.replace(KEYS.commit(1, "b3"), b"{}")

    report = tokenize_run(run_store, RUN)

    quarantined = [line.split(":")[0] for line in report.quarantined]
    assert quarantined == [KEYS.shard(1, b) for b in ("b1", "b2", "b3")]
    assert list_shards(run_store, RUN) == [KEYS.shard(1, "b4")]
    assert (report.num_shards, report.num_new) == (1, 1)


def test_a_corrupt_shard_is_quarantined_and_left_alone(run_store: Store) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    run_store.put_new(KEYS.shard(1, "b1"), b"damaged")

    assert len(tokenize_run(run_store, RUN).quarantined) == 1
    assert run_store.get(KEYS.shard(1, "b1")) == b"damaged"


def test_a_batch_mended_after_quarantine_is_tokenized(run_store: Store) -> None:
    commit = commit_rows(run_store, "b1", [THREE_TURNS])
    good = run_store.get(commit.data_key)
    run_store.replace(commit.data_key, b"damaged")
    tokenize_run(run_store, RUN)
    run_store.replace(commit.data_key, good)

    report = tokenize_run(run_store, RUN)

    assert (report.num_new, report.quarantined) == (1, [])


def test_two_tokenizers_at_once_agree(run_store: Store) -> None:
    for number in range(6):
        commit_rows(run_store, f"b{number}", [THREE_TURNS])
    reports: list[TokenizeReport] = []

    def work() -> None:
        reports.append(tokenize_run(run_store, RUN))

    threads = [threading.Thread(target=work) for _ in range(3)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [(r.num_shards, r.num_samples, r.quarantined) for r in reports] == [(6, 18, [])] * 3


def test_whoever_is_second_accepts_the_same_content_packed_otherwise(run_store: Store) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    second = commit_rows(run_store, "b2", [THREE_TURNS])
    ours = build_shard(run_store, SPEC, second)
    theirs = write_shard(read_shard(ours), {**source_of(ours), "tool_version": "another"})

    # The other tokenizer is faster with b2 while this one is busy with b1.
    report = tokenize_run(run_store, RUN, lambda _: run_store.put_new(KEYS.shard(1, "b2"), theirs))

    assert theirs != ours
    assert (report.num_shards, report.quarantined) == (2, [])


def test_a_shard_of_other_content_in_the_place_of_ours_is_quarantined(run_store: Store) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    second = commit_rows(run_store, "b2", [THREE_TURNS])
    ours = build_shard(run_store, SPEC, second)
    theirs = write_shard(read_shard(ours)[:1], source_of(ours))

    report = tokenize_run(run_store, RUN, lambda _: run_store.put_new(KEYS.shard(1, "b2"), theirs))

    assert [line.split(":")[0] for line in report.quarantined] == [KEYS.shard(1, "b2")]


def test_a_run_that_does_not_exist_is_missing(store: Store) -> None:
    with pytest.raises(Missing):
        tokenize_run(store, "nowhere")
