"""Every row and every planned prompt has exactly one fate: the proof, over a whole run.

Reads the plan, the commits and the data that they name; writes nothing. A prompt's fate is that of
its highest planned generation: a row of that batch's data object or a rejection in its commit.
Every data object's sha256 is checked on the way, every segment's rows are added up. What is kept of
a prompt is its key as 16 bytes and one small number, so that a million take about 150 MB.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.plan import read_prompts, read_refusals, read_segments
from dflash_workers.contract.records import Commit, PlannedBatch, Row, Segment
from dflash_workers.contract.store import Store

NUM_READERS = 16
_SHOWN_IDS = 5  # of a batch that can't be read as a whole


@dataclass(slots=True)
class Audit:
    """What was found. Both sums hold, unless `findings` says why not.

    num_rows = num_prompts - num_resampled + num_refused + num_duplicates + num_not_drawn;
    num_prompts = num_completed + num_rejected + num_waiting + num_unproven.
    """

    state: str = RunState.ACTIVE.value  # active | paused | cancelled
    num_rows: int = 0  # of input
    num_refused: int = 0
    num_duplicates: int = 0
    num_not_drawn: int = 0
    num_resampled: int = 0  # planned prompts that are a row's second sample or a later one
    num_prompts: int = 0  # planned, in whatever generation
    num_retried: int = 0  # of these, planned again
    num_completed: int = 0
    num_rejected: int = 0
    num_waiting: int = 0  # no commit yet; of a cancelled run there will be none
    num_unproven: int = 0  # committed, but with no fate to be found, or with several
    num_data_objects: int = 0  # whose sha256 was found right
    findings: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every row and every planned prompt has exactly one fate."""
        return not self.findings and not self.num_waiting


class Outcome(IntEnum):
    """What became of a prompt in one generation."""

    WAITING = 0
    COMPLETED = 1
    REJECTED = 2
    UNPROVEN = 3


def audit(store: Store, run: str, on_batch: Callable[[int, int], None] | None = None) -> Audit:
    """Look at every object of a run. `on_batch` hears (batches looked at, batches known of)."""
    result, fates = Audit(state=Control(store, run).state().value), Fates()
    committed = set(committed_batches(store, run))
    num_known = len(committed)
    num_segments, num_batches, sealed = 0, 0, False
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for segment in read_segments(store, run):
            if sealed and any(batch.generation == 0 for batch in segment.batches):
                result.findings.append(f"segment {segment.number}: planned after the run's seal")
            num_segments, sealed = segment.number + 1, segment.sealed
            _add_rows(result, store, segment)
            look = partial(_look, store, run, segment, committed)
            looks = readers.map(look, segment.batches)
            for batch, found in zip(segment.batches, looks, strict=True):
                result.num_data_objects += found.num_data_objects
                result.findings += found.findings
                result.findings += fates.add(batch, found)
                num_batches += 1
                if on_batch:
                    on_batch(num_batches, max(num_known, num_batches))
            committed.difference_update((segment.number, b.batch) for b in segment.batches)
    result.findings += _strays(store, run, committed, num_segments)
    fates.count_into(result)
    return result


@dataclass(slots=True)
class BatchLook:
    """What one batch holds; the two lists run in step with the batch's keys."""

    ids: list[str]
    outcomes: list[Outcome]
    num_data_objects: int = 0
    findings: list[str] = field(default_factory=list)


class Fates:
    """The newest generation of every prompt, and what became of it."""

    def __init__(self) -> None:
        self._newest: dict[bytes, int] = {}  # key -> generation * 4 + outcome

    def add(self, batch: PlannedBatch, found: BatchLook) -> Iterator[str]:
        """Take a batch in, in the log's order; say which prompts should not be planned in it."""
        for key, prompt_id, outcome in zip(
            batch.prompt_keys, found.ids, found.outcomes, strict=True
        ):
            fault = self._settle(bytes.fromhex(key), batch.generation, outcome)
            if fault:
                yield f"prompt {prompt_id!r}: {fault}"

    def count_into(self, result: Audit) -> None:
        """Count prompts by what became of them."""
        outcomes = Counter(fate % 4 for fate in self._newest.values())
        result.num_prompts = len(self._newest)
        result.num_retried = sum(fate >= 4 for fate in self._newest.values())
        result.num_waiting = outcomes[Outcome.WAITING]
        result.num_completed = outcomes[Outcome.COMPLETED]
        result.num_rejected = outcomes[Outcome.REJECTED]
        result.num_unproven = outcomes[Outcome.UNPROVEN]

    def _settle(self, key: bytes, generation: int, outcome: Outcome) -> str:
        before = self._newest.get(key)
        earlier, fate = (-1, Outcome.REJECTED) if before is None else divmod(before, 4)
        if generation <= earlier:
            return f"planned more than once: as generation {generation} after {earlier}"
        self._newest[key] = generation * 4 + outcome
        if generation != earlier + 1:
            return f"planned as generation {generation}, never as {generation - 1}"
        if fate == Outcome.COMPLETED:
            return f"completed as generation {earlier}, yet planned again"
        if fate == Outcome.WAITING:
            return f"planned as generation {generation} while {earlier} has no commit"
        return ""


