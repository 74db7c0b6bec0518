"""The one Python API: a Run, from prompts to committed rows.

    with Run.create(load_settings({"run": "first"}), "/models/qwen3") as run:
        print(run.enqueue(["prompts.jsonl"]))
        run.seal()
        run.wait(timeout_s=3600)
        rows = list(run.results())

producer/cli/ is a thin layer over this. Every call may be repeated: what was done already is not
done again, and what was left half done is finished.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dflash_workers.contract.chat import open_chat, tokenizer_sha256
from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Conflict, FleetError, QueueUnavailable
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.queues import check_redis
from dflash_workers.contract.records import Refusal, Row, RunSpec
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import Store, open_store
from producer.enqueue import Sender, queue_of
from producer.fingerprint import (
    RunOptions,
    check_same,
    find_spec,
    make_spec,
    open_or_create_run,
)
from producer.intake import EnqueueOptions, Inputs, limits_of, preview, read_outcomes
from producer.ledger import Ledger, Progress
from producer.plan import PlanReport, plan, seal
from producer.reconcile import Reconciler
from producer.rules import Rules
from producer.schemas import Shape
from producer.segments import read_log

__all__ = ["EnqueueOptions", "EnqueueReport", "Progress", "Run", "RunOptions", "Shape", "preview"]

DEFAULT_RUN_OPTIONS = RunOptions()
DEFAULT_OPTIONS = EnqueueOptions()
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """num_rows = num_planned - num_resampled + num_duplicates + num_not_drawn + all refused."""

    num_rows: int
    num_planned: int  # prompts
    num_resampled: int  # of the planned: a row's second sample or a later one
    num_heldout: int  # of the planned
    num_duplicates: int
    num_not_drawn: int  # left out by their file's weight
    refused: dict[str, int]  # by reason
    num_batches: int  # new ones
    num_sent: int  # hints, those for batches of earlier calls included
    state: str  # active | paused | cancelled: only of an active run hints are sent
    first_refusals: list[Refusal]  # the first ten


@dataclass(frozen=True, slots=True)
class Run:
    """A run that exists. Close it, or use it in a `with`."""

    settings: Settings
    spec: RunSpec
    store: Store
    hints: Hints

    @classmethod
    def create(
        cls,
        settings: Settings,
        model_dir: str | Path,
        options: RunOptions = DEFAULT_RUN_OPTIONS,
    ) -> Run:
        """Create the run that `settings` names, or open it where model and options agree.

        Raises Conflict, naming the field, where they don't.
        """
        settings = dataclasses.replace(settings, model=str(model_dir))
        name = settings.require_run()
        with _connected(settings) as (store, hints):
            check_redis(hints.redis, settings)
            standing = find_spec(store, name)
            spec = make_spec(name, settings.model, options, standing)
            if standing:
                check_same(standing, spec)
            else:
                spec = open_or_create_run(store, spec)
            return cls(settings, standing or spec, store, hints)

    @classmethod
    def open(cls, settings: Settings | str) -> Run:
        """Open a run by settings, or by name with the environment's. Raises Missing."""
        if isinstance(settings, str):
            settings = load_settings({"run": settings})
        with _connected(settings) as (store, hints):
            return cls(settings, read_spec(store, settings.require_run()), store, hints)

    def enqueue(self, inputs: Inputs, options: EnqueueOptions = DEFAULT_OPTIONS) -> EnqueueReport:
        """Plan the new rows of files or mappings, and send a hint for each batch without a commit.

        Any number of rows in flat memory: `inputs` may be a generator of mappings. Needs the
        model's folder, for its tokenizer, in the settings. Raises BadInput.
        """
        check_redis(self.hints.redis, self.settings)
        control = Control(self.store, self.spec.run)
        state = control.state()
        if state is RunState.CANCELLED:
            raise Conflict(f"run {self.spec.run!r} is cancelled: plan in another run")
        planned, sender = self._plan(inputs, options, is_active=state is RunState.ACTIVE)
        num_sent = _finished(sender, planned)
        return EnqueueReport(
            num_rows=planned.num_rows,
            num_planned=planned.num_planned,
            num_resampled=planned.num_resampled,
            num_heldout=planned.num_heldout,
            num_duplicates=planned.num_duplicates,
            num_not_drawn=planned.num_not_drawn,
            refused=dict(planned.refused),
            num_batches=planned.num_batches,
            num_sent=num_sent,
            state=control.state().value,
            first_refusals=planned.first_refusals,
        )

    def seal(self) -> None:
        """End the plan: nothing new may be planned, and the run is done when its batches are."""
        seal(self.store, self.spec.run)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every planned batch has its commit; False after `timeout_s`.

        Reconciles meanwhile, so that no lost hint makes it wait for ever. Raises Conflict where
        the run is cancelled.
        """
        deadline = time.monotonic() + timeout_s
        reconciler = self.reconciler()
        while True:
            began_s = time.monotonic()
            reconciler.ledger.refresh()
            took_s = time.monotonic() - began_s
            if not reconciler.ledger.open:
                return True
            reconciler.look()
            if reconciler.state is RunState.CANCELLED:
                raise Conflict(f"run {self.spec.run!r} is cancelled: it will not be completed")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            # A look lists every open segment: of a large run, a tenth of the time is enough.
            time.sleep(min(max(POLL_S, 10 * took_s), left_s))

    def results(self) -> Iterator[Row]:
        """Every committed row, checked against its commit's sha256."""
        for segment, batch in committed_batches(self.store, self.spec.run):
            yield from read_rows(self.store, read_commit(self.store, self.spec.run, segment, batch))

    def progress(self) -> Progress:
        """Counts of what is planned and done, from S3."""
        ledger = self._ledger()
        ledger.refresh()
        return ledger.progress()

    def reconciler(self) -> Reconciler:
        """What brings lost hints back, one look at a time."""
        return Reconciler(self._ledger(), self.hints, queue_of(self.spec))

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        _close(self.store, self.hints)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ledger(self) -> Ledger:
        return Ledger(self.store, self.spec.run)

    def _plan(
        self, inputs: Inputs, options: EnqueueOptions, *, is_active: bool
    ) -> tuple[PlanReport, Sender]:
        # The log may take hundreds of MB, none of which the sending of hints has to hold.
        log = read_log(self.store, self.spec.run)
        queue = queue_of(self.spec)
        sender = Sender(log.ledger, self.hints, queue, options.max_queued, is_active)
        log.on_written = sender.send_segment
        outcomes = read_outcomes(inputs, options, self._rules(options), self.settings, log)
        return plan(log, outcomes, options.plan_options()), sender

    def _rules(self, options: EnqueueOptions) -> Rules:
        spec, model_dir = self.spec, self.settings.model
        chat = open_chat(model_dir, spec.chat_template, spec.template_kwargs, spec.control_tokens)
        if tokenizer_sha256(model_dir) != spec.target.tokenizer_sha256:
            raise Conflict(f"{model_dir}: its tokenizer is not the one of run {spec.run!r}")
        return options.rules(spec.multi_turn, limits_of(spec, chat))


def _finished(sender: Sender, planned: PlanReport) -> int:
    """How many hints are sent, when all are."""
    try:
        return sender.finish()
    except QueueUnavailable as error:
        raise QueueUnavailable(
            f"{planned.num_planned} new prompts are planned, but not all hints are sent: "
            f"{error}: give the same command again"
        ) from error


@contextmanager
def _connected(settings: Settings) -> Iterator[tuple[Store, Hints]]:
    """Connections that stay open, unless the block fails. S3 is asked at once, Redis is not."""
    store, hints = open_store(settings), open_hints(settings)
    try:
        store.check()
        yield store, hints
    except FleetError:
        _close(store, hints)
        raise


def _close(store: Store, hints: Hints) -> None:
    store.client.close()
    hints.app.close()
    hints.redis.close()
