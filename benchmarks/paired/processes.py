"""Ranks as processes of this host, with what a launcher would tell them.

Used by the parts beside it. They are forked from a process that has imported all there is and has
touched no GPU, so that a part begins in seconds. Unlike a launcher nobody here ends the others when
one of them dies: how they end by themselves is measured. Invariant: none outlives its `with`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Work = Callable[..., None]  # what a rank does; picklable


class Processes:
    """Ranks under way."""

    def __init__(self, ranks: list[BaseProcess], folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder

    def wait(self, timeout_s: float) -> list[int | None]:
        """Their exit codes; None of one that has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return [rank.exitcode for rank in self._ranks]

    def are_alive(self) -> bool:
        """All of them."""
        return all(rank.is_alive() for rank in self._ranks)

    def kill(self, rank: int) -> None:
        """Without a word."""
        self._ranks[rank].kill()

    def log(self) -> str:
        """What all of them have said."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("rank-*.log")))


@contextmanager
def started(num_ranks: int, folder: Path, work: Work, *arguments: Any) -> Iterator[Processes]:
    """`work(*arguments)` in each of them; logs go to `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.paired.measured", "benchmarks.paired.trained"])
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks: list[BaseProcess] = []
    for rank in range(num_ranks):
        environ = _environ(rank, num_ranks, port)
        log = folder / f"rank-{rank}.log"
        ranks.append(context.Process(target=_live, args=(environ, log, work, arguments)))
        ranks[-1].start()
    try:
        yield Processes(ranks, folder)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _environ(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    # NVLink multicast in NCCL has put hosts out of service; the same holds for torch's own.
    environ = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if num_ranks > 1:
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environ


def _live(environ: dict[str, str], log: Path, work: Work, arguments: tuple[Any, ...]) -> None:
    """A process's whole life."""
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environ
    try:
        work(*arguments)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
