"""Is this machine fit for its engines? Asked by -> machine once the model is near.

What can't work raises, in one line that says what to do; what works badly is a warning; where
things lie and how fast they read is said in any case. Drivers by CUDA release: NVIDIA's "CUDA
Toolkit release notes", table of minor version compatibility.
"""

from __future__ import annotations

import logging
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.node.disks import disk_of, read_rate_mb_s
from dflash_workers.node.gpus import Gpu
from dflash_workers.node.installed import Versions

log = logging.getLogger(__name__)

MIN_DRIVER = {11: 450, 12: 525, 13: 580}  # by torch's CUDA
MIN_CAPABILITY = 7.5  # below it SGLang's kernels aren't built
MIN_DISK_BYTES = 1 << 30  # for logs and the engines' compiled kernels
PORT_WAIT_S = 10.0  # for the engines of a node that was just killed
MIN_SHM_BYTES = 1 << 30  # Docker gives 64 MiB unless told otherwise
FREE_SHARE = 0.9  # of a GPU that nobody else uses
WEIGHTS_SHARE = 0.9  # of a GPU's memory; the rest is the least for a KV cache


def check_gpus(gpus: Sequence[Gpu], versions: Versions, model_bytes: int) -> None:
    """Driver, compute capability and memory. Raises BadInput, NotEnough."""
    wanted_driver = MIN_DRIVER.get(versions.cuda_major or 0, 0)
    for gpu in gpus:
        log.info("%s, driver %s, compute %s", gpu, gpu.driver, gpu.compute_capability)
        if int(gpu.driver.partition(".")[0]) < wanted_driver:
            raise BadInput(
                f"{gpu}: driver {gpu.driver} is too old for torch's CUDA {versions.cuda_major}, "
                f"which wants {wanted_driver} or later"
            )
        if gpu.compute_capability < MIN_CAPABILITY:
            raise BadInput(
                f"{gpu}: compute capability {gpu.compute_capability}, the engine wants "
                f"{MIN_CAPABILITY}: leave it out with --gpus"
            )
        if model_bytes > WEIGHTS_SHARE * (gpu.total_mib << 20):
            raise NotEnough(
                f"{gpu}: the model's {model_bytes / 2**30:.0f} GiB leave no room for a KV cache: "
                "take a smaller or quantised model, or larger GPUs"
            )
        if gpu.free_mib < FREE_SHARE * gpu.total_mib:
            log.warning("%s: somebody else uses it; see nvidia-smi", gpu)


def check_ports(host: str, ports: Sequence[int]) -> None:
    """Raise BadInput where something listens on one and goes on to."""
    deadline = time.monotonic() + PORT_WAIT_S
    for port in ports:
        while error := _why_taken(host, port):
            if time.monotonic() > deadline:
                raise BadInput(
                    f"the engine can't listen on {host}:{port}: {error.strerror}: stop what uses "
                    "the port (another node?), or pass --base-port"
                ) from error
            time.sleep(0.2)


def _why_taken(host: str, port: int) -> OSError | None:
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error
    return None


def check_room(folder: Path, shm: Path = Path("/dev/shm")) -> None:
    """Disk for logs, and shared memory. Raises NotEnough."""
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        raise NotEnough(f"{folder}: {free >> 20} MiB of disk free, {MIN_DISK_BYTES >> 20} wanted")
    total = shutil.disk_usage(shm).total if shm.exists() else 0
    if total < MIN_SHM_BYTES:
        log.warning(
            "%s has %d MiB: engines may fail with a bus error; a container gets more with "
            "--shm-size=16g or --ipc=host",
            *(shm, total >> 20),
        )


def tell_disks(places: Mapping[str, Path]) -> None:
    """Where each lies and how fast it reads, a warning where that is over a network."""
    for name, path in places.items():
        disk, rate = disk_of(path), read_rate_mb_s(path)
        speed = f"{rate:.0f} MB/s" if rate else "not measured"
        if disk.is_network:
            log.warning(
                "%s (%s) lies on a network file system (%s, mounted at %s; read with %s): starts "
                "are slow, and it hangs when the network does: put it on a local disk",
                *(name, path, disk.kind, disk.mount, speed),
            )
        else:
            log.info("%s: %s, read with %s (%s)", name, disk.kind, speed, path)


def interpreters(engine_python: Path) -> dict[str, Path]:
    """What runs the engine and us, each by a file worth measuring."""
    return {
        "our interpreter": Path(sys.executable).resolve(),
        "our packages": Path(__file__).resolve(),
        "the engine's interpreter": engine_python.resolve(),
        "the engine's venv": engine_python.parent,
        "the engine's caches": Path.home() / ".cache",  # of compiled kernels
    }
