"""One rank of a measured part: the trainer's own loop, on a target and samples that are random.

Run by processes.py in each rank. Everything is the product's, from packing to the update, but for
the target, which is made on its device instead of being read, and the data, which never end. A rank
leaves what it saw as rank-N.json in the part's folder. Invariant: weights and data are the same in
every part of a run, however its ranks are divided, and so are the losses, to rounding.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import orjson
import torch

from benchmarks.online import GIB, NUM_WARM_UPS, Case, build_target, random_drafter
from benchmarks.random_samples import RandomWalk
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.online.building import Built, device_of, first_state
from trainer.online.checkpoint import TrainState
from trainer.online.keeping import Keeper
from trainer.online.measuring import Heldout
from trainer.online.prefetch import Prefetch
from trainer.online.ranks import Ranks, join
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.recording import Recorder
from trainer.online.rounds import Desk, Rounds
from trainer.online.stopping import Stop
from trainer.online.stopwatch import Stopwatch
from trainer.online.target import FrozenTarget
from trainer.online.topology import Topology, read_launch
from trainer.online.watching import StepRecord

NUM_SENT = 20  # messages that measure a link


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank of a part does."""

    case: Case  # its device is replaced by each rank's own
    recipe: TrainRecipe  # of more steps than are done
    model_dir: Path  # with a configuration and no weights
    out: Path


@dataclass(slots=True)
class Seen:
    """By one rank; steps are those after the warm-ups."""

    rank: int
    has_drafter: bool
    peak_gib: float  # of a GPU, beginning with the steps
    message_bytes: int  # features of one microbatch; 0 where none travel
    link_s: float  # for one message with nothing beside it; 0: not measured by this rank
    phases: list[dict[str, float]]  # seconds of each step
    steps_s: list[float] = field(default_factory=list)  # from step to step; of the leader
    losses: list[float] = field(default_factory=list)  # of the leader, warm-ups included
    num_tokens: list[int] = field(default_factory=list)  # of the leader


class RandomBuilt(Built):
    """A rank's models, of random weights, the same on all ranks."""

    case: Case

    def open_target(self, job: TrainJob, config: DrafterConfig, ranks: Ranks) -> FrozenTarget:
        torch.manual_seed(0)
        return build_target(replace(self.case, device=ranks.device), is_compiled=False)

    def open_drafter(self, job: TrainJob, config: DrafterConfig, target: FrozenTarget) -> Drafter:
        torch.manual_seed(1)
        return random_drafter(config, target.head_VD.device)


class Tally(Stopwatch):
    """Keeps what it was read for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.reads: list[dict[str, float]] = []

    def read(self) -> dict[str, float]:
        self.reads.append(super().read())
        if len(self.reads) == NUM_WARM_UPS and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self.reads[-1]


def measure(plan: Plan) -> None:
    """A rank's life."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # threads that spin would wait for each other on shared cores
    launch = read_launch(os.environ)
    job = TrainJob(plan.recipe, str(plan.model_dir), plan.out, launch=launch)
    device = device_of(launch)
    RandomBuilt.case = plan.case
    with join(launch, Topology(launch.num_ranks, plan.recipe.topology), device) as ranks:
        case, watch = plan.case, Tally(device)
        walk = RandomWalk(case.data, case.num_samples, case.config.vocab_size)
        state = first_state(job, walk, {})
        built = RandomBuilt(job, state, None, ranks, watch)
        seen = Seen(ranks.rank, ranks.has_drafter, 0.0, message_bytes(plan, built, state), 0.0, [])
        if ranks.topology.is_paired:
            seen.link_s = link_s(ranks, seen.message_bytes)
        stop = Stop()
        with Prefetch(walk, state.place, mine=ranks.is_mine, device=device) as batches:
            rounds = Rounds(job, ranks, built, state, batches=batches, stop=stop)
            rounds.run(desk(plan, seen, stop) if ranks.is_leader else None, None)
        ranks.parts_in_order = True
        seen.phases = watch.reads[NUM_WARM_UPS:]
        if device.type == "cuda":
            seen.peak_gib = torch.cuda.max_memory_allocated() / GIB
    path = plan.out / f"rank-{launch.rank}.json"
    path.write_bytes(orjson.dumps(asdict(seen)))


def desk(plan: Plan, seen: Seen, stop: Stop) -> Desk:
    """The leader's: it notes the steps, and asks all to leave when there are enough."""
    began = time.perf_counter()

    def note(record: StepRecord) -> None:
        nonlocal began
        now = time.perf_counter()
        seen.losses.append(record.loss)
        if len(seen.losses) > NUM_WARM_UPS:
            seen.steps_s.append(now - began)
            seen.num_tokens.append(record.num_tokens)
        began = now
        if len(seen.steps_s) == plan.case.num_steps:
            stop.signal = signal.SIGTERM

    return Desk(
        Recorder([], note, None),
        Keeper(plan.out, plan.recipe.num_kept, None, lambda: None),
        Heldout(iter(()), plan.recipe.data, 1),
        dict,
        lambda: 0.0,
    )


def message_bytes(plan: Plan, built: Built, state: TrainState) -> int:
    """What a target sends of one microbatch of full rows."""
    data = plan.recipe.data
    width = len(state.config.target_layer_ids) * state.config.hidden_size
    return data.batch_size * data.max_len * width * built.dtype.itemsize


def link_s(ranks: Ranks, num_bytes: int) -> float:
    """Seconds for one message from the first target to the leader; 0 on the other ranks."""
    sender, leader = ranks.topology.sender(0), ranks.topology.leader
    if ranks.rank not in (sender, leader):
        return 0.0
    began = 0.0
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=ranks.device)
    for number in range(NUM_SENT + NUM_WARM_UPS):
        if number == NUM_WARM_UPS:
            _finish(ranks.device)
            began = time.perf_counter()
        if ranks.rank == sender:
            ranks.send(message, leader).wait()
        else:
            ranks.receive((num_bytes,), torch.uint8, sender).take()
    _finish(ranks.device)
    return (time.perf_counter() - began) / NUM_SENT


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
