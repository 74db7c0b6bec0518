"""The verbs, one after another on one run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import SCHEMA_VERSION, Json, RunSpec, Sampling, Target
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from trainer.cli import app
from trainer.tokens.shards import Sample, Source, write_shard

SMALL = ["--set", "num_steps=3", "--set", "data.num_anchors=4", "--set", "data.batch_size=4"]


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


def call(*arguments: str) -> Json:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    facts: Json = orjson.loads(result.stdout)
    return facts


def test_a_run_is_trained_exported_and_evaluated(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    out, export = str(tmp_path / "out"), str(tmp_path / "export")
    model = ["--run", run, "--model", str(qwen_dir)]

    tokenized = call("tokenize", "--run", run)
    trained = call("train", *model, "--out", out, *SMALL)
    again = call("train", *model, "--out", out, *SMALL)
    exported = call("export", out, export)
    measured = call("evaluate", *model, "--drafter", export, "--max-new-tokens", "8")

    assert tokenized["num_new"] == 0
    assert (trained["num_steps"], trained["resumed_from"]) == (3, None)
    assert again == {**trained, "resumed_from": 3}
    assert exported == {"export": export, "dtype": "bfloat16"}
    assert measured["num_prompts"] + measured["num_loops"] == 3
    assert measured["num_faults"] == 0


def test_a_wrong_drafter_folder_is_named(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", "--run", run, "--model", str(qwen_dir), "--drafter", str(tmp_path)]

    with pytest.raises(Missing, match="is it an export"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_verbs_are_listed_without_loading_what_is_slow_to_load() -> None:
    program = (
        "import sys, trainer.cli;"
        "print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.strip() == "[]"


def test_another_target_than_the_runs_is_refused(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(qwen_dir, other)
    with (other / "config.json").open("a") as config:
        config.write("\n")
    arguments = ["train", "--run", run, "--model", str(other), "--out", str(tmp_path / "out")]

    with pytest.raises(Conflict, match="is not the target of run"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_folder_that_can_not_keep_checkpoints_is_refused_before_training(
    run: str, qwen_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    arguments = ["train", "--run", run, "--model", str(qwen_dir), "--out", str(tmp_path / "file")]

    with pytest.raises(BadInput, match="can't keep checkpoints"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
