"""A training run on disk: weights, optimizer and place, so that it goes on as if never stopped.

Made and read by train.py, kept by keeping.py; export.py reads the weights. One folder per step
under `<out>/checkpoints/`: drafter, optimizer and random state as safetensors, in parts of at most
PART_BYTES, so that each is one request to S3; state.json. Not torch.distributed.checkpoint, whose
index (`.metadata`) is a pickle, read without a check; nothing here is pickled. A checkpoint knows
no ranks: any number of them goes on from it. Invariant: a folder named `step-*` that holds
state.json is complete, because it is filled and emptied under other names; state.json names its
parts, so that one which is lost is seen. Training from a checkpoint gives the same bits as without
the stop.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.records import Json
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.online.batches import Place
from trainer.online.sharding import whole

FOLDER = "checkpoints"
DRAFTER, OPTIMIZER, RANDOM, STATE = "drafter", "optimizer", "random", "state.json"
FETCHING, _WRITING, _REMOVING = "fetching-", "writing-", "removing-"  # a `step-*` before and after
PART_BYTES = 1 << 30  # below what S3 takes in one request, and what a host can spare
_ADVICE = ": delete this checkpoint to use the one before"

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TrainState:
    """All of a checkpoint that is no tensor."""

    step: int  # steps done
    num_steps: int  # steps asked for
    place: Place  # of the data, at or before the first microbatch that is not done
    config: DrafterConfig
    recipe: Json
    corpus_digest: str
    first_loss: float
    last_loss: float
    seconds: float  # trained so far, over all stops
    provenance: Json  # run, target, versions: for people
    accept_length: float | None = None  # measured after this very step, on held-out samples
    parts: list[str] = field(default_factory=list)  # the files that hold the tensors

    @property
    def is_finished(self) -> bool:
        return self.step >= self.num_steps


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A checkpoint that is not yet written: copies in the host's memory, which training leaves
    alone.
    """

    state: TrainState
    tensors: dict[str, Tensors]  # by kind: DRAFTER, OPTIMIZER, RANDOM


def take_snapshot(
    state: TrainState, drafter: nn.Module, optimizer: torch.optim.Optimizer
) -> Snapshot:
    """Copy all that decides the next step; all ranks of a sharded drafter together."""
    tensors = {
        DRAFTER: drafter.state_dict(),
        OPTIMIZER: optimizer_tensors(drafter, optimizer),
        RANDOM: _random_state(),
    }
    return Snapshot(state, {kind: _copied(found) for kind, found in tensors.items()})


def write_checkpoint(out: Path, snapshot: Snapshot) -> Path:
    """The folder that now is the newest. Of one step there is one: written again, it is kept."""
    step = snapshot.state.step
    folder = out / FOLDER / f"step-{step:08d}"
    if (folder / STATE).is_file():
        return folder
    draft = new_draft(folder, _WRITING)
    parts: list[str] = []
    for kind, tensors in snapshot.tensors.items():
        for number, part in enumerate(_parts(tensors)):
            parts.append(_part_name(kind, number))
            save_file(part, draft / parts[-1])
    (draft / STATE).write_bytes(dump(replace(snapshot.state, parts=parts)))
    publish(draft, folder)
    return folder


def new_draft(folder: Path, prefix: str) -> Path:
    """An empty folder in which to gather what `folder` is to be."""
    draft = _beside(folder, prefix)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, folder: Path) -> None:
    """Give a complete draft its name, once all of it is on disk."""
    for path in (*draft.iterdir(), draft):
        _sync(path)
    if folder.exists():
        remove_checkpoint(folder)
    draft.rename(folder)
    _sync(folder.parent)


def remove_checkpoint(folder: Path) -> None:
    """Under another name: a death on the way leaves no half of a checkpoint."""
    doomed = _beside(folder, _REMOVING)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    _sync(folder.parent)
    shutil.rmtree(doomed)


def sweep(out: Path) -> None:
    """Remove what a process that died was writing, fetching or removing. Not beside a live one."""
    for prefix in (FETCHING, _WRITING, _REMOVING):
        for left in (out / FOLDER).glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)


def check_out(out: Path) -> None:
    """Raise BadInput now where checkpoints could not be kept later."""
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out}: can't keep checkpoints there: {error.strerror}") from error


def checkpoint_folders(out: Path) -> list[Path]:
    """Of an output folder, in order of their steps."""
    return sorted(path.parent for path in (out / FOLDER).glob(f"step-*/{STATE}"))


def latest_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint of an output folder."""
    folders = checkpoint_folders(out)
    return folders[-1] if folders else None


def read_state(folder: Path) -> TrainState:
    """A checkpoint without its tensors. Raises Missing, Corrupt."""
    if not (folder / STATE).is_file():
        raise Missing(f"{folder}: not a checkpoint (no {STATE})")
    return load(TrainState, (folder / STATE).read_bytes())


def missing_files(folder: Path) -> list[str]:
    """What a checkpoint should hold and does not. Raises Corrupt."""
    if not (folder / STATE).is_file():
        return [STATE]
    return [name for name in read_state(folder).parts if not (folder / name).is_file()]


def read_drafter(folder: Path) -> Drafter:
    """The weights alone, on the CPU. Raises Missing, Corrupt."""
    drafter = Drafter(read_state(folder).config)
    _fill(drafter, _read(folder, DRAFTER), folder)
    return drafter


def restore_weights(folder: Path, drafter: Drafter) -> None:
    """Weights in place, and the random state. Raises Corrupt."""
    _fill(drafter, _read(folder, DRAFTER), folder)
    random = _read(folder, RANDOM)
    torch.set_rng_state(random["cpu"])
    if "cuda" in random and torch.cuda.is_available():
        torch.cuda.set_rng_state(random["cuda"])


def read_optimizer(folder: Path) -> Tensors:
    """What `fill_optimizer` takes, on the CPU. Raises Corrupt."""
    return _read(folder, OPTIMIZER)


def optimizer_tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state, by "<parameter>/<what>"; empty before the first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in drafter.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def fill_optimizer(
    drafter: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Inverse of optimizer_tensors."""
    state: dict[int, Tensors] = {}
    for number, (name, _parameter) in enumerate(drafter.named_parameters()):
        prefix = f"{name}/"
        found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if found:
            state[number] = found
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _fill(drafter: Drafter, tensors: Tensors, folder: Path) -> None:
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise Corrupt(f"{folder}: {error}") from error


def _read(folder: Path, kind: str) -> Tensors:
    tensors: Tensors = {}
    names = [name for name in read_state(folder).parts if _kind_of(name) == kind]
    if not names:
        raise Corrupt(f"{folder}: {STATE} names no part of the {kind}{_ADVICE}")
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except (OSError, SafetensorError) as error:
            raise Corrupt(f"{folder / name}: {error}{_ADVICE}") from error
    return tensors


def _part_name(kind: str, number: int) -> str:
    return f"{kind}-{number}.safetensors" if number else f"{kind}.safetensors"


def _kind_of(part_name: str) -> str:
    return part_name.removesuffix(".safetensors").partition("-")[0]


def _beside(folder: Path, prefix: str) -> Path:
    return folder.with_name(folder.name.replace("step-", prefix))


def _parts(tensors: Tensors) -> Iterator[Tensors]:
    """At least one, if only an empty one."""
    part: Tensors = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > PART_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _random_state() -> Tensors:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {
        name: whole(tensor.detach()).to("cpu", copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
