"""A run that is tokenized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, renamed, spec_of
from trainer.tokens.shards import Sample


@pytest.fixture
def run(
    store: Store,
    settings: Settings,
    qwen_dir: Path,
    make_samples: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A run with one shard, its plan sealed and empty, and the environment that finds it."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    run = GrowingRun(store, 0, renamed(spec_of(qwen_dir), "maths"))
    run.put(0, make_samples(20) + make_samples(3, heldout=True))
    run.seal()
    return "maths"
