"""All that the report of a run is made of, read from S3 and, where it is there, Redis.

Called by the `report` verb; page.py shows it. Every commit is read; of the data that they name a
bounded number, evenly over the run, for what only answers know (lengths, latencies, drafts), and
the page says how many. What can't be had (no Redis, no training) is empty and never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import orjson

from dflash_workers.contract.busy import BusyTime
from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.errors import Corrupt, Missing, NotEnough
from dflash_workers.contract.events import Event
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments, read_spec
from dflash_workers.contract.prices import stored_prices
from dflash_workers.contract.records import Commit, Json
from dflash_workers.contract.store import Store

NUM_SAMPLED = 200  # data objects; of 64 prompts each some 13,000 answers
_NUM_READERS = 16

OnBatch = Callable[[int, int], None]  # commits read, commits there


@dataclass(frozen=True, slots=True)
class Done:
    """A commit, as much of it as is kept of each."""

    worker: str
    from_s: float  # since the epoch
    to_s: float
    num_prompts: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """An answer that the engine drafted for."""

    at_s: float  # its batch's commit
    accept_length: float


@dataclass(slots=True)
class Plan:
    """Sums over the plan's log."""

    num_prompts: int = 0
    num_retried: int = 0  # planned again
    num_refused: int = 0
    num_duplicates: int = 0
    is_sealed: bool = False


@dataclass(slots=True)
class Answers:
    """Of the sampled data objects."""

    num_objects: int = 0
    output_tokens: list[int] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    num_continued: int = 0  # by another worker than the one that began
    finish_reasons: Counter[str] = field(default_factory=Counter)
    drafted: list[Drafted] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """Of one run."""

    run: str
    target: str
    plan: Plan
    done: list[Done] = field(default_factory=list)
    completed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    data_bytes: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    busy: BusyTime = field(default_factory=BusyTime)
    cost_usd: dict[str, float] = field(default_factory=dict)
    num_unused: int = 0  # data objects that no commit names
    unused_bytes: int = 0
    answers: Answers = field(default_factory=Answers)
    events: list[Event] = field(default_factory=list)
    has_events: bool = True  # False: Redis could not be asked
    gate: Json | None = None  # passed, verdicts; None: not judged
    training: dict[str, list[Json]] = field(default_factory=dict)  # trainer -> its steps

    @property
    def from_s(self) -> float:
        """The first claim that led to a commit."""
        return min(done.from_s for done in self.done)

    @property
    def to_s(self) -> float:
        """The last commit."""
        return max(done.to_s for done in self.done)


def gather(store: Store, run: str, on_batch: OnBatch, num_sampled: int = NUM_SAMPLED) -> Facts:
    """All but events, gate and local training. Raises Missing where there is no such run,
    NotEnough where nothing is committed.
    """
    facts = Facts(run, read_spec(store, run).target.name, _plan(store, run))
    at = list(committed_batches(store, run))
    if not at:
        raise NotEnough(f"run {run!r} has no commit yet: there is nothing to report")
    sampled = set(_spread(len(at), num_sampled))
    named: set[str] = set()
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        commits = readers.map(lambda place: read_commit(store, run, *place), at)
        kept = []
        for number, commit in enumerate(commits):
            _add_commit(facts, commit)
            named.add(commit.data_key)
            if number in sampled and commit.road == "ids":
                kept.append(commit)
            on_batch(number + 1, len(at))
        for commit, rows in zip(kept, readers.map(partial(_rows, store), kept), strict=True):
            _add_rows(facts.answers, commit, rows)
    _add_unused(facts, store, named)
    prices = stored_prices(store, run)
    facts.cost_usd = prices.cost_usd(facts.busy.gpu_hours()) if prices else {}
    facts.training = _training(store, run)
    return facts


def read_steps(body: bytes) -> list[Json]:
    """The lines of a `metrics.jsonl`; a last one that was cut off is left out."""
    steps = []
    for line in body.splitlines():
        try:
            steps.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            break
    return [step for step in steps if isinstance(step, dict) and "step" in step]


def _plan(store: Store, run: str) -> Plan:
    plan = Plan()
    for segment in read_segments(store, run):
        for batch in segment.batches:
            if batch.generation == 0:
                plan.num_prompts += len(batch.prompt_keys)
            else:
                plan.num_retried += len(batch.prompt_keys)
        plan.num_refused += segment.num_refused
        plan.num_duplicates += segment.num_duplicates
        plan.is_sealed |= segment.sealed
    return plan


def _spread(count: int, num_wanted: int) -> Sequence[int]:
    """So many numbers below `count`, evenly, the first and the last among them."""
    if count <= num_wanted:
        return range(count)
    return [round(n * (count - 1) / (num_wanted - 1)) for n in range(num_wanted)]


def _add_commit(facts: Facts, commit: Commit) -> None:
    num_prompts = commit.num_rows + len(commit.rejected)
    from_s = min(commit.started_at, commit.finished_at)
    facts.done.append(
        Done(commit.worker, from_s, commit.finished_at, num_prompts, commit.output_tokens)
    )
    facts.completed += commit.num_rows
    facts.input_tokens += commit.input_tokens
    facts.output_tokens += commit.output_tokens
    facts.data_bytes += commit.data_bytes
    facts.rejections.update(rejected.reason for rejected in commit.rejected)
    facts.notes.update({name: int(count) for name, count in commit.notes.items()})
    facts.busy.add(commit)


def _rows(store: Store, commit: Commit) -> list[Json]:
    """Answers only; of an object that can't be read, none: `audit` is who says so."""
    try:
        rows = read_rows(store, commit)
    except (Missing, Corrupt):
        return []
    return [
        {
            "num_tokens": len(answer.output_ids),
            "latency_s": answer.latency_s,
            "num_segments": len(answer.segments),
            "finish_reason": answer.finish_reason,
            "accept_length": _accept_length(answer.spec),
        }
        for row in rows
        for answer in row.answers
    ]


def _accept_length(spec: Json) -> float | None:
    """Tokens a verify step, as SGLang tells it of each request."""
    told = spec.get("spec_accept_length")
    return float(told) if isinstance(told, int | float) and told > 0 else None


def _add_rows(answers: Answers, commit: Commit, rows: Sequence[Json]) -> None:
    answers.num_objects += bool(rows)
    for row in rows:
        answers.output_tokens.append(row["num_tokens"])
        answers.latencies_s.append(row["latency_s"])
        answers.num_continued += row["num_segments"] > 1
        answers.finish_reasons[row["finish_reason"]] += 1
        if row["accept_length"]:
            answers.drafted.append(Drafted(commit.finished_at, row["accept_length"]))


def _add_unused(facts: Facts, store: Store, named: set[str]) -> None:
    for key, num_bytes in store.list(RunKeys(facts.run).all_data):
        if key not in named:
            facts.num_unused += 1
            facts.unused_bytes += num_bytes


def _training(store: Store, run: str) -> dict[str, list[Json]]:
    prefix = RunKeys(run).train("").removesuffix("/")
    found = {}
    for key, _size in store.list(prefix):
        name, _, rest = key.removeprefix(prefix).partition("/")
        if rest == "metrics.jsonl":
            found[name] = read_steps(store.get(key))
    return found
