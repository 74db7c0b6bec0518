"""Which GPUs this machine has, as nvidia-smi tells them.

Asked once at a node's start; hands Gpus to -> checks and machine. An engine is pinned to its GPU by
UUID: CUDA counts GPUs in an order of its own unless told otherwise, nvidia-smi by the bus. Where a
scheduler has set CUDA_VISIBLE_DEVICES, the GPUs outside it are somebody else's.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflash_workers.contract.errors import BadInput, Missing, NotEnough

NVIDIA_SMI = "nvidia-smi"
QUERY = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free", "compute_cap")
TIMEOUT_S = 60.0  # without persistence mode a first call takes many seconds


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as it was at the start."""

    index: str  # nvidia-smi's
    uuid: str
    name: str
    driver: str
    total_mib: int
    free_mib: int
    compute_capability: float  # 9.0 for an H200

    def __str__(self) -> str:
        free = f"{self.free_mib >> 10} of {self.total_mib >> 10} GiB free"
        return f"GPU {self.index} ({self.name}, {free})"


def find_gpus(wanted: Sequence[str], visible: str | None) -> list[Gpu]:
    """The GPUs of this machine, or those `wanted` by index or UUID, in the order of the bus.

    `visible`: CUDA_VISIBLE_DEVICES; None: not set. Raises Missing where there is none, or no
    driver; BadInput for one that isn't there.
    """
    found = parse_gpus(_ask_nvidia_smi().splitlines())
    if visible is not None:
        found = _select(found, visible.split(","), "CUDA_VISIBLE_DEVICES")
    if wanted:
        found = _select(found, wanted, "--gpus")
    if not found:
        raise Missing("no GPU is left: check --gpus and CUDA_VISIBLE_DEVICES, or pass --cpu")
    return found


def parse_gpus(lines: Iterable[str]) -> list[Gpu]:
    """nvidia-smi's CSV, without header and units. Raises NotEnough for what it is not."""
    gpus = []
    for cells in csv.reader(lines, skipinitialspace=True):
        try:
            index, uuid, name, driver, total, free, capability = cells
            gpus.append(Gpu(index, uuid, name, driver, int(total), int(free), float(capability)))
        except ValueError as error:
            raise NotEnough(
                f"nvidia-smi says {','.join(cells)!r} of a GPU: it may have fallen off the bus; "
                "see `nvidia-smi -q` and `dmesg`"
            ) from error
    return gpus


def _ask_nvidia_smi() -> str:
    argv = [NVIDIA_SMI, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise Missing("no nvidia-smi, so no GPU can be used: pass --cpu, or install it") from error
    except subprocess.TimeoutExpired as error:
        raise NotEnough(f"nvidia-smi said nothing for {TIMEOUT_S:g} s: the driver hangs") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise Missing(f"nvidia-smi failed ({done.returncode}): {said[0]}: pass --cpu, or mend it")
    return done.stdout


def _select(gpus: list[Gpu], names: Sequence[str], said_by: str) -> list[Gpu]:
    """Those that are named by index, UUID or a UUID's beginning."""
    chosen = []
    for name in (name.strip() for name in names if name.strip()):
        fitting = [gpu for gpu in gpus if gpu.index == name or gpu.uuid.startswith(_as_uuid(name))]
        if len(fitting) != 1:
            there = ", ".join(gpu.index for gpu in gpus) or "none"
            raise BadInput(f"{said_by} names {name!r}, and the GPUs here are: {there}")
        chosen += fitting
    return [gpu for gpu in gpus if gpu in chosen]


def _as_uuid(name: str) -> str:
    """A bare number is an index and never the beginning of a UUID."""
    return name if name.startswith("GPU-") else f"GPU-{name}" if not name.isdigit() else "index"
