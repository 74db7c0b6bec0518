"""What a campaign found: all that its page, its figures and its verdict are made of.

Filled by conclude.py, drawn by page.py. Times are seconds since the first worker was started
(`t_s`), but for `began_at`; nothing in it grows with the number of prompts: series have a bounded
number of points, and findings are cut. As JSON it is an object of the same names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks.figures import Figure

KINDS = ("worker", "tokenizer", "redis", "s3", "engines", "producer", "campaign")
ENDS_EARLY = ("producer",)  # may have planned everything before the first prompt is done


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time; `t_s` and `value` are of one length."""

    name: str
    unit: str
    t_s: list[float]
    value: list[float]


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process from its start to its end; a worker that was started again is another one."""

    name: str  # "w3", "redis", ...
    kind: str  # one of KINDS
    pid: int
    cpu_s: float  # user and system, its children that were waited for not among it
    rss: Series  # MB
    slope_mb_per_min: float | None  # least squares over the last 80 %; None: it lived too briefly


@dataclass(frozen=True, slots=True)
class Stage:
    """All processes of one kind."""

    kind: str
    cpu_s: float
    cpu_ms_per_prompt: float  # without what processes took to start
    peak_rss_mb: float  # of the largest process


@dataclass(frozen=True, slots=True)
class FaultSeen:
    """One fault that happened."""

    t_s: float
    kind: str
    victim: str  # a worker's or an engine's name; "" where all were hit
    hold_s: float  # how long it stayed broken
    num_running: int  # requests in the victim's engine at that moment
    tokens_in_flight: int  # made by them and answered to nobody
    recovery_s: list[float]  # per batch that it cut: until its first new token elsewhere
    is_alone: bool  # nothing that all lean on was broken around it


@dataclass(frozen=True, slots=True)
class Recovery:
    """How soon what a kind of fault cut went on, where nothing else was broken."""

    kind: str
    num_faults: int
    num_batches: int
    median_s: float | None  # None: no batch was cut
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Oracle:
    """What was planned against what stands in S3, read without the product's readers."""

    num_planned: int
    num_completed: int
    num_rejected: int
    num_lost: int
    num_doubled: int
    num_wrong: int  # answers that are not the engine's
    num_token_rows: int | None  # rows of token shards; None: no tokenizer ran
    num_output_tokens: int
    num_made_tokens: int  # by the engines, whatever became of them
    num_made_again: int  # places of answers that were sampled more than once
    made_again_by: dict[str, int]  # reason -> tokens
    findings: list[str]  # the first few, for people
    audit: dict[str, int]  # the product's own word: its counts, and "findings"


@dataclass(frozen=True, slots=True)
class Result:
    """One campaign."""

    name: str
    command: str
    machine: str
    commit: str
    began_at: str  # ISO 8601, UTC
    configuration: dict[str, Any]  # the campaign's file, with what the command line changed
    facts: dict[str, Any]  # for people: label -> number or text
    figures: list[Figure]
    series: list[Series]
    processes: list[ProcessSeen]
    stages: list[Stage]
    faults: list[FaultSeen]
    left_out: list[str]  # kinds of faults that found nothing to hit
    recoveries: list[Recovery]
    oracle: Oracle
    broken_laws: list[str] = field(default_factory=list)  # empty: all is well

    def as_json(self) -> bytes:
        """One object, stable keys."""
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)

    @classmethod
    def read(cls, path: Path) -> Result:
        """What `as_json` wrote."""
        told = orjson.loads(path.read_bytes())
        lists = {
            "figures": Figure,
            "series": Series,
            "stages": Stage,
            "faults": FaultSeen,
            "recoveries": Recovery,
        }
        for name, kind in lists.items():
            told[name] = [kind(**item) for item in told[name]]
        told["processes"] = [
            ProcessSeen(**(item | {"rss": Series(**item["rss"])})) for item in told["processes"]
        ]
        return cls(**(told | {"oracle": Oracle(**told["oracle"])}))
