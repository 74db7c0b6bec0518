"""The leader's work: find new shards, have the run judged, check each shard, name it in the order.

One rank does this for all, from intake.py, whenever samples run short. Reads the plan, tokens/ and
what gate/ makes of them; hands names to -> order.py. A shard that is damaged, or made with another
tokenizer, template or target than the run's, is refused by name and with its reason; training goes
on without it. Invariant: nothing is named before the gate has passed the run, and the order is
called finished only when the plan is sealed and every batch of it has a shard that is dealt with,
or a note that says why it has none. Compacted shards are never named: the small ones stay, and both
hold the same samples.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from dflash_workers.contract.commit import committed_batches
from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Corrupt, Missing, NotEnough
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_segments, read_spec
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.contract.store import Store
from trainer.gate.judge import FIRST_SAMPLES, Gate, Report
from trainer.online.order import Found, NamedShard, Order, RefusedShard
from trainer.online.walk import MIN_LOSS_TOKENS
from trainer.tokens.shards import Sample, read_provenance, read_shard

log = logging.getLogger(__name__)

SHARDS_OF_ENTRY = 64  # so many are read before training may go on with them
NUM_READERS = 8
# Rules of the gate that forbid to begin. Training that goes on does without the shards they name,
# as long as those are few: more are no accident, but data that somebody should look at.
OF_SHARDS = ("unreadable", "tokenizer_mismatch")
FEW_REFUSED = 3  # shards
MAX_REFUSED = 0.05  # of all shards so far

_SHARD = re.compile(r"/(\d{6,})/([^/]+)\.arrow$")
_QUARANTINED = re.compile(r"/quarantine/(\d{6,})/([^/]+)\.json$")


class Namer:
    """Names one run's shards in one order. Used from one thread."""

    def __init__(
        self, store: Store, run: str, order: Order, overrides: Collection[str] = ()
    ) -> None:
        """`overrides`: rules of the gate that may fail. Raises Missing where there is no such run,
        BadInput for an override that is no rule.
        """
        self._store = store
        self._spec = read_spec(store, run)
        self._order = order
        self._overrides = overrides
        self._gate = Gate(store, run, overrides=overrides)
        self._plan = _Plan(store, run)
        self._backlog: list[str] = []
        self._report: Report | None = None  # what the gate found last
        self.lacks = ""  # what is waited for, for people

    @property
    def judged(self) -> Json:
        """What the gate found last, for a checkpoint; empty before that."""
        return self._report.for_checkpoint() if self._report else {}

    def refuse(self, bad: list[RefusedShard]) -> None:
        """Note shards that went bad after they were named. Raises NotEnough where there are many of
        the kind, StoreUnavailable.
        """
        self._order.append(Found(refused=bad))
        self._check_refused()

    def advance(self) -> bool:
        """Name what is new, some at a time; whether anything was.

        Raises NotEnough where the gate forbids training, StoreUnavailable.
        """
        if self._order.follow():
            return True  # named by an earlier leader: it is used before more is looked for
        self._check_refused()
        if self._order.is_finished:
            return False
        if self._backlog:
            return self._name_some()
        self._plan.read()
        found = self._plan.find()
        is_complete = self._plan.is_sealed and found.promised <= found.shards | found.without_shard
        if not self._is_passed(is_complete):
            return False
        # By their names' hashes: the plan's order is that of the input files, and so of subjects.
        self._backlog = sorted(found.shards - self._order.known, key=_hash)
        if is_complete and not self._backlog:
            self._order.append(Found(finished=True))
            return True
        return self._name_some()

    def _is_passed(self, is_complete: bool) -> bool:
        """Whether the run may be trained on. Raises NotEnough where it must not."""
        report = self._gate.report_if_grown(self._plan.num_prompts)
        if report is None and is_complete:
            report = self._gate.report()
        self._report = report or self._report
        if self._report is None:
            self.lacks = self._plan.lacks_for_gate()
            return False
        if not self._order.known or any(v.rule not in OF_SHARDS for v in self._report.failed()):
            self._report.check()
        self.lacks = self._plan.lacks()
        return True

    def _check_refused(self) -> None:
        num, total = len(self._order.refused), len(self._order.known)
        if num <= max(FEW_REFUSED, MAX_REFUSED * total) or any(
            rule in self._overrides for rule in OF_SHARDS
        ):
            return
        key, reason = list(self._order.refused.items())[-1]
        raise NotEnough(
            f"{num} of {total} shards can't be trained on, too many for an accident; the last one: "
            f"{key}: {reason}. To train all the same: --override {OF_SHARDS[0]}"
        )

    def _name_some(self) -> bool:
        some = self._backlog[:SHARDS_OF_ENTRY]
        with ThreadPoolExecutor(NUM_READERS) as readers:
            examined = list(readers.map(self._examined, some))
        found = Found(
            [shard for shard in examined if isinstance(shard, NamedShard)],
            [shard for shard in examined if isinstance(shard, RefusedShard)],
        )
        for refused in found.refused:
            log.warning("shard %s is not trained on: %s", refused.key, refused.reason)
        if found:
            self._order.append(found)
        self._backlog = self._backlog[SHARDS_OF_ENTRY:]
        return bool(found)

    def _examined(self, key: str) -> NamedShard | RefusedShard:
        try:
            body = self._store.get(key)
            check_origin(body, self._spec)
            samples = read_shard(body)
            _check_ids(samples, self._spec)
        except (Corrupt, Missing) as error:
            return RefusedShard(key, str(error))
        lengths = [_trained_len(sample) for sample in samples]
        num_empty = sum(not length for length in lengths) - sum(s.heldout for s in samples)
        if num_empty:
            log.warning("shard %s: %d samples without loss are left out", key, num_empty)
        return NamedShard(
            key, hashlib.sha256(body).hexdigest(), [s.prompt_len for s in samples], lengths
        )


