"""A small run that is over, written into S3 and Redis as the fleet would have."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import orjson
import redis

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.events import DIED, JOINED, SAMPLE, note_events
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.prices import Price, Prices, store_prices
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    PlannedBatch,
    Rejection,
    Row,
    RunSpec,
    Sampling,
    Segment,
    Target,
)
from dflash_workers.contract.store import Store

HOSTILE = "</td></svg><script>alert(1)</script><img src=http://evil/x onerror=go()>\"'&\x1b[31m"
START_S = 1_800_000_000.0
NUM_BATCHES = 8
ROWS = 3  # of each batch, and one prompt that is rejected
ANSWER_TOKENS = 100
ANSWER_S = 20.0
BATCH_S = 600.0


@dataclass(frozen=True)
class FinishedRun:
    """Two workers had four batches each, one after the other, half an hour in all."""

    store: Store
    run: str

    def write(self) -> None:
        keys = RunKeys(self.run)
        self.store.put_new(keys.spec, dump(_spec(self.run)))
        planned = [
            PlannedBatch(f"b{n}", [f"{n:02}{i:030}" for i in range(ROWS + 1)], [], [], 0, 0)
            for n in range(NUM_BATCHES)
        ]
        segment = Segment(SCHEMA_VERSION, 0, planned, [], 40, 5, 3, True)
        self.store.put_new(keys.segment(0), dump(segment))
        for number in range(NUM_BATCHES):
            self._commit(number)
        self.store.put_new(keys.data(0, "b0", "lost"), b"of a worker that died")
        store_prices(self.store, self.run, Prices([Price("h200", 3.0)]))
        steps = [{"step": n, "loss": 5.0 - n, "accept_length": 1.0 + n / 2} for n in range(3)]
        body = b"".join(orjson.dumps(step) + b"\n" for step in steps) + b'{"step": 3, "lo'
        self.store.put_new(f"{keys.train(HOSTILE_NAME)}metrics.jsonl", body)

    def write_events(self, client: redis.Redis, hints: Hints) -> None:
        """Now, by Redis' clock: a report on a run of another time leaves them out."""
        note_events(
            client,
            hints.keys,
            [
                (JOINED, "w0", {"process": "p"}),
                (SAMPLE, "", {"in_flight": 30.0, "max_in_flight": 40.0, "kv_use": 0.5}),
                (DIED, "w0", {"process": "p"}),
            ],
        )

    def _commit(self, number: int) -> None:
        rows = [_row(number, index) for index in range(ROWS)]
        body, sha256 = seal_rows(rows)
        from_s = START_S + number // 2 * BATCH_S
        commit = Commit(
            schema=SCHEMA_VERSION,
            run=self.run,
            segment=0,
            batch=f"b{number}",
            attempt="a",
            data_key=RunKeys(self.run).data(0, f"b{number}", "a"),
            sha256=sha256,
            data_bytes=len(body),
            num_rows=ROWS,
            rejected=[Rejection("k", HOSTILE, HOSTILE if number == 0 else "poison", HOSTILE)],
            input_tokens=10 * ROWS,
            output_tokens=ANSWER_TOKENS * ROWS,
            started_at=from_s,
            finished_at=from_s + BATCH_S,
            worker=f"w{number % 2}",
            engine={"tp_size": 1},
            notes={"made_again_tokens": 50} if number == 0 else {},
        )
        publish(self.store, commit, body)


HOSTILE_NAME = "<b>first"


def _row(number: int, index: int) -> Row:
    answer = Answer(
        turn=0,
        input_ids=[1] * 10,
        output_ids=[2] * ANSWER_TOKENS,
        segments=[40, 60] if index == 0 else [ANSWER_TOKENS],
        content=HOSTILE,
        reasoning_content="",
        tool_calls=[],
        finish_reason="stop" if index else "length",
        cached_tokens=0,
        latency_s=ANSWER_S,
        seed=1,
        spec={"spec_accept_length": 2.0 + number / 4, "spec_verify_ct": 40},
    )
    return Row(f"{number}{index}", HOSTILE, 0, False, "s", [], [], [answer])


def _spec(run: str) -> RunSpec:
    digest = hashlib.sha256(run.encode()).hexdigest()
    target = Target(HOSTILE, "c", "t", "t", digest, 512, 512, "float32")
    sampling = Sampling(0.7, 0.9, 20, 128, [2])
    return RunSpec(SCHEMA_VERSION, run, target, "", {}, sampling, "rollout", "escape")
