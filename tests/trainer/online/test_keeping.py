"""Checkpoints behind training's back: on disk, in S3, the last few and the best."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_workers.contract.errors import AccessDenied, Corrupt
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_at_random
from trainer.online import checkpoint
from trainer.online.batches import Place
from trainer.online.checkpoint import (
    OPTIMIZER,
    STATE,
    TrainState,
    checkpoint_folders,
    fill_optimizer,
    read_drafter,
    read_optimizer,
    restore_weights,
    take_snapshot,
    write_checkpoint,
)
from trainer.online.keeping import Keeper, Shelf

PREFIX = "r/train/n/checkpoints/"


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def state(small_config: DrafterConfig) -> TrainState:
    return TrainState(1, 9, Place(number=4), small_config, {}, "d", 1.0, 0.5, 0.1, {})


@pytest.fixture
def drafter(small_config: DrafterConfig) -> Drafter:
    drafter = Drafter(small_config)
    start_at_random(drafter, 0)
    return drafter


def optimizer_of(drafter: Drafter) -> torch.optim.Optimizer:
    return torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)


def step(drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def names(out: Path) -> list[str]:
    return [folder.name for folder in checkpoint_folders(out)]


def write(out: Path, number: int, state: TrainState, drafter: Drafter) -> Path:
    snapshot = take_snapshot(replace(state, step=number), drafter, optimizer_of(drafter))
    return write_checkpoint(out, snapshot)


def in_store(store: Store) -> set[str]:
    """Prefixes, complete or not."""
    return {key.removeprefix(PREFIX).split("/")[0] for key, _size in store.list(PREFIX)}


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 30
    while text not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_last_ones_and_the_best_are_kept_on_disk_and_in_s3(
    store: Store, state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    shelf = Shelf(store, PREFIX)
    keeper = Keeper(tmp_path, 2, shelf)
    lengths = {1: 1.5, 2: None, 3: 1.9, 4: 1.7, 5: None, 6: None}

    for number, length in lengths.items():
        at = replace(state, step=number, accept_length=length)
        keeper.save(take_snapshot(at, drafter, optimizer_of(drafter)))
    keeper.close()

    assert names(tmp_path) == ["step-00000003", "step-00000005", "step-00000006"]
    assert shelf.names()[-1] == "step-00000006"
    assert set(shelf.names()) <= set(names(tmp_path))


def test_another_host_goes_on_from_the_newest_complete_one_in_s3(
    store: Store, state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    optimizer = optimizer_of(drafter)
    step(drafter, optimizer)
    keeper = Keeper(tmp_path / "one", 2, Shelf(store, PREFIX))
    keeper.save(take_snapshot(state, drafter, optimizer))
    keeper.close()
    store.put_new(f"{PREFIX}step-00000009/drafter.safetensors", b"half")  # no state.json yet

    Shelf(store, PREFIX).fetch_newer(tmp_path / "two")

    assert names(tmp_path / "two") == ["step-00000001"]
    other = Drafter(state.config)
    other_optimizer = optimizer_of(other)
    folder = tmp_path / "two" / "checkpoints" / "step-00000001"
    restore_weights(folder, other)
    fill_optimizer(other, other_optimizer, read_optimizer(folder))
    step(drafter, optimizer)
    step(other, other_optimizer)
    pairs = zip(drafter.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_snapshot_does_not_see_what_training_does_next(
    state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    before = drafter.fc.weight.detach().clone()
    snapshot = take_snapshot(state, drafter, optimizer_of(drafter))

    with torch.no_grad():
        drafter.fc.weight.zero_()
    folder = write_checkpoint(tmp_path, snapshot)

    assert torch.equal(read_drafter(folder).fc.weight, before)


def test_large_ones_are_written_in_parts_and_a_missing_part_is_seen(
    state: TrainState, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 20_000)

    folder = write_checkpoint(tmp_path, take_snapshot(state, drafter, optimizer_of(drafter)))

    parts = sorted(p.name for p in folder.glob("drafter*.safetensors"))
    assert len(parts) > 2
    assert torch.equal(read_drafter(folder).fc.weight, drafter.fc.weight)
    (folder / parts[-1]).unlink()
    with pytest.raises(Corrupt):
        read_drafter(folder)


def test_nothing_in_a_checkpoint_is_a_pickle(
    state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    optimizer = optimizer_of(drafter)
    step(drafter, optimizer)

    folder = write_checkpoint(tmp_path, take_snapshot(state, drafter, optimizer))

    kinds = {path.suffix for path in folder.iterdir()}
    assert kinds == {".json", ".safetensors"}
    for path in folder.glob("*.safetensors"):  # a length, then a JSON header
        assert path.read_bytes()[8:9] == b"{"


def test_a_disk_that_fails_is_reported_by_the_next_save(
    state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").touch()  # no folder can be made there
    keeper = Keeper(tmp_path, 2, None)
    keeper.save(take_snapshot(state, drafter, optimizer_of(drafter)))

    with pytest.raises(OSError):
        keeper.wait_written()
    with pytest.raises(OSError):
        keeper.close()


def test_a_death_in_the_middle_of_pruning_stops_no_later_save(
    state: TrainState, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die_inside(folder: Path, *, ignore_errors: bool = False) -> None:
        if (folder / STATE).exists():
            (folder / STATE).unlink()
            raise Killed

    for number in (1, 2):
        write(tmp_path, number, state, drafter)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_inside)
        dying = Keeper(tmp_path, 2, None)
        dying.save(take_snapshot(replace(state, step=3), drafter, optimizer_of(drafter)))
        with pytest.raises(Killed):
            dying.close()

    keeper = Keeper(tmp_path, 2, None)
    keeper.save(take_snapshot(replace(state, step=4), drafter, optimizer_of(drafter)))
    keeper.close()

    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == names(tmp_path) == ["step-00000003", "step-00000004"]


def test_an_older_checkpoint_that_cannot_be_read_stops_no_save_and_is_warned_of(
    state: TrainState, drafter: Drafter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        write(tmp_path, number, replace(state, accept_length=1.5), drafter)
    (tmp_path / "checkpoints" / "step-00000002" / STATE).write_bytes(b'{"step": 2, "num')

    keeper = Keeper(tmp_path, 1, None)
    for number in (3, 4):
        at = replace(state, step=number)
        keeper.save(take_snapshot(at, drafter, optimizer_of(drafter)))
    keeper.close()

    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    assert "step-00000002" in caplog.text


def test_what_a_death_left_behind_is_swept_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("writing-00000003", "removing-00000001", "fetching-00000002", "notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "drafter.safetensors").touch()

    Keeper(tmp_path, 2, None).close()

    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_a_folder_without_a_state_is_no_checkpoint_and_is_written_anew(
    state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    folder = write(tmp_path, 1, state, drafter)
    (folder / STATE).unlink()
    assert names(tmp_path) == []

    write(tmp_path, 1, state, drafter)

    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_pruned_while_it_is_fetched_gives_way_to_the_one_before(
    store: Store,
    state: TrainState,
    drafter: Drafter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in (1, 2):
        Shelf(store, PREFIX).send(write(tmp_path / "one", number, state, drafter))
    pruned = f"{PREFIX}step-00000002/"
    real_list = Store.list

    def list_late(self: Store, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        if prefix == pruned:
            self.delete(f"{pruned}{STATE}")
        return real_list(self, prefix, after)

    monkeypatch.setattr(Store, "list", list_late)
    assert Shelf(store, PREFIX).fetch_newer(tmp_path / "two")

    left = [path.name for path in (tmp_path / "two" / "checkpoints").iterdir()]
    assert left == names(tmp_path / "two") == ["step-00000001"]


def test_a_checkpoint_that_lacks_a_part_in_s3_is_passed_over_with_a_warning(
    store: Store,
    state: TrainState,
    drafter: Drafter,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in (1, 2):
        Shelf(store, PREFIX).send(write(tmp_path / "one", number, state, drafter))
    store.delete(f"{PREFIX}step-00000002/optimizer.safetensors")

    assert Shelf(store, PREFIX).fetch_newer(tmp_path / "two")

    assert names(tmp_path / "two") == ["step-00000001"]
    assert "step-00000002" in caplog.text and "optimizer.safetensors" in caplog.text


def test_half_sent_checkpoints_do_not_stay_in_s3_and_newer_ones_do(
    store: Store, state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    for number in (1, 9):
        store.put_new(f"{PREFIX}step-{number:08d}/drafter.safetensors", b"half")
    shelf = Shelf(store, PREFIX)
    for number in (2, 3):
        shelf.send(write(tmp_path, number, state, drafter))

    shelf.keep_only({"step-00000003"})

    assert in_store(store) == {"step-00000003", "step-00000009"}


def test_each_checkpoint_that_does_not_get_to_s3_is_warned_of_and_the_last_one_raised(
    settings: Settings,
    state: TrainState,
    drafter: Drafter,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    denied = open_store(replace(settings, s3_secret_key="wrong"))
    keeper = Keeper(tmp_path, 2, Shelf(denied, PREFIX))

    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            at = replace(state, step=number)
            keeper.save(take_snapshot(at, drafter, optimizer_of(drafter)))
            keeper.wait_written()
            wait_for(f"step-{number:08d}", caplog)
        with pytest.raises(AccessDenied):
            keeper.close()

    warned = [r.getMessage() for r in caplog.records if r.name == "trainer.online.keeping"]
    assert len(warned) == 2 and "step-00000001" in warned[0] and "step-00000002" in warned[1]
    assert all("S3_SECRET_KEY" in message for message in warned)
    denied.client.close()


def test_a_checkpoint_is_wholly_on_disk_before_it_has_its_name(
    store: Store,
    state: TrainState,
    drafter: Drafter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[str] = []
    real_sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    folder = write(tmp_path / "one", 1, state, drafter)
    files = {path.name for path in folder.iterdir()}
    assert set(synced[:-2]) == files
    assert synced[-2:] == ["writing-00000001", "checkpoints"]

    Shelf(store, PREFIX).send(folder)
    synced.clear()
    Shelf(store, PREFIX).fetch_newer(tmp_path / "two")
    assert set(synced[:-2]) == files
    assert synced[-2:] == ["fetching-00000001", "checkpoints"]


def test_an_optimizer_without_its_last_part_is_refused(
    state: TrainState, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 20_000)
    optimizer = optimizer_of(drafter)
    step(drafter, optimizer)
    folder = write_checkpoint(tmp_path, take_snapshot(state, drafter, optimizer))
    parts = list(folder.glob(f"{OPTIMIZER}*"))
    assert len(parts) > 2

    (folder / f"{OPTIMIZER}-{len(parts) - 1}.safetensors").unlink()

    with pytest.raises(Corrupt, match=f"{OPTIMIZER}-{len(parts) - 1}"):
        read_optimizer(folder)
