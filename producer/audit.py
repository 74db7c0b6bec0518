"""Every planned prompt has exactly one fate: the proof, over a whole run.

Reads the plan, the commits and the data that they name; writes nothing. A prompt's fate is a row of
its batch's data object or a rejection in its commit. Every object's sha256 is checked on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.lines import load_lines
from dflash_workers.contract.records import PlannedBatch, Prompt
from dflash_workers.contract.store import Store
from producer.plan import read_refusals, read_segments

NUM_READERS = 16


@dataclass(slots=True)
class Audit:
    """num_planned = num_completed + num_rejected + num_waiting, unless `findings` says why not."""

    num_planned: int = 0
    num_completed: int = 0
    num_rejected: int = 0
    num_waiting: int = 0  # no commit yet
    num_data_objects: int = 0  # whose sha256 was found right
    findings: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every planned prompt has exactly one fate."""
        return not self.findings and not self.num_waiting


def audit(store: Store, run: str) -> Audit:
    """Look at every object of a run."""
    result = Audit()
    committed = set(committed_batches(store, run))
    seen: set[bytes] = set()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for segment in read_segments(store, run):
            for batch in segment.batches:
                _count_planned(result, batch, seen)
            planned = {(segment.number, batch.batch) for batch in segment.batches}
            look = partial(_look, store, run, segment.number, committed & planned)
            for part in readers.map(look, segment.batches):
                _add(result, part)
            committed -= planned
    for number, name in sorted(committed):
        result.findings.append(f"commit {batch_name(number, name)}: no segment lists this batch")
    return result


def rejections(store: Store, run: str) -> tuple[Counter[str], Counter[str]]:
    """(rows refused at planning, prompts rejected by workers), each by reason."""
    refused = Counter(
        refusal.reason
        for segment in read_segments(store, run)
        for refusal in read_refusals(store, segment)
    )
    with ThreadPoolExecutor(NUM_READERS) as readers:
        commits = readers.map(
            lambda at: read_commit(store, run, *at), committed_batches(store, run)
        )
        rejected = Counter(r.reason for commit in commits for r in commit.rejected)
    return refused, rejected


def _count_planned(result: Audit, batch: PlannedBatch, seen: set[bytes]) -> None:
    for key in batch.prompt_keys:
        result.num_planned += 1
        if (key_bytes := bytes.fromhex(key)) in seen:
            result.findings.append(f"prompt {key}: planned more than once")
        seen.add(key_bytes)


def _look(
    store: Store, run: str, segment: int, committed: set[tuple[int, str]], batch: PlannedBatch
) -> Audit:
    """One batch's share of the audit."""
    result = Audit()
    name = batch_name(segment, batch.batch)
    try:
        prompts = load_lines(Prompt, store.get(RunKeys(run).prompts(segment, batch.batch)))
        if [prompt.key for prompt in prompts] != batch.prompt_keys:
            result.findings.append(f"batch {name}: its prompts are not those that the log lists")
        if (segment, batch.batch) not in committed:
            result.num_waiting = len(batch.prompt_keys)
            return result
        commit = read_commit(store, run, segment, batch.batch)
        rows = read_rows(store, commit)
    except (Missing, Corrupt) as error:
        result.findings.append(f"batch {name}: {error}")
        return result
    result.num_data_objects = 1
    result.num_completed = len(rows)
    result.num_rejected = len(commit.rejected)
    fates = Counter([row.key for row in rows] + [r.key for r in commit.rejected])
    result.findings += [f"batch {name}: {fault}" for fault in _faults(batch.prompt_keys, fates)]
    return result


def _faults(planned: list[str], fates: Counter[str]) -> Iterator[str]:
    for key in planned:
        if fates[key] != 1:
            yield f"prompt {key} has {fates[key]} fates"
    for key in fates.keys() - set(planned):
        yield f"prompt {key} was never planned in it"


def _add(result: Audit, part: Audit) -> None:
    result.num_completed += part.num_completed
    result.num_rejected += part.num_rejected
    result.num_waiting += part.num_waiting
    result.num_data_objects += part.num_data_objects
    result.findings += part.findings
