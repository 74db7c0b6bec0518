"""When two folders hold the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.weights import weights_sha256


def save(folder: Path, dtype: type[np.generic] = np.float32, name: str = "model") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"layer.weight": np.zeros((4, 4), dtype)}, folder / f"{name}.safetensors")
    return folder


def test_a_copy_has_the_same_identity_and_another_precision_another(tmp_path: Path) -> None:
    one, copy = save(tmp_path / "one"), save(tmp_path / "copy")
    half = save(tmp_path / "half", np.float16)

    assert weights_sha256(one) == weights_sha256(copy)
    assert weights_sha256(one) != weights_sha256(half)


def test_the_split_into_files_and_the_index_belong_to_the_identity(tmp_path: Path) -> None:
    one, split, indexed = (save(tmp_path / name) for name in ("one", "split", "indexed"))
    save(split, name="more")
    (indexed / "model.safetensors.index.json").write_text("{}")

    assert len({weights_sha256(folder) for folder in (one, split, indexed)}) == 3


def test_a_folder_without_weights_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="bound to its target"):
        weights_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(BadInput, match="not a safetensors file"):
        weights_sha256(tmp_path)
