"""A run that is tokenized."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import SCHEMA_VERSION, RunSpec, Sampling, Target
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from trainer.tokens.shards import Sample, Source, write_shard


@pytest.fixture
def run(
    store: Store,
    settings: Settings,
    qwen_dir: Path,
    make_samples: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A run with one shard, and the environment that finds it."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    config_sha256 = hashlib.sha256((qwen_dir / "config.json").read_bytes()).hexdigest()
    target = Target("tiny", config_sha256, "", "", "", 512, 512, "float32")
    spec = RunSpec(
        SCHEMA_VERSION,
        "maths",
        target,
        "",
        {},
        Sampling(0.0, 1.0, -1, 20, [2]),
        "rollout",
        "escape",
    )
    source = Source(
        road="ids",
        run="maths",
        commit_key="c",
        data_sha256="",
        target_fingerprint="",
        tokenizer_sha256="",
        template_sha256="",
        vocab_size=512,
        stop_token_ids=[],
        tool_version="",
        skipped={},
    )
    samples = make_samples(20) + make_samples(3, heldout=True)
    store.put_new(RunKeys("maths").spec, dump(spec))
    store.put_new(RunKeys("maths").shard(0, "a"), write_shard(samples, source))
    return "maths"
