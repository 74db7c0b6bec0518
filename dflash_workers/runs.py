"""The runs that this worker serves: all that share its target.

From <- run.json, the plan and the control log in S3; to -> tasks and generate. A run of another
target is refused, so that two models' outputs never mix, whatever lands in the queue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import celeryconfig
from dflash_workers.contract.chat import Chat, load_tokenizer, tokenizer_sha256
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.plan import read_prompts, read_segments, read_spec
from dflash_workers.contract.records import BatchMessage, PlannedBatch, Prompt, RunSpec, Segment
from dflash_workers.contract.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEGMENTS_KEPT = 2  # batches come in the order of the plan; a segment may be 10 MB


@dataclass(frozen=True, slots=True)
class Run:
    """A run as this worker answers it."""

    spec: RunSpec
    chat: Chat
    orders: Orders


class Orders:
    """What was ordered for a run, asked by many threads: tens of thousands of a paused run's hints
    may come one after the other. One look at S3 serves all who asked before it began.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._looking = threading.Lock()
        self._num_begun = self._num_done = 0  # looks
        self._state = RunState.ACTIVE

    def state(self) -> RunState:
        """As of now, or later."""
        wanted = self._num_begun + 1
        with self._looking:
            if self._num_done < wanted:
                self._num_begun += 1
                self._state = self._control.state()
                self._num_done = self._num_begun
            return self._state


class Runs:
    """Reads each run once. Safe to share between threads."""

    def __init__(self, store: Store, first: RunSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        self._store = store
        self._target = first.target
        self._tokenizer = tokenizer
        self._open: dict[str, Run] = {}
        self._segments: dict[tuple[str, int], tuple[Segment, dict[str, PlannedBatch]]] = {}
        self._queues: dict[str, str] = {}  # by run, those of other targets too
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._add(first)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._open))

    def open(self, run: str) -> Run:
        """Raises Missing or BadInput for a run that this worker can't serve."""
        if run not in self._open:
            spec = read_spec(self._store, run)
            if spec.target.fingerprint() != self._target.fingerprint():
                raise BadInput(f"run {run!r} is of another target than this worker's")
            self._add(spec)
        return self._open[run]

    def queue_of(self, run: str) -> str:
        """Where the run's hints belong, this worker's target or another. Raises Missing."""
        if run not in self._queues:
            target = read_spec(self._store, run).target
            self._queues[run] = celeryconfig.generate_queue(target.fingerprint())
        return self._queues[run]

    def state(self, run: str) -> RunState:
        """Whether the run's batches are to be worked on, as of now."""
        return self.open(run).orders.state()

    def count_dropped(self, run: str) -> int:
        """Count one more hint dropped, because its run is not active; return the run's count."""
        with self._lock:
            self._dropped[run] += 1
            return self._dropped[run]

    @property
    def num_dropped(self) -> int:
        """Hints dropped so far, of all runs together."""
        return self._dropped.total()

    def prompts(self, message: BatchMessage) -> list[Prompt]:
        """The batch's prompts. Raises Missing where no plan has such a batch, Corrupt."""
        segment, batches = self._segment(message.run, message.segment)
        if message.batch not in batches:
            raise Missing(f"run {message.run!r}: segment {message.segment} has no {message.batch}")
        return read_prompts(self._store, segment, batches[message.batch])

    def _segment(self, run: str, number: int) -> tuple[Segment, dict[str, PlannedBatch]]:
        with self._lock:
            found = self._segments.get((run, number))
            if found is None:
                segment = next(read_segments(self._store, run, number), None)
                if segment is None:
                    raise Missing(f"run {run!r} has no segment {number}")
                found = segment, {batch.batch: batch for batch in segment.batches}
                while len(self._segments) >= _SEGMENTS_KEPT:
                    del self._segments[next(iter(self._segments))]
                self._segments[run, number] = found
            return found

    def _add(self, spec: RunSpec) -> None:
        chat = Chat(self._tokenizer, spec.chat_template, spec.template_kwargs, spec.control_tokens)
        self._open[spec.run] = Run(spec, chat, Orders(Control(self._store, spec.run)))


def open_runs(store: Store, run: str, model_dir: str) -> Runs:
    """The worker's first run. Raises BadInput, naming the field, for a model of another target."""
    spec = read_spec(store, run)
    tokenizer = load_tokenizer(model_dir)
    found = tokenizer_sha256(model_dir)
    if found != spec.target.tokenizer_sha256:
        raise BadInput(
            f"{model_dir}: target.tokenizer_sha256 is {found[:12]}..., run {run!r} wants "
            f"{spec.target.tokenizer_sha256[:12]}...: pass the folder of {spec.target.name}"
        )
    return Runs(store, spec, tokenizer)
