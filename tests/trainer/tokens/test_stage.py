"""The stage of a fleet: hints, lost hints, killed workers; every shard there, once, right."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import celeryconfig
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import SCHEMA_VERSION, BatchMessage, Row, Segment
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import start_redis
from tests.faults.processes import Process, until
from tests.trainer.tokens.committed import (
    KEYS,
    RUN,
    SPEC,
    STOP,
    THREE_TURNS,
    commit_rows,
    make_answer,
    make_row,
)
from trainer.tokens.counters import Counters
from trainer.tokens.reading import list_shards
from trainer.tokens.shards import read_provenance, read_shard
from trainer.tokens.stage import Sweeper, sweep_run, tokenize_batch
from trainer.tokens.sweep import untokenized

# Objects and their rows. The size of a real run: STAGE_OBJECTS=1805 STAGE_ROWS=500 pytest ...
NUM_OBJECTS = int(os.environ.get("STAGE_OBJECTS", "60"))
NUM_ROWS = int(os.environ.get("STAGE_ROWS", "50"))
TIMEOUT_S = 120 + NUM_OBJECTS * NUM_ROWS / 50


@pytest.fixture
def own_redis(run_settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """The queue has one name for all: a Redis of this test's own."""
    child, url = start_redis(tmp_path)
    with child:
        yield replace(run_settings, redis_url=url)


@pytest.fixture
def told(own_redis: Settings) -> Iterator[Hints]:
    hints = open_hints(own_redis)
    yield hints
    hints.app.close()
    hints.redis.close()


def message(batch: str, segment: int = 1) -> BatchMessage:
    return BatchMessage(RUN, segment, batch)


def facts(batch: str) -> dict[str, object]:
    return {"run": RUN, "segment": 1, "batch": batch, "schema": message(batch).schema}


def queued(hints: Hints) -> set[str]:
    return hints.queued_names(celeryconfig.TOKENIZE_QUEUE)


def test_a_hint_becomes_a_shard_however_often_it_comes(
    run_store: Store, run_settings: Settings
) -> None:
    commit_rows(run_store, "b", [THREE_TURNS])
    counters = Counters()

    tokenize_batch(run_settings, facts("b"), counters)
    body = run_store.get(KEYS.shard(1, "b"))
    tokenize_batch(run_settings, facts("b"), counters)

    assert run_store.get(KEYS.shard(1, "b")) == body
    assert len(read_shard(body)) == 3
    counted = counters.read()
    assert counted["dflash_tokenizer_shards_total"] == 1
    assert counted["dflash_tokenizer_samples_total"] == 3
    assert counted["dflash_tokenizer_tokens_total"] == sum(len(s.ids) for s in read_shard(body))


@pytest.mark.parametrize(
    "hint",
    [
        {"run": RUN},
        {"run": RUN, "segment": 1, "batch": "b", "schema": 99},
        {"run": "nowhere", "segment": 1, "batch": "b", "schema": message("b").schema},
        facts("never-committed"),
    ],
)
def test_a_hint_of_nothing_ends_no_process(
    run_store: Store, run_settings: Settings, hint: dict[str, object]
) -> None:
    counters = Counters()

    tokenize_batch(run_settings, hint, counters)

    assert list_shards(run_store, RUN) == []
    counted = counters.read()
    noted = ("failures", "quarantined")  # who committed nothing can't be told from a lost object
    assert sum(counted[f"dflash_tokenizer_{what}_total"] for what in noted) == 1


def test_a_sweep_finds_what_has_neither_shard_nor_note(
    run_store: Store, own_redis: Settings, told: Hints
) -> None:
    for batch in ("done", "corrupt", "lost"):
        commit_rows(run_store, batch, [THREE_TURNS])
    run_store.replace(KEYS.data(1, "corrupt", "att"), b"damaged")
    for batch in ("done", "corrupt"):
        tokenize_batch(own_redis, facts(batch), Counters())

    sweep_run(own_redis, RUN)

    assert queued(told) == {f"{RUN}/1/lost"}


def test_imported_batches_wait_for_a_worker_with_a_tokenizer(run_store: Store) -> None:
    segment = Segment(SCHEMA_VERSION, 0, [], [], 0, 0, 0, False, road="text")
    run_store.put_new(KEYS.segment(0), dump(segment))
    commit_rows(run_store, "made", [THREE_TURNS], segment=1)
    commit_rows(run_store, "imported", [THREE_TURNS], segment=0, road="text")

    without = [m.batch for m in untokenized(run_store, RUN, has_model=False)]
    with_model = [m.batch for m in untokenized(run_store, RUN, has_model=True)]

    assert (without, with_model) == (["made"], ["imported", "made"])


