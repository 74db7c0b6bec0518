"""Token shards: samples as an Arrow IPC file, and back again.

Written by build.py, one per commit, and by compact.py, of many such; read by online/intake.py and
by strangers: plain pyarrow or `datasets` see COLUMNS, one bit of `loss_mask` beside
each of `input_ids`. Where the samples come from stands as JSON in the schema's metadata. Invariant:
a shard that was written can be trained on blindly: ids are the tokenizer's, the loss covers all
of the answer and nothing of the prompt, and the stop id is there exactly when the answer ended.
`content_sha256` covers the samples and nothing else, so it is a pure function of the commit.
Columns are made from flat buffers, never value by value: ids are most of what there is.
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
PROVENANCE = b"dflash"  # the metadata's keys
QUARANTINED = b"dflash.quarantined"
PARTS = b"dflash.parts"  # of a shard that holds several, their provenances
# What a record batch holds at most: its list offsets are 32 bit, and readers load it as a whole.
MAX_BATCH_ROWS = 4096
MAX_BATCH_IDS = 1 << 24


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


class Quarantined(TypedDict):
    """A conversation that the shard leaves out, because nobody can say which tokens to learn."""

    id: str
    reason: str
    detail: str


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


def write_shard(
    samples: Sequence[Sample], source: Source, quarantined: Sequence[Quarantined] = ()
) -> bytes:
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
    metadata = {PROVENANCE: orjson.dumps(provenance)}
    if quarantined:
        metadata[QUARANTINED] = orjson.dumps(quarantined)
    sink = io.BytesIO()
    with new_file(sink, metadata) as file:
        for part in _record_batches(samples):
            file.write_batch(part)
    return sink.getvalue()


def new_file(sink: io.IOBase, metadata: dict[bytes, bytes]) -> pa.RecordBatchFileWriter:
    """A file of COLUMNS to write record batches into; zstd, level 1."""
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    return pa.ipc.new_file(sink, SCHEMA.with_metadata(metadata), options=options)


def read_shard(body: bytes) -> list[Sample]:
    """The samples, in the order written. Raises Corrupt where the bytes are other than written."""
    provenance = read_provenance(body)
    table = read_table(body)
    try:
        samples = [s for batch in table.to_batches() for s in _samples(batch)]
    except (UnicodeDecodeError, ValueError) as error:
        raise Corrupt(f"shard of {provenance['commit_key']}: {error}") from error
    at = 0
    for part in read_parts(body) or [provenance]:
        mine, at = samples[at : at + part["num_samples"]], at + part["num_samples"]
        if _content_sha256(mine) != part["content_sha256"]:
            raise Corrupt(f"shard of {part['commit_key']}: content differs from its hash")
    if at != len(samples):
        raise Corrupt(f"shard of {provenance['commit_key']}: {len(samples)} samples, not {at}")
    return samples


def read_table(body: bytes) -> pa.Table:
    """The columns, well formed but not compared with the content's hash. Raises Corrupt."""
    try:
        table = pa.ipc.open_file(body).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"a token shard that can't be read: {error}") from error
    return table


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


def read_parts(body: bytes) -> list[Provenance]:
    """Where the parts of a compacted shard come from, in order; none of any other. Raises Corrupt.

    Each part's samples follow those of the part before it, and have its `content_sha256`.
    """
    parts = _metadata_list(body, PARTS)
    if any(part.keys() != Provenance.__annotations__.keys() for part in parts):
        raise Corrupt("a compacted token shard of another schema")
    return cast(list[Provenance], parts)


def read_quarantined(body: bytes) -> list[Quarantined]:
    """The conversations that a shard leaves out. Raises Corrupt."""
    return cast(list[Quarantined], _metadata_list(body, QUARANTINED))


