"""A campaign's file: what is planned, who works on it, and what will go wrong.

Read once from TOML by __main__.py; every other module takes its own part. Strict: a key that nobody
knows is an error that names it. Rates and durations are of real time; engines alone may run faster
than the one they stand for (`time_factor`).
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.campaign.kinds import ALL, CLOCKS, REDIS_SILENT, S3_503, S3_LOST, S3_RESET
from dflash_workers.contract.errors import BadUsage, Corrupt
from dflash_workers.contract.records import decode


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is planned before anything starts, and what is added to it."""

    count: int
    bytes: int = 1000  # of a prompt's texts together, on average
    batch_size: int = 64
    two_turns: float = 0.0  # share of prompts that the target answers twice
    keep_waiting: int = 0  # batches in the queue until the last fault: more is planned when fewer
    add_at_once: int = 0  # prompts planned then


@dataclass(frozen=True, slots=True)
class Answers:
    """Their lengths, in tokens: lognormal with a heavy tail."""

    mean_tokens: float
    variation: float = 1.0  # standard deviation over mean
    tail_share: float = 0.0  # of answers that go on and on
    max_tokens: int = 16_000  # where the run cuts an answer


@dataclass(frozen=True, slots=True)
class Engines:
    """Simulated ones, one for each worker, all in one process."""

    preset: str
    time_factor: float = 1.0
    max_running: int = 0  # requests; 0: what the preset says


@dataclass(frozen=True, slots=True)
class Join:
    """Workers that come."""

    at_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Workers:
    """Real ones, each with an engine."""

    in_flight: int
    joins: list[Join]
    grace_s: float = 0.0  # to end what runs, once told to go
    restart_after_s: float = 1.0  # whoever dies is started again after so long

    @property
    def count(self) -> int:
        """All that ever come, those that are started again counted once."""
        return sum(join.count for join in self.joins)


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """Real ones, which make token shards of commits meanwhile."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Between:
    """What stands between the fleet and its services: what isn't there can't be broken."""

    redis_proxy: bool = False
    s3_proxy: bool = False
    clocks: bool = False  # Redis and the workers have wall clocks of their own


@dataclass(frozen=True, slots=True)
class Faults:
    """So many, evenly spread."""

    count: int = 0
    over_s: float = 0.0  # from the first full engines to the last fault
    hold_s: list[float] = field(default_factory=lambda: [2.0, 6.0])  # least and most
    mix: dict[str, float] = field(default_factory=dict)  # kind -> share


@dataclass(frozen=True, slots=True)
class Churn:
    """Spot machines that go at any time."""

    deaths_per_worker_hour: float = 0.0
    notice_share: float = 0.5  # of these are told to go; the others are killed
    over_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """When to look, and when to give up."""

    start_s: float = 120.0  # until every first worker's engine is full
    finish_s: float = 600.0  # from the last fault, or from the start, to the last commit
    sample_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Goals:
    """What this campaign is to show, beside the laws that hold in every one; 0: nothing."""

    fill: float = 0.0
    eta_error: float = 0.0
    rss_slope_mb_per_min: float = 0.0
    redis_mb: float = 0.0
    cpu_ms_per_prompt: float = 0.0  # of workers and tokenizers
    recovery_p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """One campaign."""

    name: str
    seed: int
    prompts: Prompts
    answers: Answers
    engines: Engines
    workers: Workers
    tokenizers: Tokenizers = Tokenizers()
    between: Between = Between()
    faults: Faults = Faults()
    churn: Churn = Churn()
    bounds: Bounds = Bounds()
    goals: Goals = Goals()
    time_commands: bool = False  # at the end: how long `status` and `reconcile` take

    @property
    def faults_over_s(self) -> float:
        """From the first full engines to the last fault that may come."""
        return max(self.faults.over_s, self.churn.over_s)

    def resized(self, factor: float) -> Configuration:
        """The same with that share of prompts, faults and time; of each at least a little."""
        return dataclasses.replace(
            self,
            prompts=dataclasses.replace(
                self.prompts,
                count=max(4 * self.prompts.batch_size, int(self.prompts.count * factor)),
                keep_waiting=int(self.prompts.keep_waiting * factor),
                add_at_once=int(self.prompts.add_at_once * factor),
            ),
            faults=dataclasses.replace(
                self.faults,
                count=min(self.faults.count, max(4, int(self.faults.count * factor))),
                over_s=self.faults.over_s * factor,
            ),
            churn=dataclasses.replace(self.churn, over_s=self.churn.over_s * factor),
        )

    def lasting(self, minutes: float) -> Configuration:
        """The same, with churn and faults over so many minutes."""
        over_s = 60 * minutes
        faults = dataclasses.replace(self.faults, over_s=over_s if self.faults.count else 0.0)
        return dataclasses.replace(
            self, faults=faults, churn=dataclasses.replace(self.churn, over_s=over_s)
        )


def read_configuration(path: Path) -> Configuration:
    """Raises BadUsage, naming the key."""
    try:
        return check(decode(Configuration, tomllib.loads(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, Corrupt) as error:
        raise BadUsage(f"{path}: {error}") from error


def check(configuration: Configuration) -> Configuration:
    """The same. Raises Corrupt where parts don't go together."""
    prompts, faults = configuration.prompts, configuration.faults
    between = configuration.between
    needs = {
        "prompts.count and batch_size must be positive": min(prompts.count, prompts.batch_size) > 0,
        "workers.joins: none at 0 s": any(j.at_s == 0 for j in configuration.workers.joins),
        "faults.hold_s: least and most": len(faults.hold_s) == 2,
        "faults.mix is empty": bool(faults.mix) or not faults.count,
        f"faults.mix: unknown kinds {sorted(set(faults.mix) - set(ALL))}": (
            set(faults.mix) <= set(ALL)
        ),
        "prompts.add_at_once: 0 of keep_waiting": (
            prompts.add_at_once > 0 or not prompts.keep_waiting
        ),
        "faults.mix breaks Redis' connections without redis_proxy": (
            between.redis_proxy or REDIS_SILENT not in faults.mix
        ),
        "faults.mix breaks S3's connections without s3_proxy": (
            between.s3_proxy or not {S3_503, S3_LOST, S3_RESET} & set(faults.mix)
        ),
        "faults.mix shakes clocks without between.clocks": (
            between.clocks or CLOCKS not in faults.mix
        ),
    }
    for fault, holds in needs.items():
        if not holds:
            raise Corrupt(fault)
    return configuration
