"""Token shards: the samples of one batch as an Arrow IPC file, and back again.

Written by build.py (and by whatever tokenises text of other origin), read by online/batches.py and
by strangers: plain pyarrow or `datasets` see COLUMNS, one bit of `loss_mask` beside
each of `input_ids`. Where the samples come from stands as JSON in the schema's metadata. Invariant:
a shard that was written can be trained on blindly: ids are the tokenizer's, the loss covers all
of the answer and nothing of the prompt, and the stop id is there exactly when the answer ended.
`content_sha256` covers the samples and nothing else, so it is a pure function of the commit.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store

Ids = npt.NDArray[np.int32]

COLUMNS: dict[str, pa.DataType] = {
    "prompt_key": pa.string(),
    "id": pa.string(),
    "turn": pa.int32(),
    "input_ids": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),  # Arrow packs bools into bits
    "prompt_len": pa.int32(),
    "thinking_end": pa.int32(),
    "heldout": pa.bool_(),
    "finish_reason": pa.string(),
    "flags": pa.list_(pa.string()),
}
SCHEMA = pa.schema(COLUMNS)
PROVENANCE = b"dflash"  # the metadata's key
MAX_BATCH_ROWS = 4096  # list offsets are 32 bit: 2^31 ids in a record batch at most


class Source(TypedDict):
    """Where a shard's samples come from: what the writer says."""

    road: str  # "ids": as the engine was prompted and sampled; "text": tokenised again
    run: str
    commit_key: str
    data_sha256: str  # of the data object that the commit names
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    vocab_size: int
    stop_token_ids: list[int]
    tool_version: str
    skipped: dict[str, int]  # answers that do not train, by reason


class Provenance(Source):
    """What a shard's metadata says: its source, and what write_shard counted."""

    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    content_sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One assistant turn: what the target was prompted with, then what it answered."""

    prompt_key: str
    id: str
    turn: int
    ids: Ids
    prompt_len: int  # ids[:prompt_len] carry no loss, ids[prompt_len:] all do
    thinking_end: int  # index in ids of the id that ends the thinking, -1: none
    heldout: bool  # never trained on
    finish_reason: str  # stop | length
    flags: list[str] = field(default_factory=list)

    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """One bool per id."""
        return np.arange(len(self.ids)) >= self.prompt_len


def write_shard(samples: Sequence[Sample], source: Source) -> bytes:
    """The shard's bytes. Raises Corrupt where a sample could not be trained on."""
    for sample in samples:
        _check(sample, source)
    num_tokens = sum(len(s.ids) for s in samples)
    provenance = Provenance(
        **source,
        num_samples=len(samples),
        num_tokens=num_tokens,
        num_loss_tokens=num_tokens - sum(s.prompt_len for s in samples),
        content_sha256=_content_sha256(samples),
    )
    schema = SCHEMA.with_metadata({PROVENANCE: orjson.dumps(provenance)})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        for start in range(0, len(samples), MAX_BATCH_ROWS):
            file.write_batch(_record_batch(samples[start : start + MAX_BATCH_ROWS], schema))
    return sink.getvalue()


def read_shard(body: bytes) -> list[Sample]:
    """The samples, in the order written. Raises Corrupt where the bytes are other than written."""
    provenance = read_provenance(body)
    try:
        table = pa.ipc.open_file(body).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"shard of {provenance['commit_key']}: {error}") from error
    samples = [s for batch in table.to_batches() for s in _samples(batch)]
    if _content_sha256(samples) != provenance["content_sha256"]:
        raise Corrupt(f"shard of {provenance['commit_key']}: content differs from its hash")
    return samples


def read_provenance(body: bytes) -> Provenance:
    """The metadata alone; no column is touched. Raises Corrupt where this is no such shard."""
    try:
        schema = pa.ipc.open_file(body).schema
        provenance = orjson.loads((schema.metadata or {})[PROVENANCE])
    except (pa.ArrowException, OSError, KeyError, orjson.JSONDecodeError) as error:
        raise Corrupt(f"not a token shard: {error}") from error
    if not schema.equals(SCHEMA) or provenance.keys() != Provenance.__annotations__.keys():
        raise Corrupt("a token shard of another schema")
    return cast(Provenance, provenance)


def list_shards(store: Store, run: str) -> list[str]:
    """Keys of a run's shards, in order."""
    return [key for key, _size in store.list(RunKeys(run).tokens) if key.endswith(".arrow")]


def _check(sample: Sample, source: Source) -> None:
    where = f"sample {sample.id!r}, turn {sample.turn}"
    if not 0 < sample.prompt_len < len(sample.ids):
        raise Corrupt(f"{where}: {len(sample.ids)} ids with a prompt of {sample.prompt_len}")
    if sample.ids.min() < 0 or sample.ids.max() >= source["vocab_size"]:
        raise Corrupt(f"{where}: an id outside the vocabulary of {source['vocab_size']}")
    ended = int(sample.ids[-1]) in source["stop_token_ids"]
    if ended != (sample.finish_reason == "stop"):
        raise Corrupt(f"{where}: finished by {sample.finish_reason!r} at id {sample.ids[-1]}")
    if sample.thinking_end != -1 and not sample.prompt_len <= sample.thinking_end < len(sample.ids):
        raise Corrupt(f"{where}: thinking ends at {sample.thinking_end}, outside the answer")


def _record_batch(samples: Sequence[Sample], schema: pa.Schema) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {
        "prompt_key": [s.prompt_key for s in samples],
        "id": [s.id for s in samples],
        "turn": [s.turn for s in samples],
        "input_ids": [s.ids for s in samples],
        "loss_mask": [s.loss_mask() for s in samples],
        "prompt_len": [s.prompt_len for s in samples],
        "thinking_end": [s.thinking_end for s in samples],
        "heldout": [s.heldout for s in samples],
        "finish_reason": [s.finish_reason for s in samples],
        "flags": [s.flags for s in samples],
    }
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _samples(batch: pa.RecordBatch) -> Iterator[Sample]:
    lists: Any = batch.column("input_ids")
    bits: Any = batch.column("loss_mask")
    # A copy, because Arrow's own memory is read-only and torch warns of it.
    ids, masks = np.array(lists.values, dtype=np.int32), np.array(bits.values, dtype=np.bool_)
    bounds = zip(*_bounds(lists), *_bounds(bits), strict=True)
    facts = batch.drop_columns(["input_ids", "loss_mask"]).to_pylist()
    for (begin, end, mask_begin, mask_end), fact in zip(bounds, facts, strict=True):
        sample = Sample(ids=ids[begin:end], **fact)
        if not np.array_equal(masks[mask_begin:mask_end], sample.loss_mask()):
            raise Corrupt(f"sample {sample.id!r}, turn {sample.turn}: mask differs from its prompt")
        yield sample


def _bounds(lists: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    offsets = lists.offsets.to_numpy()
    return offsets[:-1], offsets[1:]


def _content_sha256(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for s in samples:
        facts = [s.prompt_key, s.id, s.turn, s.prompt_len, s.thinking_end, s.heldout]
        digest.update(orjson.dumps([*facts, s.finish_reason, s.flags, len(s.ids)]) + b"\n")
        digest.update(s.ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()