def _add_rows(result: Audit, store: Store, segment: Segment) -> None:
    """A segment's share of the input rows: do they add up?"""
    if not any(batch.generation for batch in segment.batches):  # a retry's rows are old prompts
        result.num_rows += segment.num_rows
        result.num_refused += segment.num_refused
        result.num_duplicates += segment.num_duplicates
        result.num_not_drawn += segment.num_not_drawn
        result.num_resampled += segment.num_resampled
    first = sum(len(batch.prompt_keys) for batch in segment.batches) - segment.num_resampled
    num_fates = first + segment.num_refused + segment.num_duplicates + segment.num_not_drawn
    if num_fates != segment.num_rows:
        result.findings.append(
            f"segment {segment.number}: {segment.num_rows} rows have {num_fates} fates: {first} "
            f"planned, {segment.num_refused} refused, {segment.num_duplicates} duplicates, "
            f"{segment.num_not_drawn} not drawn"
        )
    try:
        refusals = read_refusals(store, segment)
    except (Missing, Corrupt) as error:
        result.findings.append(f"segment {segment.number}: {error}")
        return
    if len(refusals) > segment.num_refused:
        result.findings.append(
            f"segment {segment.number}: {segment.num_refused} rows refused, but "
            f"{segment.refusals} lists {len(refusals)}"
        )


def _look(
    store: Store, run: str, segment: Segment, committed: set[tuple[int, str]], batch: PlannedBatch
) -> BatchLook:
    """One batch's prompts, commit and data."""
    name = batch_name(segment.number, batch.batch)
    found = BatchLook(batch.prompt_keys, [Outcome.WAITING] * len(batch.prompt_keys))
    try:
        prompts = read_prompts(store, segment, batch)
        found.ids = [prompt.id for prompt in prompts]
        found.findings += [
            f"batch {name}: prompt {p.id!r} is of generation {p.generation}, not {batch.generation}"
            for p in prompts
            if p.generation != batch.generation
        ]
    except (Missing, Corrupt) as error:
        found.findings.append(f"batch {name}: {error}")  # its keys stand for the ids
    if (segment.number, batch.batch) not in committed:
        return found
    found.outcomes = [Outcome.UNPROVEN] * len(batch.prompt_keys)
    try:
        commit = read_commit(store, run, segment.number, batch.batch)
        rows = read_rows(store, commit)
    except (Missing, Corrupt) as error:
        found.findings.append(f"batch {name}: {error}: without a fate: {_shown(found.ids)}")
        return found
    found.num_data_objects = 1
    place = (run, segment.number, batch.batch, segment.road)
    if (commit.run, commit.segment, commit.batch, commit.road) != place:
        found.findings.append(f"batch {name}: its commit is that of another batch or road")
    found.findings += [f"batch {name}: {fault}" for fault in _compare(batch, found, commit, rows)]
    return found


def _compare(
    batch: PlannedBatch, found: BatchLook, commit: Commit, rows: list[Row]
) -> Iterator[str]:
    """Give each planned prompt its outcome; say what is there too often, too rarely or wrongly."""
    outcomes: dict[str, list[Outcome]] = {}
    ids = dict(zip(batch.prompt_keys, found.ids, strict=True))
    for row in rows:
        outcomes.setdefault(row.key, []).append(Outcome.COMPLETED)
        if row.key in ids and (row.id, row.generation) != (ids[row.key], batch.generation):
            yield f"prompt {ids[row.key]!r}: its row is of {row.id!r}, generation {row.generation}"
    for rejection in commit.rejected:
        outcomes.setdefault(rejection.key, []).append(Outcome.REJECTED)
    for i, (key, prompt_id) in enumerate(ids.items()):
        mine = outcomes.pop(key, [])
        if len(mine) == 1:
            found.outcomes[i] = mine[0]
        else:
            yield f"prompt {prompt_id!r} has {len(mine)} fates"
    others = [row.id for row in rows if row.key in outcomes]
    others += [rejection.id for rejection in commit.rejected if rejection.key in outcomes]
    if others:
        yield f"never planned in it: {_shown(others)}"


def _strays(
    store: Store, run: str, commits: set[tuple[int, str]], num_segments: int
) -> Iterator[str]:
    """Commits that no segment knows, segments that no reader gets to."""
    for number, name in sorted(commits):
        yield f"commit {batch_name(number, name)}: no segment lists this batch"
    keys = (key for key, _size in store.list(RunKeys(run).plan_log))
    numbers = [int(match[1]) for key in keys if (match := re.search(r"/(\d+)\.json$", key))]
    if num_segments not in numbers:  # else somebody has planned on meanwhile
        for number in numbers:
            if number > num_segments:
                yield f"segment {number}: stands behind a gap in the log, so that nobody reads it"


def _shown(ids: list[str]) -> str:
    shown = ", ".join(map(repr, ids[:_SHOWN_IDS]))
    return shown + (f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else "")