def _metadata_list(body: bytes, key: bytes) -> list[dict[str, Any]]:
    try:
        return cast(
            "list[dict[str, Any]]",
            orjson.loads((pa.ipc.open_file(body).schema.metadata or {}).get(key, b"[]")),
        )
    except (pa.ArrowException, OSError, orjson.JSONDecodeError) as error:
        raise Corrupt(f"not a token shard: {error}") from error


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


def _record_batches(samples: Sequence[Sample]) -> Iterator[pa.RecordBatch]:
    begin = num_ids = 0
    for at, sample in enumerate(samples):
        if at > begin and (
            at - begin == MAX_BATCH_ROWS or num_ids + len(sample.ids) > MAX_BATCH_IDS
        ):
            yield _record_batch(samples[begin:at])
            begin, num_ids = at, 0
        num_ids += len(sample.ids)
    if samples:
        yield _record_batch(samples[begin:])


def _record_batch(samples: Sequence[Sample]) -> pa.RecordBatch:
    offsets = np.zeros(len(samples) + 1, dtype=np.int32)
    np.cumsum([len(s.ids) for s in samples], out=offsets[1:])
    prompt_lens = np.array([s.prompt_len for s in samples], dtype=np.int32)
    ids: Any = pa.array(np.concatenate([s.ids for s in samples]), pa.int32())
    bits = np.packbits(_flat_mask(offsets, prompt_lens), bitorder="little")
    mask: Any = pa.BooleanArray.from_buffers(
        pa.bool_(), len(ids), [None, pa.py_buffer(bits.tobytes())]
    )
    bounds: Any = pa.array(offsets)
    columns: dict[str, Any] = {
        "prompt_key": [s.prompt_key for s in samples],
        "id": [s.id for s in samples],
        "turn": [s.turn for s in samples],
        "input_ids": pa.ListArray.from_arrays(bounds, ids),
        "loss_mask": pa.ListArray.from_arrays(bounds, mask),
        "prompt_len": prompt_lens,
        "thinking_end": [s.thinking_end for s in samples],
        "heldout": [s.heldout for s in samples],
        "finish_reason": [s.finish_reason for s in samples],
        "flags": [s.flags for s in samples],
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _samples(batch: pa.RecordBatch) -> Iterator[Sample]:
    lists: Any = batch.column("input_ids")
    bits: Any = batch.column("loss_mask")
    # A copy, because Arrow's own memory is read-only and torch warns of it.
    ids, masks = np.array(lists.flatten(), dtype=np.int32), np.array(bits.flatten(), np.bool_)
    offsets = _from_zero(lists)
    facts = batch.drop_columns(["input_ids", "loss_mask"]).to_pylist()
    for begin, end, fact in zip(offsets[:-1], offsets[1:], facts, strict=True):
        yield Sample(ids=ids[begin:end], **fact)
    prompt_lens = batch.column("prompt_len").to_numpy()
    is_same = np.array_equal(offsets, _from_zero(bits))
    if not is_same or not np.array_equal(masks, _flat_mask(offsets, prompt_lens)):
        raise Corrupt(f"{batch.num_rows} samples: the mask differs from the prompts' lengths")


def _from_zero(lists: Any) -> npt.NDArray[np.int32]:
    offsets: Any = lists.offsets.to_numpy()
    return np.asarray(offsets - offsets[0], dtype=np.int32)


def _flat_mask(
    offsets: npt.NDArray[np.int32], prompt_lens: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """One bool per id of all samples: whether it carries loss."""
    mask = np.ones(offsets[-1], dtype=np.bool_)
    for begin, prompt_len in zip(offsets[:-1].tolist(), prompt_lens.tolist(), strict=True):
        mask[begin : begin + prompt_len] = False
    return mask


def _content_sha256(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for s in samples:
        facts = [s.prompt_key, s.id, s.turn, s.prompt_len, s.thinking_end, s.heldout]
        digest.update(orjson.dumps([*facts, s.finish_reason, s.flags, len(s.ids)]) + b"\n")
        digest.update(s.ids.astype("<i4", copy=False).tobytes())
    return digest.hexdigest()
