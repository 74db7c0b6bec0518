"""A sample's words are those of its own answer; a shard is read without them, too."""

from __future__ import annotations

from dataclasses import replace

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import Row
from dflash_workers.contract.store import Store
from tests.trainer.gate.making import RUN, answer_of, healthy, put_commit, source_of
from trainer.gate.reading import Words, read_with_words, words_of
from trainer.tokens.shards import write_shard

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "First?"}]


def row_of(*contents: str) -> Row:
    """A row with an answer per content, and its samples' ids."""
    answers = [
        replace(answer_of(s, content, f"about {content}", calls=n), turn=n)
        for n, (s, content) in enumerate(zip(healthy(len(contents)), contents, strict=True))
    ]
    more = [{"role": "user", "content": "Second?"}]
    source = "data/p.jsonl:17"
    return Row("a" * 32, "a", 0, False, source, [*ASKED, *more], [{"name": "f"}], answers)


def test_each_turn_has_its_own_words() -> None:
    found = dict(words_of(row_of("one", "two")))

    asked = "First?\nSecond?"
    assert found == {
        ("a" * 32, 0): Words("data/p.jsonl", asked, "one", "about one", 1, 0),
        ("a" * 32, 1): Words("data/p.jsonl", asked, "two", "about two", 1, 1),
    }


def test_an_imported_row_says_what_its_messages_say() -> None:
    said = [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "More?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
    ]
    row = Row("a" * 32, "a", 0, False, "hf://some/data", [*ASKED, *said], [], [])

    found = dict(words_of(row))

    assert found["a" * 32, 0] == Words("hf://some/data", "First?\nMore?", "one", "", 0, 0)
    assert found["a" * 32, 1] == Words("hf://some/data", "First?\nMore?", "", "", 0, 1)


def test_samples_come_with_the_words_of_their_row(store: Store) -> None:
    samples = [replace(s, prompt_key="a" * 32, turn=n) for n, s in enumerate(healthy(2))]
    commit_key = put_commit(store, "b1", [row_of("one", "two")])
    key = RunKeys(RUN).shard(1, "b1")
    store.put_new(key, write_shard(samples, {**source_of(), "commit_key": commit_key}))

    (shard,) = read_with_words(store, key)

    assert [(s.turn, w and w.content) for s, w in shard.pairs()] == [(0, "one"), (1, "two")]


def test_a_shard_whose_rows_are_gone_or_damaged_is_read_without_words(store: Store) -> None:
    commit_key = put_commit(store, "b1", [row_of("one")])
    shards = {1: "run/commits/000001/none.json", 2: commit_key}
    for number, named in shards.items():
        body = write_shard(healthy(2), {**source_of(), "commit_key": named})
        store.put_new(RunKeys(RUN).shard(number, "b"), body)
    store.replace(RunKeys(RUN).data(1, "b1", "att"), b"damaged")

    for number in shards:
        (shard,) = read_with_words(store, RunKeys(RUN).shard(number, "b"))
        assert [words for _sample, words in shard.pairs()] == [None, None]
