"""staged.py, fetching.py and disks.py: a model is near, whole, once, and where there is room."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from pathlib import Path

import pytest

from dflash_workers.contract.errors import (
    BadInput,
    Corrupt,
    FleetError,
    Missing,
    NotEnough,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import free_ports
from dflash_workers.node import fetching, staged
from dflash_workers.node.disks import Disk, disk_of, read_rate_mb_s
from dflash_workers.node.staged import CHECKSUMS, DISK, NEVER, RAM, Shelf, in_use, stage_model

NOWHERE = Settings()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Its RAM disk is a folder of the disk's, which takes models as one does."""
    return Shelf(tmp_path / "disk", tmp_path / "ram", RAM)


@pytest.fixture
def model(target_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(target_dir, tmp_path / "tiny")


def content_of(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def room(monkeypatch: pytest.MonkeyPatch, **bytes_of: int) -> None:
    """What is to spare in the roots of these names."""
    monkeypatch.setattr(staged, "_room", lambda root: bytes_of.get(root.name, 1 << 40))


def test_a_folder_of_a_local_disk_is_used_where_it_is(model: Path, tmp_path: Path) -> None:
    assert stage_model(str(model), Shelf(tmp_path / "disk"), NOWHERE) == model
    assert stage_model(str(model), Shelf(tmp_path / "disk", where=NEVER), NOWHERE) == model
    assert not (tmp_path / "disk").exists()


def test_a_folder_of_a_network_disk_is_copied(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        staged, "disk_of", lambda path: Disk("/", "nfs4" if path == model else "ext4")
    )

    folder = stage_model(str(model), Shelf(shelf.disk_root, shelf.ram_root), NOWHERE)

    assert folder.parent == tmp_path / "ram"
    assert content_of(folder) == content_of(model)


def test_a_second_start_finds_the_model_and_moves_no_byte(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stage_model(str(model), shelf, NOWHERE)
    monkeypatch.setattr(fetching, "_copy", None)

    assert stage_model(str(model), shelf, NOWHERE) == first


def test_a_model_that_changed_is_staged_anew(model: Path, shelf: Shelf) -> None:
    first = stage_model(str(model), shelf, NOWHERE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"changed": True}))

    second = stage_model(str(model), shelf, NOWHERE)

    assert second != first
    assert content_of(second) == content_of(model)


def test_a_ram_disk_too_small_is_told_and_the_disk_taken(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room(monkeypatch, ram=100)

    folder = stage_model(str(model), shelf, NOWHERE)

    assert folder.parent == shelf.disk_root
    assert f"don't fit into {shelf.ram_root}" in caplog.text


def test_no_room_anywhere_is_told_before_a_byte_is_moved(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, ram=100, disk=100)
    monkeypatch.setattr(fetching, "_copy", None)

    with pytest.raises(NotEnough, match="no room for the model"):
        stage_model(str(model), shelf, NOWHERE)


def test_a_model_that_nobody_uses_gives_way_and_one_in_use_stays(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used, unused = (shutil.copytree(model, tmp_path / name) for name in ("used", "unused"))
    used_folder, unused_folder = (
        stage_model(str(folder), shelf, NOWHERE) for folder in (used, unused)
    )
    room(monkeypatch, ram=100)

    with in_use(used_folder):
        stage_model(str(model), shelf, NOWHERE)

    assert used_folder.exists()
    assert not unused_folder.exists()


def test_two_starts_at_once_fetch_one_model(
    model: Path, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(stage_model(str(model), shelf, NOWHERE)))
        for _ in range(4)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 1
    assert sum("GB in" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("where", [DISK, NEVER])
def test_a_weight_file_cut_short_is_refused(model: Path, shelf: Shelf, where: str) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])

    with pytest.raises(Corrupt, match=r"model.safetensors: \d+ bytes, and its header means \d+"):
        stage_model(str(model), Shelf(shelf.disk_root, shelf.ram_root, where), NOWHERE)

    assert not [path for path in shelf.disk_root.glob("*") if path.is_dir()]


def test_a_shard_that_the_index_names_and_nobody_has_is_named(model: Path, shelf: Shelf) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(Corrupt, match=r"model-2.safetensors is missing"):
        stage_model(str(model), shelf, NOWHERE)


def test_a_file_that_is_not_what_the_models_checksums_say_is_refused(
    model: Path, shelf: Shelf
) -> None:
    sums = content_of(model)
    listed = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
    (model / CHECKSUMS).write_text(listed)
    assert stage_model(str(model), shelf, NOWHERE)

    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(Corrupt, match=r"config\.json is not what SHA256SUMS says"):
        stage_model(str(model), shelf, NOWHERE)


def test_a_fetch_that_breaks_off_leaves_nothing_in_memory(
    model: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise NotEnough("broken off")

    monkeypatch.setattr(staged._Meter, "__call__", break_off)

    with pytest.raises(NotEnough, match="broken off"):
        stage_model(str(model), shelf, NOWHERE)

    assert not [path for path in shelf.ram_root.iterdir() if path.is_dir()]


def test_a_model_comes_from_s3_in_ranges(
    model: Path,
    shelf: Shelf,
    store: Store,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "RANGE_BYTES", 10_000)
    for path in model.iterdir():
        store.replace(f"models/tiny/{path.name}", path.read_bytes())
    store.replace("models/tiny/original/consolidated.pth", b"another format's")

    folder = stage_model(store.url("models/tiny/"), shelf, settings)

    assert content_of(folder) == content_of(model)
    with pytest.raises(Missing, match="no model there"):
        stage_model(store.url("models/none"), shelf, settings)


def test_a_hub_that_can_not_be_reached_is_told(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")

    with pytest.raises(StoreUnavailable, match=r"hf:org/name@main: could not be fetched"):
        stage_model("hf:org/name@main", shelf, NOWHERE)


@pytest.mark.parametrize(
    ("model_name", "words"),
    [
        ("s3://bucket", "write s3://BUCKET/FOLDER"),
        ("hf:name", "write hf:ORG/NAME"),
        ("/no/such/folder", "no model at /no/such/folder: pass --model"),
        ("", "none given"),
    ],
)
def test_a_place_that_can_be_none_is_told(model_name: str, words: str, shelf: Shelf) -> None:
    with pytest.raises(FleetError, match=words):
        stage_model(model_name, shelf, NOWHERE)


def test_somebody_elses_folder_in_shared_memory_is_not_trusted(
    model: Path, shelf: Shelf, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    shelf.ram_root.symlink_to(tmp_path / "theirs")

    with pytest.raises(BadInput, match="belongs to another user"):
        stage_model(str(model), shelf, NOWHERE)


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [
        ("ext4", False),
        ("overlay", False),
        ("tmpfs", False),
        ("fuse.fuse-overlayfs", False),
        ("nfs4", True),
        ("lustre", True),
        ("fuse.gcsfuse", True),
        ("fuse.sshfs", True),
    ],
)
def test_file_systems_of_networks_are_known(kind: str, is_network: bool) -> None:
    assert Disk("/", kind).is_network == is_network


def test_a_path_lies_on_the_innermost_mount() -> None:
    assert disk_of(Path("/proc/self/status")).kind == "proc"
    assert disk_of(Path("/dev/shm/none/at/all")).is_ram


def test_reading_is_measured_by_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8 << 20))

    rate = read_rate_mb_s(tmp_path)

    assert rate is not None and 1 < rate < 1e6
    assert read_rate_mb_s(tmp_path / "none") is None
