"""Whose answers the data are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_workers.contract.errors import Conflict, Missing
from dflash_workers.contract.records import RunSpec
from producer.fingerprint import RunOptions, make_spec
from trainer.online.fingerprint import check_target


@pytest.fixture
def spec(qwen_dir: Path) -> RunSpec:
    """Of a run made with the target."""
    return make_spec("r", str(qwen_dir), RunOptions(), None)


def test_the_target_that_a_run_was_made_with_is_its_target(spec: RunSpec, qwen_dir: Path) -> None:
    check_target(spec, str(qwen_dir))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("another config.json", "config.json"),
        ("another tokenizer", "tokenizer.json"),
        ("another weights, their precision or their quantisation", "model.safetensors"),
    ],
)
def test_another_target_is_refused_by_the_name_of_what_differs(
    spec: RunSpec, qwen_dir: Path, tmp_path: Path, name: str, file: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(qwen_dir, other)
    if file == "model.safetensors":
        load = AutoModelForCausalLM.from_pretrained
        load(qwen_dir, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
        shutil.copy(tmp_path / "half" / file, other / file)
    else:
        (other / file).write_bytes((other / file).read_bytes() + b"\n")

    with pytest.raises(Conflict, match=name):
        check_target(spec, str(other))


def test_a_run_whose_template_was_changed_is_refused(spec: RunSpec, qwen_dir: Path) -> None:
    with pytest.raises(Conflict, match="chat template"):
        check_target(replace(spec, chat_template="another"), str(qwen_dir))


def test_a_folder_without_a_config_is_missing(spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="pass --model"):
        check_target(spec, str(tmp_path))