def check_origin(body: bytes, spec: RunSpec) -> None:
    """Raise Corrupt where a shard was made for another run's target, naming what differs."""
    made = read_provenance(body)
    wanted = {
        "tokenizer": (made["tokenizer_sha256"], spec.target.tokenizer_sha256),
        "chat template": (made["template_sha256"], spec.target.template_sha256),
        "vocabulary size": (made["vocab_size"], spec.target.vocab_size),
        "target": (made["target_fingerprint"], spec.target.fingerprint()),
    }
    for name, (its, ours) in wanted.items():
        if its != ours:
            raise Corrupt(f"made with another {name} ({str(its)[:12]}, not {str(ours)[:12]})")


def _check_ids(samples: list[Sample], spec: RunSpec) -> None:
    for sample in samples:
        if (
            len(sample.ids)
            and not 0 <= sample.ids.min() <= sample.ids.max() < spec.target.vocab_size
        ):
            raise Corrupt(f"sample {sample.id!r} holds an id outside the vocabulary")


def _trained_len(sample: Sample) -> int:
    has_loss = len(sample.ids) - sample.prompt_len >= MIN_LOSS_TOKENS
    return len(sample.ids) if has_loss and not sample.heldout else 0


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode()).digest()


class _Presence:
    """Which of a run's batches have a shard, and which never will; all by the shard's key."""

    def __init__(self, keys: RunKeys, promised: set[str]) -> None:
        self._keys = keys
        self.promised = promised
        self.shards: set[str] = set()
        self.without_shard: set[str] = set()

    def note(self, key: str) -> None:
        """One of the keys under tokens/."""
        if _SHARD.search(key):
            self.shards.add(key)
        elif match := _QUARANTINED.search(key):
            self.without_shard.add(self._keys.shard(int(match[1]), match[2]))


class _Plan:
    """What a run's log promises, read once."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._keys = RunKeys(run)
        self._control = Control(store, run)
        self._next = 0
        self._planned: set[str] = set()  # keys of the shards to come
        self._is_sealed = False
        self.num_prompts = 0

    def read(self) -> None:
        """Read on."""
        for segment in read_segments(self._store, self._run, self._next):
            self._planned |= {self._keys.shard(segment.number, b.batch) for b in segment.batches}
            self.num_prompts += sum(len(b.prompt_keys) for b in segment.batches if not b.generation)
            self._is_sealed |= segment.sealed
            self._next = segment.number + 1

    @property
    def is_sealed(self) -> bool:
        """Whether nothing new will be planned."""
        return self._is_sealed or self._is_cancelled()

    def find(self) -> _Presence:
        """What of it is there now."""
        found = _Presence(self._keys, self._promised())
        for key, _size in self._store.list(self._keys.tokens):
            found.note(key)
        return found

    def lacks(self) -> str:
        """What more could come."""
        if self.is_sealed:
            return "batches that are still to be generated or tokenized"
        return "new shards; `seal` the run where no more prompts will come"

    def lacks_for_gate(self) -> str:
        """What the gate waits for."""
        return f"{FIRST_SAMPLES} answers for the gate to judge, or a run that is sealed and done"

    def _promised(self) -> set[str]:
        if not self._is_cancelled():
            return self._planned
        return {self._keys.shard(*at) for at in committed_batches(self._store, self._run)}

    def _is_cancelled(self) -> bool:
        return self._control.state() is RunState.CANCELLED
