from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.store import Store
from dflash_workers.promotion.drafters import (
    check_drafter,
    list_drafters,
    put_drafter,
    read_provenance,
)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "fast"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "provenance.json").write_text('{"run": "maths"}')
    return folder


def test_a_drafter_is_put_there_once_by_what_it_holds(store: Store, export: Path) -> None:
    first, again = put_drafter(store, export), put_drafter(store, export)
    (export / "model.safetensors").write_bytes(b"others!")
    other = put_drafter(store, export)

    assert first == again != other
    assert list_drafters(store) == sorted([first, other])
    assert store.get(f"drafters/{first}/model.safetensors") == b"weights"
    assert read_provenance(store, first) == {"run": "maths"}


def test_its_checksums_are_those_of_its_files(store: Store, export: Path) -> None:
    drafter = put_drafter(store, export)

    lines = store.get(f"drafters/{drafter}/SHA256SUMS").decode().splitlines()

    assert f"{hashlib.sha256(b'weights').hexdigest()}  model.safetensors" in lines
    assert len(lines) == 3


def test_one_whose_upload_was_broken_off_is_not_there_yet(store: Store, export: Path) -> None:
    drafter = put_drafter(store, export)
    store.delete(f"drafters/{drafter}/SHA256SUMS")

    assert list_drafters(store) == []
    with pytest.raises(Missing, match="there are none"):
        check_drafter(store, drafter)
    assert put_drafter(store, export) == drafter
    check_drafter(store, drafter)


def test_a_folder_that_holds_no_drafter_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="no drafter"):
        put_drafter(store, tmp_path)
