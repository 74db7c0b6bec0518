"""Conversations that were finished elsewhere -> plan, data and commits of a run.

Reads inputs as `enqueue` does, but keeps the recorded answers; plans them on the road "text", which
no worker is ever sent; then does a worker's part for every such batch that lacks a commit, whoever
planned it. So a call that was killed at any point is finished by the next: the plan comes first,
the data is a pure function of it, and its key is a hash of its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Commit,
    PlannedBatch,
    Prompt,
    Row,
    Segment,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.conversations import FINISHED
from producer.crew import read_in_parallel
from producer.drafts import PlanOptions
from producer.known import KnownLines
from producer.ledger import Ledger
from producer.plan import plan
from producer.rules import Draws, Rules
from producer.segments import read_log
from producer.sources.inputs import Input, read_pieces

NUM_WRITERS = 8


@dataclass(frozen=True, slots=True)
class ImportReport:
    """num_rows = num_planned + num_duplicates + the sum of refused."""

    num_rows: int
    num_planned: int
    num_heldout: int  # of the planned
    num_duplicates: int
    refused: dict[str, int]  # by reason
    num_batches: int  # new ones
    num_committed: int  # batches, those that earlier calls left undone included


def import_finished(
    store: Store,
    settings: Settings,
    inputs: Iterable[Input],
    *,
    heldout: float = 0.02,
    batch_size: int = 64,
) -> ImportReport:
    """Import what is new. Safe to repeat, and to run twice at once.

    `heldout` is a share of 1. Raises BadInput, Conflict for a cancelled run.
    """
    run = settings.require_run()
    if Control(store, run).state() is RunState.CANCELLED:
        raise Conflict(f"run {run!r} is cancelled: import into another run")
    log = read_log(store, run)
    rules = Rules(multi_turn=FINISHED, draws=Draws(heldout_share=heldout))
    candidates = read_in_parallel(read_pieces(inputs, settings), rules, KnownLines(log.lines))
    options = PlanOptions(batch_size=batch_size, road="text", notes={"heldout": heldout})
    planned = plan(log, candidates, options)
    return ImportReport(
        num_rows=planned.num_rows,
        num_planned=planned.num_planned,
        num_heldout=planned.num_heldout,
        num_duplicates=planned.num_duplicates,
        refused=dict(planned.refused),
        num_batches=planned.num_batches,
        num_committed=commit_imported(store, run),
    )


def commit_imported(store: Store, run: str) -> int:
    """Write data and commit of every imported batch that has none; return how many. Repeatable."""
    ledger = Ledger(store, run)
    ledger.refresh()
    num_committed = 0
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        for number, waiting in ledger.open.items():
            if waiting.road != "text":
                continue
            segment = next(read_segments(store, run, number))
            batches = [batch for batch in segment.batches if batch.batch in waiting.sizes]
            commits = list(writers.map(partial(_commit, store, run, segment), batches))
            num_committed += len(commits)
    return num_committed


def _commit(store: Store, run: str, segment: Segment, batch: PlannedBatch) -> Commit:
    started_at = time.time()
    rows = [_row(prompt) for prompt in read_prompts(store, segment, batch)]
    body, sha256 = seal_rows(rows)
    attempt = f"import-{sha256[:16]}"  # whoever makes the same bytes writes the same object
    commit = Commit(
        schema=SCHEMA_VERSION,
        run=run,
        segment=segment.number,
        batch=batch.batch,
        attempt=attempt,
        data_key=RunKeys(run).data(segment.number, batch.batch, attempt),
        sha256=sha256,
        data_bytes=len(body),
        num_rows=len(rows),
        rejected=[],
        input_tokens=0,
        output_tokens=0,
        started_at=started_at,
        finished_at=time.time(),
        worker="import",
        engine={},
        road="text",
    )
    return publish(store, commit, body)


def _row(prompt: Prompt) -> Row:
    (conversation,) = prompt.turns
    return prompt.completed(conversation.messages, [], [])
