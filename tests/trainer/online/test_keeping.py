"""Checkpoints behind training's back: on disk, in S3, the last few and the best."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.store import Store
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_at_random
from trainer.online import checkpoint
from trainer.online.batches import Place
from trainer.online.checkpoint import (
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


def test_the_last_ones_and_the_best_are_kept_on_disk_and_in_s3(
    store: Store, state: TrainState, drafter: Drafter, tmp_path: Path
) -> None:
    shelf = Shelf(store, "r/train/n/checkpoints/")
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
    prefix = "r/train/n/checkpoints/"
    optimizer = optimizer_of(drafter)
    step(drafter, optimizer)
    keeper = Keeper(tmp_path / "one", 2, Shelf(store, prefix))
    keeper.save(take_snapshot(state, drafter, optimizer))
    keeper.close()
    store.put_new(f"{prefix}step-00000009/drafter.safetensors", b"half")  # no state.json yet

    Shelf(store, prefix).fetch_newer(tmp_path / "two")

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
