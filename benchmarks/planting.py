"""Whole runs of any size, planned, queued and committed within minutes: for growth.py.

The plan and the hints are the producer's own work (`Run.enqueue`, of rows made as they are read);
the commits are what a worker would have written, through the contract's own writers: each names its
data object with a short answer to every prompt, so that an audit of the run is clean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, islice

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import decompress, load_lines
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Json,
    PlannedBatch,
    Prompt,
    Row,
    Segment,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from producer.api import Run
from producer.intake import EnqueueOptions

BATCH_SIZE = 64
_NUM_WRITERS = 8
_BATCH_S = 80.0  # what a worker would have needed for one
_EVERY_S = 11.4  # one ended: 5.6 prompts a second
_AGO_S = 3 * 86400.0  # the first one: 20,000 of them are over by now


def plant(settings: Settings, num_batches: int) -> None:
    """Plan a sealed run of so many batches and send their hints."""
    options = EnqueueOptions(batch_size=BATCH_SIZE)
    with Run.create(settings, settings.model) as run:
        report = run.enqueue(rows(num_batches * BATCH_SIZE), options)
        run.seal()
    if report.num_batches != num_batches or report.num_sent != num_batches:
        raise RuntimeError(f"{num_batches} batches were to be planned: {report}")


def rows(num_rows: int) -> Iterator[Json]:
    """Input rows, each another question."""
    for number in range(num_rows):
        question = f"What is {number} plus {number + 1}?"
        yield {"id": f"sum-{number}", "messages": [{"role": "user", "content": question}]}


def commit_all(settings: Settings) -> None:
    """Write data and commit of every batch."""
    store = open_store(settings)
    ends_s = count(time.time() - _AGO_S, _EVERY_S)
    with ThreadPoolExecutor(_NUM_WRITERS) as writers:
        for segment in read_segments(store, settings.run):
            if segment.batches:
                frames = store.get(segment.prompts)
                commit = partial(_commit, store, settings.run, segment, frames)
                for _ in writers.map(commit, segment.batches, islice(ends_s, len(segment.batches))):
                    pass
    store.client.close()


def _commit(
    store: Store, run: str, segment: Segment, frames: bytes, batch: PlannedBatch, end_s: float
) -> Commit:
    frame = frames[batch.offset : batch.offset + batch.num_bytes]
    answered = [_answered(prompt) for prompt in load_lines(Prompt, decompress(frame))]
    body, sha256 = seal_rows(answered)
    commit = Commit(
        schema=SCHEMA_VERSION,
        run=run,
        segment=segment.number,
        batch=batch.batch,
        attempt="planted",
        data_key=RunKeys(run).data(segment.number, batch.batch, "planted"),
        sha256=sha256,
        data_bytes=len(body),
        num_rows=len(answered),
        rejected=[],
        input_tokens=2 * len(answered),
        output_tokens=3 * len(answered),
        started_at=end_s - _BATCH_S,
        finished_at=end_s,
        worker="planted",
        engine={},
    )
    return publish(store, commit, body)


def _answered(prompt: Prompt) -> Row:
    answer = Answer(0, [5, 6], [7, 8, 2], [3], "A sum.", "", [], "stop", 0, 0.1, 1)
    messages = [*prompt.turns[0].messages, {"role": "assistant", "content": answer.content}]
    return prompt.completed(messages, [answer], [])
