"""What was refused at planning, and whose latest fate is a rejection.

Reads the plan's log, its refusals and the commits in S3; hands rejected prompts, batch by batch, to
-> retry.py and counts to -> cli/fates.py. A prompt that was planned again is rejected only if its
highest generation is. The export's lines are rows that `enqueue` takes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import orjson

from dflash_workers.contract.commit import read_commit
from dflash_workers.contract.plan import read_prompts, read_refusals, read_segments
from dflash_workers.contract.records import (
    Json,
    PlannedBatch,
    Prompt,
    Refusal,
    Rejection,
    Segment,
    Turn,
)
from dflash_workers.contract.store import Store
from producer.ledger import committed_of

NUM_READERS = 16


@dataclass(frozen=True, slots=True)
class RejectedOfBatch:
    """A batch, and those of its prompts whose latest fate is a rejection."""

    segment: Segment  # without its batches: many of these may be kept
    batch: PlannedBatch
    rejections: dict[str, Rejection]  # by prompt key

    def prompts(self, store: Store) -> list[Prompt]:
        """The rejected prompts as they were planned. Raises Missing, Corrupt."""
        planned = read_prompts(store, self.segment, self.batch)
        return [prompt for prompt in planned if prompt.key in self.rejections]


def read_rejected(
    store: Store, run: str, reasons: frozenset[str] = frozenset()
) -> Iterator[RejectedOfBatch]:
    """Every batch with prompts that are rejected for one of the reasons (none given: for any)."""
    newest = _retried(store, run)
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for segment in read_segments(store, run):
            committed = set(committed_of(store, run, segment.number))
            batches = [batch for batch in segment.batches if batch.batch in committed]
            slim = replace(segment, batches=[])
            read = partial(read_commit, store, run, segment.number)
            for batch, commit in zip(
                batches, readers.map(read, [b.batch for b in batches]), strict=True
            ):
                rejections = {
                    rejection.key: rejection
                    for rejection in commit.rejected
                    if newest.get(bytes.fromhex(rejection.key), 0) == batch.generation
                    and (not reasons or rejection.reason in reasons)
                }
                if rejections:
                    yield RejectedOfBatch(slim, batch, rejections)


def rejections(store: Store, run: str) -> tuple[Counter[str], Counter[str]]:
    """(rows refused at planning, prompts rejected by workers), each by reason."""
    refused = Counter(
        refusal.reason
        for segment in read_segments(store, run)
        for refusal in read_refusals(store, segment)
    )
    rejected = Counter(
        rejection.reason
        for batch in read_rejected(store, run)
        for rejection in batch.rejections.values()
    )
    return refused, rejected


def refused_rows(
    store: Store, run: str, reasons: frozenset[str] = frozenset()
) -> Iterator[Refusal]:
    """The rows refused at planning, for the reasons given or for any."""
    for segment in read_segments(store, run):
        for refusal in read_refusals(store, segment):
            if not reasons or refusal.reason in reasons:
                yield refusal


def export(store: Store, run: str, reasons: frozenset[str] = frozenset()) -> Iterator[bytes]:
    """A JSON line that `enqueue` takes for each rejected prompt, of the reasons given or of any."""
    for rejected in read_rejected(store, run, reasons):
        for prompt in rejected.prompts(store):
            row = _row(prompt, rejected.rejections[prompt.key])
            yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _row(prompt: Prompt, rejection: Rejection) -> Json:
    row = prompt.metadata | {
        "id": prompt.id,
        "reason": rejection.reason,
        "detail": rejection.detail,
        "generation": prompt.generation,
        "messages": _messages(prompt.turns),
        "tools": prompt.tools,
        "sampling": prompt.sampling,
        "heldout": prompt.heldout,
    }
    return {name: value for name, value in row.items() if value not in ([], {})}


def _messages(turns: list[Turn]) -> list[Json]:
    """The turns as a recorded conversation that gives the same turns again.

    An answer that was not recorded is an assistant's message without content; between it and the
    next question stand its calls' recorded results.
    """
    messages: list[Json] = []
    for number, turn in enumerate(turns, start=1):
        messages += turn.messages
        results: list[Json] = [{"arguments": {}, **result} for result in turn.tool_results]
        calls = [
            {"type": "function", "function": {key: result[key] for key in ("name", "arguments")}}
            for result in results
        ]
        if calls:
            messages.append({"role": "assistant", "tool_calls": calls})
            messages += [
                {"role": "tool", "name": result["name"], "content": result["content"]}
                for result in results
            ]
        elif number < len(turns):
            messages.append({"role": "assistant"})
    return messages


def _retried(store: Store, run: str) -> dict[bytes, int]:
    """The highest generation of each prompt that was planned more than once."""
    newest: dict[bytes, int] = {}
    for segment in read_segments(store, run):
        for batch in segment.batches:
            if batch.generation > 0:
                for key in map(bytes.fromhex, batch.prompt_keys):
                    newest[key] = max(batch.generation, newest.get(key, 0))
    return newest
