"""This process among the others: sums, messages and features between ranks, over torch.distributed.

Used by train.py and the two sides of topology.py. Small things (what was asked for, what a step
summed) go over gloo; on GPUs features and gradients go over NCCL, unless ranks share a GPU, which
NCCL refuses: then they go over gloo, by way of the host. A process by itself has no group, and
every call is the identity. Invariant: all ranks call the same things in the same order, but for
`send` and `receive`, whose order topology.py argues. A rank that is gone shows as a broken
connection, at once, and is named by liveness.py, which also finds those that hang.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_workers.contract.errors import Draining, LeaseLost, Transient
from dflash_workers.contract.terminal import ExitCode
from trainer.online.liveness import FAILED, LEFT, Liveness
from trainer.online.topology import Launch, Topology

# A rank may wait for one that compiles or starves; a dead one is found otherwise, and sooner.
TIMEOUT = timedelta(minutes=30)
IN_ORDER = (Draining, KeyboardInterrupt, LeaseLost)  # somebody asked to leave: no failure


@dataclass(slots=True, eq=False)
class Sent:
    """A tensor under way; kept until it has arrived."""

    tensor: Tensor
    work: dist.Work
    ranks: Ranks

    def wait(self) -> None:
        """Until the other side has it. Raises Transient where that one is gone."""
        with self.ranks.translated():
            self.work.wait()


@dataclass(slots=True, eq=False)
class Awaited(Sent):
    """A tensor to come."""

    def take(self) -> Tensor:
        """The tensor, once it is there. Raises Transient where the sender is gone."""
        self.wait()
        return self.tensor.to(self.ranks.device)


class Ranks:
    """See the header; made by `join`."""

    def __init__(self, launch: Launch, topology: Topology, device: torch.device) -> None:
        self.rank = launch.rank
        self.topology = topology
        self.device = device
        self.parts_in_order = False  # set to True while all ranks leave at one place
        self.hurt = threading.Event()  # set once a connection to another rank is broken
        self._is_alone = topology.num_ranks == 1
        shares_gpus = launch.num_local_ranks > max(1, torch.cuda.device_count())
        self._over_host = device.type == "cuda" and shares_gpus
        self._drafters: dist.ProcessGroup | None = None
        self._asked: tuple[Tensor, dist.Work] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == self.topology.leader

    @property
    def has_drafter(self) -> bool:
        return self.topology.has_drafter(self.rank)

    def is_mine(self, number: int) -> bool:
        """Whether this rank makes or eats a microbatch."""
        return self.topology.is_mine(self.rank, number)

    def form_groups(self) -> None:
        """Once, by all ranks."""
        if self._is_alone:
            return
        with self.translated():
            self._drafters = dist.new_group(self.topology.drafter_ranks)

    @property
    def drafter_group(self) -> dist.ProcessGroup | None:
        """Of the drafters; None for a process by itself."""
        return self._drafters

    def sum_over_drafters(self, tensor: Tensor) -> None:
        """In place; called by drafters only."""
        if self.topology.num_drafters == 1:
            return
        with self.translated():
            staged = self._staged(tensor)
            dist.all_reduce(staged, group=self._drafters)
            if staged is not tensor:
                tensor.copy_(staged)

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """The leader's values to all drafters, in place; called by drafters only."""
        if self.topology.num_drafters == 1:
            return
        with self.translated():
            for tensor in tensors:
                staged = self._staged(tensor)
                dist.broadcast(staged, src=self.topology.leader, group=self._drafters)
                if staged is not tensor:
                    tensor.copy_(staged)

    def tell(self, message: bytes) -> bytes:
        """The leader's message, to all ranks; what the others pass is ignored."""
        if self._is_alone:
            return message
        with self.translated():
            size = torch.tensor([len(message)])
            dist.broadcast(size, src=self.topology.leader)
            if not int(size):
                return b""
            body = torch.zeros(int(size), dtype=torch.uint8)
            if self.is_leader:
                body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            dist.broadcast(body, src=self.topology.leader)
        return bytes(body.tolist())

    def ask(self, wishes: list[float]) -> list[float]:
        """The sum over all ranks of what each passed in its call BEFORE this one; zeros at first.

        Nobody waits for this step's slowest, and still all ranks learn the same in the same step.
        A process by itself learns at once.
        """
        if self._is_alone:
            return wishes
        with self.translated():
            before = [0.0] * len(wishes)
            if self._asked:
                self._asked[1].wait()
                before = self._asked[0].tolist()
            mine = torch.tensor(wishes, dtype=torch.float64)
            self._asked = (mine, _started(dist.all_reduce(mine, async_op=True)))
        return before

    def send(self, tensor: Tensor, to: int) -> Sent:
        """Start sending; the tensor must not change before it has arrived."""
        with self.translated():
            staged = self._staged(tensor).contiguous()
            return Sent(staged, _started(dist.isend(staged, to)), self)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> Awaited:
        """Start receiving."""
        with self.translated():
            device = torch.device("cpu") if self._over_host else self.device
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return Awaited(tensor, _started(dist.irecv(tensor, sender)), self)

    def finish(self) -> None:
        """What was asked last, and all ranks at one place; before a rank leaves in order."""
        if self._is_alone:
            return
        with self.translated():
            if self._asked:
                self._asked[1].wait()
            dist.all_reduce(torch.zeros(1))

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Raises Transient where another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            self.hurt.set()
            raise Transient(
                f"rank {self.rank}: another rank is gone, so training ends here; the same command "
                f"goes on from the last checkpoint ({_gist(error)})"
            ) from error

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._over_host else tensor


@contextmanager
def join(launch: Launch, topology: Topology, device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks; part from them at the end. Raises Transient where they don't come, and
    ends the process with 1, in order and without a word of its own, where one was lost on the way.
    """
    ranks = Ranks(launch, topology, device)
    if topology.num_ranks == 1:
        yield ranks
        return
    is_over_gpus = device.type == "cuda" and not ranks._over_host
    with ranks.translated():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_over_gpus else "gloo",
            timeout=TIMEOUT,
            device_id=device if is_over_gpus else None,
        )
    try:
        with ranks.translated():
            watch = Liveness(launch, ranks.hurt)
        watch.start()
        with _parting(ranks, watch):
            ranks.form_groups()
            yield ranks
    finally:
        dist.destroy_process_group()


@contextmanager
def _parting(ranks: Ranks, watch: Liveness) -> Iterator[None]:
    """Have the others know how this rank leaves."""
    try:
        yield
    except IN_ORDER:
        _part(ranks, watch)
        raise
    except BaseException:
        is_clear = ranks.hurt.is_set() and watch.wait_until_clear()
        watch.end(LEFT if ranks.hurt.is_set() else FAILED)
        watch.linger()
        if is_clear:
            sys.exit(ExitCode.COULD_NOT)
        raise
    _part(ranks, watch)


def _part(ranks: Ranks, watch: Liveness) -> None:
    """Wait for the others, who may still need the store that this rank keeps."""
    watch.end(LEFT)
    if ranks.parts_in_order:
        ranks.finish()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None is for ranks outside the group
    return work


def _gist(error: Exception) -> str:
    """What torch says, without the place in its source and the advice."""
    return str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0][:200]
