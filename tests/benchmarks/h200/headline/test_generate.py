"""Prompts become a bundle by way of the whole fleet, and a drafter is trained on it alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.h200.headline import generate, training
from benchmarks.h200.headline.bundle import read_bundle, read_run, restore_bundle, save_bundle
from benchmarks.h200.headline.prompt_sets import Split, write_split
from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.fake_engine import FakeEngine
from tests.tiny_model import make_tiny_model
from trainer.drafter.export import lint, read_provenance


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on shared cores take many times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_bundle_holds_what_comes_after_generation_needs_and_overwrites_nothing(
    store: Store, tmp_path: Path
) -> None:
    kept = {
        "r/run.json": b"{}",
        "r/plan/log/000000.json": b"1",
        "r/plan/prompts/000000.ab.jsonl.zst": b"2",
        "r/commits/000000/b.json": b"3",
        "r/tokens/v1/000000/b.arrow": b"4" * 100_000,
    }
    for key, body in (kept | {"r/data/000000/b/a.jsonl.zst": b"5", "other/run.json": b"6"}).items():
        store.put_new(key, body)

    num_objects = save_bundle(store, "r", tmp_path / "run.tar.zst")
    store.replace("r/commits/000000/b.json", b"other")
    store.delete("r/plan/log/000000.json")
    restore_bundle(store, tmp_path / "run.tar.zst")

    assert num_objects == len(kept)
    assert dict(read_bundle(tmp_path / "run.tar.zst")) == kept
    assert store.get("r/plan/log/000000.json") == b"1"
    assert store.get("r/commits/000000/b.json") == b"other"


@pytest.mark.slow
def test_prompts_become_a_bundle_that_a_drafter_is_trained_from(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = str(make_tiny_model(tmp_path / "tiny", weights=True))
    texts = [f"count=12 {number}" for number in range(12)]  # what the engine heeds
    split = Split({"gsm8k": texts[:4], "code": texts[4:10]}, {"code": texts[10:]})
    write_split(split, tmp_path / "prompts")
    for name, value in settings.environment().items():
        if "REDIS" in name or "S3" in name:
            monkeypatch.setenv(name, value)
    folders = {name: str(tmp_path / name) for name in ("prompts", "work", "out")}
    flags = [word for name, path in folders.items() for word in (f"--{name}", path)]
    with FakeEngine(load_tokenizer(model_dir)) as engine:
        flags += ["--model", model_dir, "--engine-url", engine.url, "--samples", "1"]
        generate.main([*flags, "--max-tokens", "64", "--in-flight", "8"])
    bundle, drafters = tmp_path / "work" / generate.BUNDLE, tmp_path / "drafters"
    recipe = ["--recipe", "smollm2_cpu", "--steps", "2"]
    for change in ("data.max_len=4096", "drafter.target_layer_ids=[0]", "drafter.num_layers=1"):
        recipe += ["--set", change]
    wanted = ["--model", model_dir, "--bundle", str(bundle), "--out", str(drafters)]
    training.main([*wanted, "--variant", "one", *recipe])

    _, samples = read_run(bundle, generate.RUN)
    assert sum(sample.heldout for sample in samples) == 2
    assert len(samples) == 2 + 4 * 4 + 6  # the small set's prompts four times each
    audit = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert audit["findings"] == []
    assert audit["num_completed"] == len(samples)
    assert lint(drafters / "one" / "export", "sglang==0.5.17").target_layer_ids == [0]
    assert read_provenance(drafters / "one" / "export")["run"] == generate.RUN
