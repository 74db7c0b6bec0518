"""What was committed -> files on this machine: JSON Lines, Arrow or Parquet, one per batch.

Follows the commits in S3, checks each data object against its commit's sha256 and writes
DIR/<segment>/<batch>.<form> under a temporary name that is changed last. So a file that is there is
whole, and a second pull takes only what is new. All forms have the same columns; what differs from
row to row in type (messages, tools, metadata) is JSON text, so that any reader agrees on the types.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.records import Answer, Json, Row
from dflash_workers.contract.store import Store

NUM_READERS = 8
_NOTE = ".pull.json"  # what the folder's files were chosen by; hidden from who reads `*.json*`

_IDS = pa.list_(pa.int32())
ANSWER = pa.struct(
    [
        pa.field("turn", pa.int32()),
        pa.field("input_ids", _IDS),
        pa.field("output_ids", _IDS),
        pa.field("segments", _IDS),
        pa.field("content", pa.string()),
        pa.field("reasoning_content", pa.string()),
        pa.field("tool_calls", pa.string()),  # JSON
        pa.field("finish_reason", pa.string()),
        pa.field("cached_tokens", pa.int64()),
        pa.field("latency_s", pa.float64()),
        pa.field("seed", pa.int64()),
        pa.field("spec", pa.string()),  # JSON
        pa.field("flags", pa.list_(pa.string())),
    ]
)
_COLUMNS: list[pa.Field[Any]] = [
    pa.field("id", pa.string()),
    pa.field("key", pa.string()),
    pa.field("generation", pa.int32()),
    pa.field("heldout", pa.bool_()),
    pa.field("source", pa.string()),
    pa.field("messages", pa.string()),  # JSON
    pa.field("tools", pa.string()),  # JSON
    pa.field("answers", pa.list_(ANSWER)),
    pa.field("flags", pa.list_(pa.string())),
    pa.field("metadata", pa.string()),  # JSON
]
SCHEMA = pa.schema(_COLUMNS)


class Form(StrEnum):
    """What a file is; also its suffix."""

    JSONL = "jsonl"
    ARROW = "arrow"  # an IPC file
    PARQUET = "parquet"


class Heldout(StrEnum):
    """What becomes of the held-out rows."""

    BOTH = "both"  # they come with the others
    ONLY = "only"
    WITHOUT = "without"


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Which rows, in which form."""

    form: Form = Form.JSONL
    heldout: Heldout = Heldout.BOTH


@dataclass(slots=True)
class PullReport:
    """What one call brought."""

    num_files: int = 0  # new ones
    num_rows: int = 0  # in them
    num_bytes: int = 0  # of them
    num_there: int = 0  # files that were there before


def pull(
    store: Store,
    run: str,
    folder: Path,
    options: PullOptions,
    on_batch: Callable[[int, int], None] | None = None,
) -> PullReport:
    """Write the file of every committed batch that has none. Safe to repeat, or to break off.

    `on_batch` hears (files done, files to write). Raises BadInput where the folder holds another
    pull, Corrupt for data that is not what its commit says, NotEnough for a full disk.
    """
    report = PullReport()
    with _disk(folder):
        _note(folder, run, options)
        wanted = []
        for segment, batch in committed_batches(store, run):
            path = folder / f"{segment:06d}" / f"{batch}.{options.form}"
            if path.exists():
                report.num_there += 1
            else:
                wanted.append((segment, batch, path))

    def fetch(item: tuple[int, str, Path]) -> tuple[int, int]:
        segment, batch, path = item
        rows = read_rows(store, read_commit(store, run, segment, batch))
        chosen = [row for row in rows if _is_wanted(row, options.heldout)]
        return len(chosen), _write(path, chosen, options.form)

    with ThreadPoolExecutor(NUM_READERS) as readers:
        for num_rows, num_bytes in readers.map(fetch, wanted):
            report.num_files += 1
            report.num_rows += num_rows
            report.num_bytes += num_bytes
            if on_batch:
                on_batch(report.num_files, len(wanted))
    return report


def table_of(rows: list[Row]) -> pa.Table:
    """The rows as columns."""
    return pa.Table.from_pylist([_facts(row) for row in rows], schema=SCHEMA)


def _is_wanted(row: Row, heldout: Heldout) -> bool:
    return heldout is Heldout.BOTH or row.heldout == (heldout is Heldout.ONLY)


def _note(folder: Path, run: str, options: PullOptions) -> None:
    """One folder, one choice: files of two would look like one data set."""
    folder.mkdir(parents=True, exist_ok=True)
    note = {"run": run, "as": options.form, "heldout": options.heldout}
    path = folder / _NOTE
    if not path.exists():
        _replace(path, lambda at: at.write_bytes(orjson.dumps(note)))
        return
    try:
        standing = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        standing = None
    if standing != note:
        raise BadInput(f"{folder} holds another pull ({standing}): name another folder")


def _write(path: Path, rows: list[Row], form: Form) -> int:
    """Write a file whole or not at all; return its bytes."""

    def write(at: Path) -> None:
        if form is Form.JSONL:
            lines = (orjson.dumps(_facts(row), option=orjson.OPT_APPEND_NEWLINE) for row in rows)
            at.write_bytes(b"".join(lines))
        elif form is Form.ARROW:
            with pa.OSFile(str(at), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
                writer.write_table(table_of(rows))
        else:
            with pq.ParquetWriter(str(at), SCHEMA, compression="zstd") as writer:
                if rows:  # some readers stumble over an empty row group
                    writer.write_table(table_of(rows))

    with _disk(path):
        path.parent.mkdir(exist_ok=True)
        _replace(path, write)
        return path.stat().st_size


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _facts(row: Row) -> Json:
    """A row in SCHEMA's columns."""
    return {
        "id": row.id,
        "key": row.key,
        "generation": row.generation,
        "heldout": row.heldout,
        "source": row.source,
        "messages": _json(row.messages),
        "tools": _json(row.tools),
        "answers": [_facts_of_answer(answer) for answer in row.answers],
        "flags": row.flags,
        "metadata": _json(row.metadata),
    }


def _facts_of_answer(answer: Answer) -> Json:
    facts = {name: getattr(answer, name) for name in ANSWER.names}
    return facts | {"tool_calls": _json(answer.tool_calls), "spec": _json(answer.spec)}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """The file system's errors as ours."""
    try:
        yield
    except OSError as error:
        raise NotEnough(f"{path}: can't be written: {error.strerror}") from error
