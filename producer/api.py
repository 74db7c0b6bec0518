"""The one Python API: a Run, from prompts to committed rows.

    with Run.create(load_settings({"run": "first"}), "/models/qwen3") as run:
        print(run.enqueue(["prompts.jsonl"]))
        run.seal()
        run.wait(timeout_s=3600)
        rows = list(run.results())

cli.py is a thin layer over this. Every call may be repeated: what was done already is not done
again, and what was left half done is finished.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType

from dflash_workers.contract.chat import tokenizer_sha256
from dflash_workers.contract.commit import committed_batches, read_commit
from dflash_workers.contract.commit import read_rows as read_committed_rows
from dflash_workers.contract.errors import Conflict, FleetError, Missing
from dflash_workers.contract.hints import Hints, check_redis, open_hints
from dflash_workers.contract.records import Row, RunSpec
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import Store, open_store
from producer.conversations import Rules, read_candidates
from producer.enqueue import queue_of, send_planned
from producer.fingerprint import (
    RunOptions,
    check_same,
    control_tokens,
    make_spec,
    open_or_create_run,
    read_spec,
)
from producer.ledger import Ledger, Progress
from producer.plan import PlanOptions, plan, seal
from producer.reconcile import Reconciler
from producer.sources import Input, read_rows

__all__ = ["EnqueueReport", "Progress", "Run", "RunOptions"]

DEFAULT_OPTIONS = RunOptions()
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """num_rows = num_planned + num_duplicates + the sum of refused."""

    num_rows: int
    num_planned: int
    num_heldout: int  # of the planned
    num_duplicates: int
    refused: dict[str, int]  # by reason
    num_batches: int  # new ones
    num_sent: int  # hints, those for batches of earlier calls included


@dataclass(frozen=True, slots=True)
class Run:
    """A run that exists. Close it, or use it in a `with`."""

    settings: Settings
    spec: RunSpec
    store: Store
    hints: Hints
    dry_run: bool = False  # count, write and send nothing

    @classmethod
    def create(
        cls,
        settings: Settings,
        model_dir: str | Path,
        options: RunOptions = DEFAULT_OPTIONS,
        *,
        dry_run: bool = False,
    ) -> Run:
        """Create the run that `settings` names, or open it where model and options agree.

        Raises Conflict, naming the field, where they don't.
        """
        settings = dataclasses.replace(settings, model=str(model_dir))
        name = settings.require_run()
        with _connected(settings) as (store, hints):
            if not dry_run:
                check_redis(hints.redis, settings)
            standing = read_spec(store, name)
            spec = make_spec(name, settings.model, options, standing)
            if standing:
                check_same(standing, spec)
            elif not dry_run:
                spec = open_or_create_run(store, spec)
            return cls(settings, standing or spec, store, hints, dry_run)

    @classmethod
    def open(cls, settings: Settings | str) -> Run:
        """Open a run by settings, or by name with the environment's. Raises Missing."""
        if isinstance(settings, str):
            settings = load_settings({"run": settings})
        name = settings.require_run()
        with _connected(settings) as (store, hints):
            spec = read_spec(store, name)
            if spec is None:
                raise Missing(f"there is no run {name!r} at {store.url('')}: `enqueue` creates one")
            return cls(settings, spec, store, hints)

    def enqueue(
        self,
        inputs: str | Path | Iterable[Input],
        *,
        batch_size: int = 16,
        heldout: float = 0.02,
        limit: int | None = None,
        max_bad: float = 1.0,
        max_queued: int | None = None,
    ) -> EnqueueReport:
        """Plan the new rows of files or mappings, and send a hint for each batch without a commit.

        `heldout` and `max_bad` are shares of 1; `limit` reads the first rows only; `max_queued`
        waits while so many hints are queued. Raises BadInput.
        """
        if not self.dry_run:
            check_redis(self.hints.redis, self.settings)
        options = PlanOptions(
            batch_size=batch_size,
            max_refused_share=max_bad,
            dry_run=self.dry_run,
            notes={"batch_size": batch_size, "heldout": heldout, "limit": limit},
        )
        rows = read_rows([inputs] if isinstance(inputs, str | Path) else inputs)
        candidates = read_candidates(islice(rows, limit), self._rules(heldout))
        report = plan(self.store, self.spec.run, candidates, options)
        num_sent = 0
        if not self.dry_run:
            num_sent = send_planned(
                self._ledger(), self.hints, queue_of(self.spec), max_queued=max_queued
            )
        return EnqueueReport(
            num_rows=report.num_rows,
            num_planned=report.num_planned,
            num_heldout=report.num_heldout,
            num_duplicates=report.num_duplicates,
            refused=dict(report.refused),
            num_batches=report.num_batches,
            num_sent=num_sent,
        )

    def seal(self) -> None:
        """End the plan: nothing new may be planned, and the run is done when its batches are."""
        if not self.dry_run:
            seal(self.store, self.spec.run)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every planned batch has its commit; False after `timeout_s`.

        Reconciles meanwhile, so that no lost hint makes it wait for ever.
        """
        deadline = time.monotonic() + timeout_s
        reconciler = self.reconciler()
        while True:
            reconciler.ledger.refresh()
            if not reconciler.ledger.open:
                return True
            reconciler.look()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))

    def results(self) -> Iterator[Row]:
        """Every committed row, checked against its commit's sha256."""
        for segment, batch in committed_batches(self.store, self.spec.run):
            yield from read_committed_rows(
                self.store, read_commit(self.store, self.spec.run, segment, batch)
            )

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

    def _rules(self, heldout: float) -> Rules:
        model_dir = self.settings.model
        tokens = control_tokens(model_dir)
        if tokenizer_sha256(model_dir) != self.spec.target.tokenizer_sha256:
            raise Conflict(f"{model_dir}: its tokenizer is not the one of run {self.spec.run!r}")
        return Rules(tokens, heldout)


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
