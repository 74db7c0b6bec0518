"""A prompt of a real plan is found by its id or key in one shard, or people hear why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
import pytest

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.errors import Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import SCHEMA_VERSION, Commit, Prompt, Rejection
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.api import EnqueueOptions, Run
from tests.tiny_model import make_tiny_model
from tests.trainer.gate.making import random_answer, sample_of, source_of
from trainer.tokens.finding import find_samples
from trainer.tokens.shards import Quarantined, Sample, write_shard

NAMES = ("math-1", "Ünï/cødé #7", "a#1", "9")
OPTIONS = EnqueueOptions(samples=2, batch_size=2, heldout=0)


@dataclass(frozen=True)
class WatchedStore(Store):
    """Notes what is read."""

    read: list[str] = field(default_factory=list)

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return Store.get(self, key)


@pytest.fixture
def watched(store: Store) -> WatchedStore:
    return WatchedStore(store.client, store.bucket, store.prefix, store.endpoint)


@pytest.fixture
def planned(settings: Settings, tmp_path: Path) -> Iterator[list[tuple[int, str, list[Prompt]]]]:
    """Rows with ids of people's and one without, two samples of each: (segment, batch, prompts)."""
    rows = [{"id": name, "prompt": f"What is {name}?"} for name in NAMES] + [{"prompt": "Who?"}]
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    with Run.create(settings, make_tiny_model(tmp_path / "tiny")) as run:
        run.enqueue(lines, OPTIONS)
        yield [
            (segment.number, batch.batch, read_prompts(run.store, segment, batch))
            for segment in read_segments(run.store, settings.run)
            for batch in segment.batches
        ]


def samples_of(prompts: list[Prompt], num_turns: int = 1) -> list[Sample]:
    return [
        replace(sample_of(n, random_answer(n, 9)), prompt_key=p.key, id=p.id, turn=turn)
        for n, p in enumerate(prompts)
        for turn in reversed(range(num_turns))
    ]


def commit(store: Store, run: str, place: tuple[int, str], *rejected: Rejection) -> None:
    body, sha256 = seal_rows([])
    keys = RunKeys(run)
    publish(
        store,
        Commit(
            *(SCHEMA_VERSION, run, *place, "att", keys.data(*place, "att"), sha256, len(body), 0),
            *(list(rejected), 0, 0, 0.0, 1.0, "w", {}),
        ),
        body,
    )


def test_every_prompt_of_a_plan_is_found_by_id_and_by_key_in_one_shard(
    watched: WatchedStore, settings: Settings, planned: list[tuple[int, str, list[Prompt]]]
) -> None:
    run, prompts = settings.run, [p for _, _, batch in planned for p in batch]
    for segment, batch, of_batch in planned:
        shard = write_shard(samples_of(of_batch, 2), source_of())
        watched.put_new(RunKeys(run).shard(segment, batch), shard)

    for prompt in prompts:
        for name in (prompt.id, prompt.key):
            watched.read.clear()
            found = find_samples(watched, run, name)
            wanted = [(prompt.key, 0), (prompt.key, 1)]
            assert [(s.prompt_key, s.turn) for s in found if s.id == prompt.id] == wanted
            assert len([key for key in watched.read if key.endswith(".arrow")]) == 1
    assert len(prompts) == 2 * (len(NAMES) + 1)
    assert {"math-1", "math-1#1", "a#1#1"} <= {p.id for p in prompts}


def test_who_has_no_samples_hears_why(
    store: Store, settings: Settings, planned: list[tuple[int, str, list[Prompt]]]
) -> None:
    run, keys = settings.run, RunKeys(settings.run)
    places = [(segment, batch) for segment, batch, _ in planned]
    firsts = [prompts[0] for _, _, prompts in planned]
    for place in places[1:]:
        commit(store, run, place, Rejection(firsts[4].key, firsts[4].id, "context", "too long"))
    store.put_new(keys.quarantine(*places[2]), b'{"error": "sha256 differs"}')
    left_out = [Quarantined(id=firsts[3].id, reason="boundary", detail="turn 0")]
    for place, out in zip(places[3:], (left_out, []), strict=True):
        store.put_new(keys.shard(*place), write_shard([], source_of(), out))
    other = planned[4][2][1]

    reasons = (
        (firsts[0].id, f"{planned[0][1]} is not committed yet"),
        (firsts[1].id, "is not tokenized yet"),
        (firsts[2].key, "quarantined: sha256 differs"),
        (firsts[3].id, "can't say what to learn: boundary"),
        (firsts[4].id, "rejected: context: too long"),
        (other.id, "as empty, looping or garbled"),
        ("nobody", "refused when it was enqueued"),
    )
    for name, reason in reasons:
        with pytest.raises(Missing, match=reason):
            find_samples(store, run, name)


def test_a_prompt_that_was_planned_again_is_found_where_it_was_answered(
    store: Store, settings: Settings, planned: list[tuple[int, str, list[Prompt]]]
) -> None:
    (number, batch, prompts), keys = planned[0], RunKeys(settings.run)
    again = orjson.loads(store.get(keys.segment(number))) | {"number": number + 1}
    store.put_new(keys.segment(number + 1), orjson.dumps(again))
    store.put_new(keys.shard(number, batch), write_shard([], source_of()))
    answered = write_shard(samples_of(prompts), source_of())
    store.put_new(keys.shard(number + 1, batch), answered)

    found = find_samples(store, settings.run, prompts[0].id)

    assert [s.prompt_key for s in found] == [prompts[0].key]
