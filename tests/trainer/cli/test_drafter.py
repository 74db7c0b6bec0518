"""The drafter's verbs, one after another on one run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from fleet import app
from tests.trainer.cli.calling import call
from trainer.drafter.export import read_provenance

SMALL = ["--set", "num_steps=3", "--set", "data.num_anchors=4", "--set", "data.batch_size=4"]


def test_a_run_is_trained_exported_and_evaluated(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    out, export = str(tmp_path / "out"), str(tmp_path / "export")
    model = ["--run", run, "--model", str(qwen_dir)]

    tokenized = call("tokenize", "--run", run)
    trained = call("train", *model, "--out", out, *SMALL)
    again = call("train", *model, "--out", out, *SMALL)
    exported = call("export", out, export, *model)
    agreed = call("parity", export, *model, "--max-new-tokens", "8")
    measured = call("evaluate", *model, "--drafter", export, "--max-new-tokens", "8")

    assert tokenized["num_new"] == 0
    assert (trained["num_steps"], trained["resumed_from"]) == (3, None)
    assert again == {**trained, "resumed_from": 3}
    assert exported == {"export": export, "dtype": "bfloat16", "engine": "sglang==0.5.23"}
    assert agreed["faults"] == []
    assert read_provenance(Path(export))["parity"]["num_replays"] == 3
    assert measured["num_prompts"] + measured["num_loops"] == 3
    assert measured["num_faults"] == 0
    assert set(measured["acceptance"]["by_source"]) == {"unknown"}  # no plan in this run
    assert measured["speed"]["prompts_at_once"] == 3


def test_a_checkpoint_is_exported_unchecked_where_that_is_asked_for(
    run: str, qwen_dir: Path, tmp_path: Path
) -> None:
    out, export = str(tmp_path / "out"), tmp_path / "export"
    call("train", "--run", run, "--model", str(qwen_dir), "--out", out, *SMALL)

    call("export", out, str(export), "--unchecked")

    assert "parity" not in read_provenance(export)


def test_an_export_for_an_engine_that_would_run_something_else_is_refused(
    run: str, qwen_dir: Path, tmp_path: Path
) -> None:
    out, export = str(tmp_path / "out"), tmp_path / "export"
    markov = ["--set", "drafter.markov_rank=4"]
    call("train", "--run", run, "--model", str(qwen_dir), "--out", out, *SMALL, *markov)
    arguments = ["export", out, str(export), "--unchecked", "--for", "vllm==0.33.0"]

    with pytest.raises(BadInput, match="DSpark head"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)

    assert not export.exists()


def test_a_published_drafter_is_what_its_training_is_compared_with(
    run: str, qwen_dir: Path, tmp_path: Path
) -> None:
    model = ["--run", run, "--model", str(qwen_dir)]
    first, published = str(tmp_path / "first"), str(tmp_path / "published")
    second, export = str(tmp_path / "second"), str(tmp_path / "export")
    call("train", *model, "--out", first, *SMALL)
    call("export", first, published, "--unchecked", "--dtype", "float32")
    call("train", *model, "--out", second, *SMALL, "--from", published)
    call("export", second, export, "--unchecked")
    arguments = ["evaluate", *model, "--drafter", export, "--max-new-tokens", "4"]

    with pytest.raises(BadInput, match="began with 'published'"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    measured = call(*arguments, "--from", published)

    assert measured["num_faults"] == 0


def test_people_are_shown_a_table(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    model = ["--run", run, "--model", str(qwen_dir)]
    out, export = str(tmp_path / "out"), str(tmp_path / "export")
    call("train", *model, "--out", out, *SMALL)
    call("export", out, export, "--unchecked")

    arguments = ["evaluate", *model, "--drafter", export, "--max-new-tokens", "8"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout

    for word in ("source unknown", "turn 0", "part answer", "untrained", "tokens/s with"):
        assert word in shown


def test_a_wrong_drafter_folder_is_named(run: str, qwen_dir: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", "--run", run, "--model", str(qwen_dir), "--drafter", str(tmp_path)]

    with pytest.raises(Missing, match="is it an export"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_verbs_are_listed_without_loading_what_is_slow_to_load() -> None:
    program = (
        "import sys, trainer.cli.drafter, trainer.cli.tokens;"
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