def test_one_worker_asks_for_a_sweep_and_only_when_nothing_waits(
    own_redis: Settings, told: Hints
) -> None:
    sweepers = [Sweeper(told, own_redis, 30) for _ in range(3)]
    told.tell_tokenizers([message("waiting")])

    for sweeper in sweepers:
        sweeper.look()
    busy = told.num_queued(celeryconfig.TOKENIZE_QUEUE)
    told.redis.flushdb()
    for sweeper in sweepers:
        sweeper.look()

    assert busy == 1
    assert told.num_queued(celeryconfig.TOKENIZE_QUEUE) == 1


def test_every_batch_told_of_is_in_the_queue(told: Hints) -> None:
    assert told.tell_tokenizers(message(f"b{n}") for n in range(250)) == 250

    assert queued(told) == {f"{RUN}/1/b{n}" for n in range(250)}


def make_rows(number: int) -> list[Row]:
    """The same at every call."""
    draw = np.random.default_rng(number)
    lengths = draw.integers(5, (60, 400), (NUM_ROWS, 2))
    ids = iter(draw.integers(3, 900, int(lengths.sum())).tolist())
    return [
        make_row(
            make_answer(list(islice(ids, asked)), [*islice(ids, said), STOP]), name=f"p{number}-{n}"
        )
        for n, (asked, said) in enumerate(lengths.tolist())
    ]


def is_hint(name: str) -> bool:
    """Of a batch; the others ask for sweeps, which go on."""
    return name.startswith(f"{RUN}/")


def celery(app: str, run: str) -> list[str]:
    options = ["--queues", celeryconfig.TOKENIZE_QUEUE, "--concurrency=1", "--without-gossip"]
    options += ["--without-mingle", f"--hostname={run}@%h"]
    return [sys.executable, "-m", "celery", "--quiet", "-A", app, "worker", *options]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 300)
def test_two_workers_of_which_one_is_killed_three_times_make_every_shard_once(
    run_store: Store, own_redis: Settings, told: Hints, tmp_path: Path
) -> None:
    batches = [f"b{number:04d}" for number in range(NUM_OBJECTS)]
    commit_rows(run_store, "corrupt", [THREE_TURNS])
    run_store.replace(KEYS.data(1, "corrupt", "att"), b"damaged")
    environ = own_redis.environment()
    follow = [sys.executable, "-m", "fleet", "tokenize", "--follow", "--run", RUN]
    steady = Process("steady", follow, tmp_path, environ)
    killed = Process("killed", celery("tests.trainer.tokens.quick_stage", "k"), tmp_path, environ)
    made = KEYS.shard(1, batches[0]).rpartition("/")[0]

    def num_made() -> int:
        time.sleep(NUM_OBJECTS / 2000)  # a listing takes of the cores that the workers need
        return sum(1 for _ in run_store.list(made))

    def live(life: int) -> None:
        """Start, see some more batches committed, most of them told of, and one of them done."""
        killed.start()
        until(lambda: killed.has_logged("ready:"), TIMEOUT_S, "a start")
        before = num_made()
        for number in range(life, NUM_OBJECTS, 4):
            commit_rows(run_store, batches[number], make_rows(number))
            if number % 3:  # a third of the hints is lost
                told.tell_tokenizers([message(batches[number])])
        until(lambda: num_made() > before, TIMEOUT_S, "a shard")

    try:
        steady.start()
        for life in range(4):
            live(life)
            if life < 3:
                killed.kill()
        until(lambda: num_made() == NUM_OBJECTS, TIMEOUT_S, "the last shard")
        until(lambda: not any(map(is_hint, queued(told))), TIMEOUT_S, "an empty queue")
    finally:
        for process in (steady, killed):
            process.close()

    assert num_made() == NUM_OBJECTS
    assert b"sha256" in run_store.get(KEYS.quarantine(1, "corrupt"))
    for number, batch in enumerate(batches):
        samples = read_shard(run_store.get(KEYS.shard(1, batch)))
        answers = [row.answers[0] for row in make_rows(number)]
        expected = [(a.input_ids + a.output_ids, len(a.input_ids)) for a in answers]
        assert [(s.ids.tolist(), s.prompt_len) for s in samples] == expected
    assert read_provenance(run_store.get(KEYS.shard(1, batches[0])))["run"] == SPEC.run
