"""A tiny target, rows to plan, and a run made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import orjson
import pytest

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    Commit,
    Json,
    Rejection,
    Row,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.api import Run
from tests.producer.campaign import Campaign, spec_of
from tests.tiny_model import make_tiny_model

# Several test runs may share few cores, so that a deadline says nothing about the code.
hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")

RowsFile = Callable[..., Path]
CommitBatch = Callable[..., Commit]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def rows_file(tmp_path: Path) -> RowsFile:
    """Writes rows to a file of the given name."""

    def write(rows: list[Json], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return path

    return write


@pytest.fixture
def run(settings: Settings, model_dir: Path) -> Iterator[Run]:
    """A new run of this test alone."""
    with Run.create(settings, model_dir) as run:
        yield run


@pytest.fixture
def campaign(store: Store, hints: Hints, settings: Settings) -> Campaign:
    """A run of this test alone, to be planned and committed by hand."""
    return Campaign(store, hints, spec_of(settings.run))


@pytest.fixture
def commit_batch(run: Run) -> CommitBatch:
    """Does a worker's part for one batch: prompts whose id is listed are rejected."""

    def commit(message: BatchMessage, rejected_ids: tuple[str, ...] = ()) -> Commit:
        keys = RunKeys(message.run)
        segment = next(read_segments(run.store, message.run, message.segment))
        (batch,) = [b for b in segment.batches if b.batch == message.batch]
        prompts = read_prompts(run.store, segment, batch)
        rows = [
            Row(p.key, p.id, p.generation, p.heldout, p.source, p.turns[0].messages, p.tools, [])
            for p in prompts
            if p.id not in rejected_ids
        ]
        rejected = [
            Rejection(p.key, p.id, "context_length", "") for p in prompts if p.id in rejected_ids
        ]
        body, sha256 = seal_rows(rows)
        data_key = keys.data(message.segment, message.batch, "attempt")
        commit = Commit(
            schema=SCHEMA_VERSION,
            run=message.run,
            segment=message.segment,
            batch=message.batch,
            attempt="attempt",
            data_key=data_key,
            sha256=sha256,
            data_bytes=len(body),
            num_rows=len(rows),
            rejected=rejected,
            input_tokens=0,
            output_tokens=0,
            started_at=0.0,
            finished_at=0.0,
            worker="test",
            engine={},
        )
        return publish(run.store, commit, body)

    return commit
