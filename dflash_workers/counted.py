"""What a run's progress is counted from: plan and commits taken in so far, and what is still open.

Filled by progress.Meter; kept in S3 beside progress.json, so that who counts next (a new worker, a
`status`) reads only what came since. Not truth: each number follows from objects that never change,
and where this one is missing, unreadable or of another version everything is read once more.
Batches are kept while they are open and then only as a count, so a segment whose batches are all
committed is never listed again. Whose place it says it was counted from is looked at before it is
used: a run that was removed and planned anew is counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson

from dflash_workers.contract.busy import BusyTime
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress, decompress, dump
from dflash_workers.contract.records import Commit, Json, Segment, decode
from dflash_workers.contract.store import Store
from dflash_workers.throughput import WINDOW_S, Stretch

_VERSION = 2
_REJECTIONS_SHOWN = 5

Batches = dict[str, dict[str, int]]  # segment's number -> batch -> prompts planned


@dataclass(slots=True)
class Counted:
    """One run's. The segment's number is text because JSON's keys are."""

    version: int = _VERSION
    next_segment: int = 0
    is_sealed: bool = False
    last_prompts: str = ""  # key of the last segment's prompts: it ends in their hash
    last_commit: str = ""  # key of the one that was counted last
    uncommitted: Batches = field(default_factory=dict)
    untokenized: Batches = field(default_factory=dict)  # committed, no shard seen
    num_quarantined: int = 0
    total: int = 0  # prompts planned
    completed: int = 0
    failed: int = 0  # rejected, and not planned again since
    num_commits: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    data_bytes: int = 0
    started_s: float = 0.0  # the first claim that led to a commit, since the epoch
    finished_s: float = 0.0  # the last commit
    rejections: dict[str, int] = field(default_factory=dict)  # by reason
    notes: dict[str, int] = field(default_factory=dict)  # Commit.notes, summed
    last_rejections: list[Json] = field(default_factory=list)
    recent: list[Stretch] = field(default_factory=list)
    busy: BusyTime = field(default_factory=BusyTime)

    def add_segment(self, segment: Segment) -> None:
        """The plan's next one."""
        self.next_segment = segment.number + 1
        self.is_sealed |= segment.sealed
        self.last_prompts = segment.prompts or self.last_prompts
        sizes = {planned.batch: len(planned.prompt_keys) for planned in segment.batches}
        if sizes:
            self.uncommitted[str(segment.number)] = sizes
        for planned in segment.batches:
            # A prompt that is planned again was counted before, as a rejected one.
            if planned.generation == 0:
                self.total += len(planned.prompt_keys)
            else:
                self.failed -= len(planned.prompt_keys)

    def add_commit(self, commit: Commit) -> None:
        """Of a batch that was open."""
        number = _take(self.uncommitted, commit.segment, commit.batch)
        self.untokenized.setdefault(str(commit.segment), {})[commit.batch] = number
        self.num_commits += 1
        self.last_commit = RunKeys(commit.run).commit(commit.segment, commit.batch)
        self.completed += commit.num_rows
        self.failed += len(commit.rejected)
        self.input_tokens += commit.input_tokens
        self.output_tokens += commit.output_tokens
        self.data_bytes += commit.data_bytes
        self.started_s = min(self.started_s or commit.started_at, commit.started_at)
        self.finished_s = max(self.finished_s, commit.finished_at)
        num_prompts = commit.num_rows + len(commit.rejected)
        self.recent.append(Stretch(num_prompts, commit.started_at, commit.finished_at))
        self.busy.add(commit)
        for rejected in commit.rejected:
            self.rejections[rejected.reason] = self.rejections.get(rejected.reason, 0) + 1
        for name, count in commit.notes.items():
            self.notes[name] = self.notes.get(name, 0) + int(count)
        self._show_rejections(commit)

    def add_tokenized(self, segment: int, batches: Iterable[str]) -> int:
        """These have a shard, or will never have one; return how many were new."""
        waiting = self.untokenized.get(str(segment), {})
        new = [batch for batch in batches if batch in waiting]
        for batch in new:
            _take(self.untokenized, segment, batch)
        return len(new)

    def forget_before(self, now_s: float) -> None:
        """What the rate looks at no more."""
        self.recent = [stretch for stretch in self.recent if stretch.to_s > now_s - WINDOW_S]

    @property
    def num_untokenized(self) -> int:
        """Batches."""
        return sum(map(len, self.untokenized.values()))

    def _show_rejections(self, commit: Commit) -> None:
        facts = [
            {"at": commit.finished_at, "id": r.id, "reason": r.reason, "detail": r.detail}
            for r in commit.rejected[:_REJECTIONS_SHOWN]
        ]
        newest = sorted([*self.last_rejections, *facts], key=lambda r: -r["at"])
        self.last_rejections = newest[:_REJECTIONS_SHOWN]


def read_counted(store: Store, run: str) -> Counted:
    """What was counted last; the beginning where that can't be used."""
    try:
        value = orjson.loads(decompress(store.get(RunKeys(run).counted)))
        counted = decode(Counted, value)
    except (Missing, Corrupt, orjson.JSONDecodeError):
        return Counted()
    is_ours = counted.version == _VERSION and all(
        store.exists(key) for key in (counted.last_prompts, counted.last_commit) if key
    )
    return counted if is_ours else Counted()


def write_counted(store: Store, run: str, counted: Counted) -> None:
    """Whoever writes last stands, and that is never wrong: at worst somebody reads more."""
    store.replace(RunKeys(run).counted, compress(dump(counted)))


def _take(batches: Batches, segment: int, batch: str) -> int:
    number = batches[str(segment)].pop(batch)
    if not batches[str(segment)]:
        del batches[str(segment)]
    return number
