"""Every commit of a run that has no shard -> its shard, on this machine.

`dflash-fleet tokenize` calls it; the same batches in a fleet are the work of stage.py, and both may
work at once. With several workers each is a process of its own: tokenizers' threads and Python's
lock would share one. What was done stays done, whenever it is stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

from dflash_workers.contract.commit import committed_batches
from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from trainer.tokens.build import Builder, Outcome
from trainer.tokens.shards import Provenance

TEXT_ROAD = "text_road"  # imported conversations, which want the target's tokenizer

_BATCHES_SENT = 4  # batches a process takes at once


@dataclass(slots=True)
class TokenizeReport:
    """What a run's shards hold, those that were there before included."""

    num_shards: int = 0
    num_new: int = 0
    num_samples: int = 0
    num_loss_tokens: int = 0
    num_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # answers that do not train, by reason
    quarantined: list[str] = field(default_factory=list)  # "key: what is wrong with it"

    def add(self, outcome: Outcome) -> None:
        """Count one batch in."""
        if outcome.quarantined:
            self.quarantined.append(f"{outcome.key}: {outcome.quarantined}")
        if outcome.num_waiting:
            self._skip({TEXT_ROAD: outcome.num_waiting})
        if outcome.provenance:
            self.num_new += outcome.is_new
            self._add_shard(outcome.provenance)

    def _add_shard(self, provenance: Provenance) -> None:
        self.num_shards += 1
        self.num_samples += provenance["num_samples"]
        self.num_loss_tokens += provenance["num_loss_tokens"]
        self.num_tokens += provenance["num_tokens"]
        self._skip(provenance["skipped"])

    def _skip(self, skipped: dict[str, int]) -> None:
        self.skipped = dict(Counter(self.skipped) + Counter(skipped))


def tokenize_run(
    settings: Settings,
    *,
    num_workers: int = 1,
    on_batch: Callable[[int, int, str], None] = lambda done, total, key: None,
) -> TokenizeReport:
    """Make the shard of every commit that has none. Safe to call again, or twice at once.

    `on_batch` hears how many batches are done, of how many, and the last one's key. Raises Missing,
    BadInput, and NotEnough where a process was killed.
    """
    store = open_store(settings)
    run = settings.require_run()
    builder = Builder(store, read_spec(store, run), settings.model)
    batches = list(committed_batches(store, run))
    report = TokenizeReport()
    with _made(builder, settings, batches, num_workers) as outcomes:
        for num_done, outcome in enumerate(outcomes, start=1):
            report.add(outcome)
            on_batch(num_done, len(batches), outcome.key)
    return report


@contextmanager
def _made(
    builder: Builder, settings: Settings, batches: list[tuple[int, str]], num_workers: int
) -> Iterator[Iterable[Outcome]]:
    if num_workers == 1 or len(batches) <= 1:
        yield (builder.make(*batch) for batch in batches)
        return
    # Not a fork: the parent's connections and tokenizer's threads are nothing to inherit.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_begin)
    try:
        yield pool.map(partial(_make, settings), batches, chunksize=_BATCHES_SENT)
    except BrokenProcessPool as error:
        raise NotEnough(
            "a tokenizing process was killed (memory?): what is done is kept, tokenize again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In each process: Ctrl-C is the parent's to heed, and one core is what there is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _make(settings: Settings, batch: tuple[int, str]) -> Outcome:
    return _builder_of(settings).make(*batch)


@cache
def _builder_of(settings: Settings) -> Builder:
    store = open_store(settings)
    return Builder(store, read_spec(store, settings.require_run()), settings.model)
