"""A training run on disk: weights, optimizer and place, so that it goes on as if never stopped.

Written and read by train.py; export.py reads the weights. One folder per step under
`<out>/checkpoints/`: drafter.safetensors, optimizer.safetensors, state.json; nothing is pickled.
Invariant: a folder named `step-*` is complete, because it is filled under another name and then
renamed; the last two are kept. Training from a checkpoint gives the same bits as without the stop.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import Json
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.online.batches import Place

NUM_KEPT = 2
WEIGHTS, OPTIMIZER, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class TrainState:
    """All of a checkpoint that is no tensor."""

    step: int  # steps done
    num_steps: int  # steps asked for
    place: Place
    config: DrafterConfig
    recipe: Json
    corpus_digest: str
    first_loss: float
    last_loss: float
    seconds: float  # trained so far, over all stops
    provenance: Json  # run, target, versions: for people

    @property
    def is_finished(self) -> bool:
        return self.step >= self.num_steps


def save_checkpoint(
    out: Path, state: TrainState, drafter: Drafter, optimizer: torch.optim.Optimizer
) -> Path:
    """Write one, drop all but the last NUM_KEPT; the folder that now is the newest."""
    folder = out / "checkpoints" / f"step-{state.step:08d}"
    draft = folder.with_name(f"writing-{state.step:08d}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file(_contiguous(drafter.state_dict()), draft / WEIGHTS)
    save_file(_contiguous(_optimizer_tensors(drafter, optimizer)), draft / OPTIMIZER)
    (draft / STATE).write_bytes(dump(state))
    for path in draft.iterdir():
        _sync(path)
    draft.rename(folder)
    _sync(folder.parent)
    for old in _folders(out)[:-NUM_KEPT]:
        shutil.rmtree(old)
    return folder


def check_out(out: Path) -> None:
    """Raise BadInput now where checkpoints could not be kept later."""
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out}: can't keep checkpoints there: {error.strerror}") from error


def latest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of an output folder."""
    folders = _folders(out)
    return folders[-1] if folders else None


def read_state(folder: Path) -> TrainState:
    """A checkpoint without its tensors. Raises Missing, Corrupt."""
    if not (folder / STATE).is_file():
        raise Missing(f"{folder}: not a checkpoint (no {STATE})")
    return load(TrainState, (folder / STATE).read_bytes())


def read_drafter(folder: Path) -> Drafter:
    """The weights alone, on the CPU. Raises Missing, Corrupt."""
    drafter = Drafter(read_state(folder).config)
    _fill(drafter, _read_tensors(folder / WEIGHTS), folder)
    return drafter


def restore(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    """Weights and optimizer, in place. Raises Corrupt."""
    _fill(drafter, _read_tensors(folder / WEIGHTS), folder)
    tensors = _read_tensors(folder / OPTIMIZER)
    state: dict[int, dict[str, Tensor]] = {}
    for number, (name, _parameter) in enumerate(drafter.named_parameters()):
        prefix = f"{name}/"
        state[number] = {
            k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
        }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _optimizer_tensors(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def _fill(drafter: Drafter, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise Corrupt(f"{folder}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Corrupt(f"{path}: {error}: delete this checkpoint to use the one before") from error
    return tensors


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _folders(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("step-*"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
