"""Who makes features and who eats them: the division of a training run's ranks.

`colocated`: every rank has the frozen target and the drafter, and feeds itself. `paired`: T targets
feed D drafters at any ratio, features travel. Either way a target may be split over several ranks
(splitting.py), which look at a microbatch together. Pure arithmetic, read by train.py and its two
sides (colocated.py, paired.py) and by the intake, which builds a rank's own microbatches only.

The rule: microbatch g is eaten by drafter g mod D, and made by that drafter's target (colocated) or
by target g mod T (paired), of whose ranks the first one sends. Every rank goes through its numbers
in ascending order, and so posts its sends and receives in ascending order, with a bounded number of
them open. Invariant: that never deadlocks, at no T:D. Take the smallest g that has not arrived. All
that its maker was to send before it has arrived, so no full buffer keeps the maker from sending it;
all that its eater was to eat before it has arrived, so the eater comes to it, unless it waits for
the other drafters at the end of a step. Then g belongs to a later step, some drafter lacks a number
of the earlier one, and that number is smaller than g: a contradiction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_workers.contract.errors import BadInput


@dataclass(frozen=True, slots=True)
class TopologyRecipe:
    """How ranks are divided; their number is the launcher's."""

    num_targets: int = 0  # targets that feed the ranks left over; 0: colocated
    num_ranks_per_target: int = 1  # tensor parallel, for a target that doesn't fit on one GPU
    shard_drafter: bool = False  # FSDP2 over the drafters: where weights and Adam's state don't fit

    def __post_init__(self) -> None:
        if self.num_targets < 0:
            raise BadInput(f"num_targets must be at least 0, not {self.num_targets}")
        if self.num_ranks_per_target < 1:
            raise BadInput(
                f"num_ranks_per_target must be at least 1, not {self.num_ranks_per_target}"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says of this process."""

    rank: int = 0
    local_rank: int = 0  # on this host
    num_ranks: int = 1
    num_local_ranks: int = 1
    store_host: str = ""  # where ranks meet
    store_port: int = 0
    num_restarts: int = 0  # of all ranks, by an elastic launcher


@dataclass(frozen=True, slots=True)
class Topology:
    """The roles of `num_ranks` ranks: targets first."""

    num_ranks: int
    recipe: TopologyRecipe = field(default_factory=TopologyRecipe)

    def __post_init__(self) -> None:
        """Raises BadInput where no rank is left for a drafter, or some for no whole target."""
        if self.num_drafters < 1:
            raise BadInput(
                f"{self.recipe.num_targets} targets of {self.ranks_per_target} leave none of "
                f"{self.num_ranks} ranks for a drafter: start more processes (torchrun "
                "--nproc-per-node), or --set topology.num_targets=0"
            )
        if not self.is_paired and self.num_ranks % self.ranks_per_target:
            raise BadInput(
                f"{self.num_ranks} ranks can't be divided into targets of {self.ranks_per_target}: "
                "start a multiple of topology.num_ranks_per_target"
            )

    @property
    def is_paired(self) -> bool:
        return self.recipe.num_targets > 0

    @property
    def ranks_per_target(self) -> int:
        return self.recipe.num_ranks_per_target

    @property
    def num_drafters(self) -> int:
        return self.num_ranks - self.recipe.num_targets * self.ranks_per_target

    @property
    def leader(self) -> int:
        """The rank that writes: order, checkpoints, metrics. It always has a drafter."""
        return self.num_ranks - self.num_drafters

    @property
    def drafter_ranks(self) -> list[int]:
        return list(range(self.leader, self.num_ranks))

    def has_drafter(self, rank: int) -> bool:
        return rank >= self.leader

    def eater(self, number: int) -> int:
        """The rank that trains on a microbatch."""
        return self.leader + number % self.num_drafters

    def sender(self, number: int) -> int:
        """The rank whose features of a microbatch are eaten."""
        if not self.is_paired:
            return self.eater(number)
        return number % self.recipe.num_targets * self.ranks_per_target

    def target_of(self, rank: int) -> range:
        """The ranks that form a target together with one that has a part of it."""
        first = rank - rank % self.ranks_per_target
        return range(first, first + self.ranks_per_target)

    def targets(self) -> list[range]:
        """The ranks of each target."""
        num_ranks = self.leader if self.is_paired else self.num_ranks
        return [self.target_of(rank) for rank in range(0, num_ranks, self.ranks_per_target)]

    def is_mine(self, rank: int, number: int) -> bool:
        """Whether `rank` makes or eats a microbatch, so that it needs its tokens."""
        return rank == self.eater(number) or rank in self.target_of(self.sender(number))

    def check_step(self, num_microbatches: int) -> None:
        """Raise BadInput where a step would leave drafters without work, or out of step."""
        if num_microbatches < self.num_drafters:
            raise BadInput(
                f"num_microbatches={num_microbatches} a step can't feed {self.num_drafters} "
                f"drafters: --set num_microbatches={self.num_drafters}, or a multiple"
            )
        if self.recipe.shard_drafter and num_microbatches % self.num_drafters:
            raise BadInput(
                f"shards of a drafter work in step: num_microbatches {num_microbatches} must be a "
                f"multiple of {self.num_drafters}"
            )


def read_launch(environ: Mapping[str, str]) -> Launch:
    """torchrun's variables; without them, a process by itself. Raises BadInput."""
    if "RANK" not in environ:
        return Launch()
    try:
        return Launch(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            num_local_ranks=int(environ["LOCAL_WORLD_SIZE"]),
            store_host=environ["MASTER_ADDR"],
            store_port=int(environ["MASTER_PORT"]),
            num_restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"RANK is set, but {error} is missing or no number: start several processes with "
            "torchrun"
        ) from error
