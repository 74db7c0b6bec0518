"""A run and its plan, as every reader finds them in S3.

Written by producer/ (fingerprint.py, plan.py), read by workers, trainer and the producer itself.
The log's segments are numbered without gaps. A segment names one object with the prompts of all its
batches, each batch a zstd frame of its own: a worker reads a batch with one ranged GET, and the
object as a whole is what `zstd -d` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import decompress, load, load_lines
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    PlannedBatch,
    Prompt,
    Refusal,
    RunSpec,
    Segment,
)
from dflash_workers.contract.store import Store


def read_spec(store: Store, run: str) -> RunSpec:
    """run.json. Raises Missing where there is no such run, Corrupt, BadInput."""
    try:
        spec = load(RunSpec, store.get(RunKeys(run).spec))
    except Missing as error:
        raise Missing(
            f"there is no run {run!r} at {store.url('')}: `dflash-fleet enqueue` creates one"
        ) from error
    if spec.schema != SCHEMA_VERSION:
        raise BadInput(f"run {run!r} has schema {spec.schema}, this is {SCHEMA_VERSION}")
    return spec


def read_segments(store: Store, run: str, first: int = 0) -> Iterator[Segment]:
    """The log from segment `first` on."""
    for number in count(first):
        try:
            yield load(Segment, store.get(RunKeys(run).segment(number)))
        except Missing:
            return


def read_prompts(store: Store, segment: Segment, batch: PlannedBatch) -> list[Prompt]:
    """The prompts of one of the segment's batches. Raises Missing, Corrupt."""
    frame = store.get_range(segment.prompts, batch.offset, batch.num_bytes)
    prompts = load_lines(Prompt, decompress(frame))
    if [prompt.key for prompt in prompts] != batch.prompt_keys:
        raise Corrupt(f"{segment.prompts}: batch {batch.batch} holds others than the log lists")
    return prompts


def read_refusals(store: Store, segment: Segment) -> list[Refusal]:
    """The rows refused beside a segment."""
    if not segment.refusals:
        return []
    return load_lines(Refusal, decompress(store.get(segment.refusals)))
