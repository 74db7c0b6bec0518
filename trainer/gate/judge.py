"""The gate: a run's shards in, a report with a verdict per rule out.

Called by the `gate` verb and by online/train.py, which trains on nothing that failed. Reads shard
by shard (reading.py), counts (tally.py), judges (rules.py). A run that is still growing is judged
again and again without reading a shard twice: see Gate. Invariant: memory does not grow with the
number of samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dflash_workers.contract.errors import Corrupt, Missing, NotEnough
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store
from trainer.gate.benchmarks import Benchmarks
from trainer.gate.reading import read_with_words
from trainer.gate.rules import FAIL, OVERRIDDEN, Verdict, judge
from trainer.gate.tally import Tally
from trainer.tokens.reading import list_shards

FIRST_SAMPLES = 2000  # of a growing run, before training starts; or
FIRST_SHARE = 0.01  # of what is planned, whichever is more
GROWTH = 0.1  # by which a run has grown when it is judged again

OnShard = Callable[[int, int], None]  # shards read, shards there


@dataclass(frozen=True, slots=True)
class Report:
    """What stands in a run's shards, and whether it may be trained on. See `facts_of` for facts."""

    run: str
    passed: bool
    verdicts: list[Verdict]
    facts: Json

    def failed(self) -> list[Verdict]:
        """The verdicts that forbid training."""
        return [v for v in self.verdicts if v.outcome == FAIL]

    def overridden(self) -> list[str]:
        """Names of the rules that failed and were let pass by a person."""
        return [v.rule for v in self.verdicts if v.outcome == OVERRIDDEN]

    def for_checkpoint(self) -> Json:
        """What a checkpoint remembers of it."""
        return {
            "num_samples": self.facts["num_samples"],
            "overridden": self.overridden(),
            "shares": {v.rule: v.share for v in self.verdicts if v.total},
        }

    def check(self) -> None:
        """Raise NotEnough, with every failed rule, where the data may not be trained on."""
        failed = self.failed()
        if failed:
            what = "; ".join(f"{v.rule}: {v.sentence()}" for v in failed)
            flags = " ".join(f"--override {v.rule}" for v in failed)
            raise NotEnough(
                f"the data of run {self.run!r} failed the gate: {what}. `dflash-fleet gate "
                f"--run {self.run} --html FILE` shows more; to train all the same: {flags}"
            )


class Gate:
    """Judges one run, now and as it grows."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        overrides: Collection[str] = (),
        benchmarks: Benchmarks | None = None,
    ) -> None:
        """Raises Missing where there is no such run, BadInput where an override is no rule."""
        judge({}, overrides)
        self._store = store
        self._run = run
        self._overrides = overrides
        self._tally = Tally(read_spec(store, run), benchmarks)
        self._read: set[str] = set()  # keys of shards
        self._counted: set[str] = set()  # keys of commits: a compacted shard holds some again
        self._next_look = 0  # answers, those that were skipped included

    def report(self, on_shard: OnShard | None = None) -> Report:
        """Judge all shards that are there now; those read before are not read again."""
        self._read_new(on_shard)
        return self._judged()

    def report_if_grown(self, num_planned: int) -> Report | None:
        """Judge a growing run when it is due; None while it is not.

        First with FIRST_SAMPLES or FIRST_SHARE of the `num_planned` answers that are to come,
        whichever is more; then at every GROWTH. A run that ends before that: see `report`. For a
        loop that trains: call it every so many steps and `check` what it returns. Where nothing
        has grown that costs a listing of the shards' keys, else each new shard is read, once.
        After a StoreUnavailable: call it again, nothing was missed.
        """
        self._read_new(None)
        num_answers = self._tally.num_answers
        if num_answers < max(self._next_look, FIRST_SAMPLES, FIRST_SHARE * num_planned):
            return None
        self._next_look = int((1 + GROWTH) * num_answers) + 1
        return self._judged()

    def _judged(self) -> Report:
        verdicts = judge(self._tally.shares(), self._overrides)
        passed = not any(v.outcome == FAIL for v in verdicts)
        return Report(self._run, passed, verdicts, facts_of(self._tally))

    def _read_new(self, on_shard: OnShard | None) -> None:
        keys = list_shards(self._store, self._run)
        for num_read, key in enumerate(keys, 1):
            if key not in self._read:
                self._read_shard(key)
                self._read.add(key)
            if on_shard:
                on_shard(num_read, len(keys))

    def _read_shard(self, key: str) -> None:
        try:
            for part in read_with_words(self._store, key):
                if part.provenance["commit_key"] not in self._counted:
                    self._counted.add(part.provenance["commit_key"])
                    self._tally.add(part)
        except (Corrupt, Missing) as error:
            self._tally.unreadable.append(f"{key}: {error}")


def facts_of(tally: Tally) -> Json:
    """The report's facts: counts, shares and distributions, with stable keys."""
    counts = tally.counts
    return {
        "num_shards": counts.shards,
        "num_samples": counts.samples,
        "num_heldout": counts.heldout,
        "num_tokens": counts.tokens,
        "num_loss_tokens": counts.loss_tokens,
        "loss_share": _share(counts.loss_tokens, counts.tokens),
        "thinking_share": _share(counts.thinking_tokens, counts.loss_tokens),
        "num_thinking": counts.thinking,
        "num_with_words": counts.with_words,
        "num_with_tools": counts.with_tools,
        "num_with_calls": counts.with_calls,
        "num_refusals": counts.refusals,
        "refusal_share": _share(counts.refusals, counts.with_words),
        "num_loops": counts.loops,
        "skipped": dict(tally.skipped),
        "num_quarantined": counts.quarantined,
        "unreadable": tally.unreadable,
        "roads": dict(tally.roads),
        "tokenizers": dict(tally.tokenizers),
        "output_tokens": tally.output_tokens.facts(),
        "prompt_tokens": tally.prompt_tokens.facts(),
        "thinking_tokens": tally.thinking_tokens.facts(),
        "loss_percent": tally.loss_percent.facts(),
        "finish_reasons": dict(tally.finish_reasons),
        "flags": dict(tally.flags),
        "turns": {str(turn): n for turn, n in sorted(tally.turns.items())},
        "letters": dict(tally.letters.most_common()),
        "main_scripts": dict(tally.main_scripts.most_common()),
        "sources": {name: dataclasses.asdict(s) for name, s in tally.sources.items()},
        "top_answers": tally.top_repeats(),
        "num_near_duplicates": tally.duplicates.num_repeats,
        "near_duplicates_are_a_lower_bound": tally.duplicates.is_full,
        "benchmarks": _benchmark_facts(tally),
    }


def _benchmark_facts(tally: Tally) -> Json:
    if tally.benchmarks is None:
        return {}
    return {
        "num_prompts": tally.benchmarks.num_prompts,
        "num_too_short": tally.benchmarks.num_too_short,
        "overlaps": dict(tally.overlaps.most_common()),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
