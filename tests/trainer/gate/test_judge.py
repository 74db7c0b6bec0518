"""The gate over a run in S3: rubbish is refused, good data pass, a growing run is judged again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from dflash_workers.contract.errors import BadInput, Missing, NotEnough, StoreUnavailable
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from tests.trainer.gate.making import (
    RUN,
    SPEC,
    STOP,
    healthy,
    put_run,
    put_shard,
    random_answer,
    read_shard_of,
    sample_of,
)
from trainer.gate.judge import Gate
from trainer.gate.rules import NOT_JUDGED
from trainer.gate.tally import Tally
from trainer.tokens.compact import compact
from trainer.tokens.shards import Sample


def disaster(num: int) -> list[Sample]:
    """87 % of the samples with exactly six tokens to learn from: an empty turn's frame."""
    num_empty = round(0.87 * num)
    frame = [4, 5, 6, 7, 8, STOP]
    samples = [*[sample_of(n, frame) for n in range(num_empty)], *healthy(num - num_empty, num)]
    random.Random(0).shuffle(samples)
    return samples


def shards_of(samples: list[Sample], size: int = 100) -> list[list[Sample]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def test_data_that_are_87_percent_empty_are_refused(store: Store) -> None:
    put_run(store, shards_of(disaster(1000)))

    report = Gate(store, RUN).report()

    found = {v.rule: v for v in report.failed()}
    assert not report.passed
    assert list(found) == ["empty_answers", "dominating_answer"]
    assert (found["empty_answers"].count, found["empty_answers"].share) == (870, 0.87)
    with pytest.raises(NotEnough, match=r"empty_answers: 870 of 1,000 \(87\.0%\).*--override"):
        report.check()


def test_healthy_data_pass(store: Store) -> None:
    put_run(store, shards_of(healthy(300)), skipped={"repetition": 2})

    report = Gate(store, RUN).report()

    assert report.passed
    assert report.failed() == report.overridden() == []
    assert report.facts["num_samples"] == 300
    report.check()


def test_an_override_by_name_lets_data_pass_and_is_told(store: Store) -> None:
    put_run(store, shards_of(disaster(200)))

    one = Gate(store, RUN, overrides=["empty_answers"]).report()
    both = Gate(store, RUN, overrides=["empty_answers", "dominating_answer"]).report()

    assert [v.rule for v in one.failed()] == ["dominating_answer"]
    both.check()
    assert both.for_checkpoint()["overridden"] == ["empty_answers", "dominating_answer"]
    assert both.for_checkpoint()["shares"]["empty_answers"] == 0.87


def test_an_unknown_override_and_an_unknown_run_are_refused_at_once(store: Store) -> None:
    with pytest.raises(BadInput, match="no such rule"):
        Gate(store, RUN, overrides=["everything"])
    with pytest.raises(Missing, match="no run"):
        Gate(store, RUN)


def test_a_shard_that_can_not_be_read_fails_its_rule_and_no_other(store: Store) -> None:
    put_run(store, shards_of(healthy(200)))
    store.replace(RunKeys(RUN).shard(1, "b001"), b"damaged")

    report = Gate(store, RUN).report()

    assert [v.rule for v in report.failed()] == ["unreadable"]
    assert report.facts["num_samples"] == 100
    assert "b001.arrow" in report.facts["unreadable"][0]


def test_a_run_without_shards_is_not_judged(store: Store) -> None:
    put_run(store, [])

    report = Gate(store, RUN).report()

    assert {v.outcome for v in report.verdicts} == {NOT_JUDGED}


def test_a_growing_run_is_judged_at_its_start_and_at_every_tenth_of_growth(store: Store) -> None:
    put_run(store, [[s] * 600 for s in healthy(3)])
    gate = Gate(store, RUN)
    judged = []

    for number in range(3, 12):
        put_shard(store, number, healthy(1, number) * 100)
        if report := gate.report_if_grown(num_planned=100_000):
            judged.append(report.facts["num_samples"])

    # Counts go 1,900, 2,000, ...: from 2,000 on, then the first above 1.1 times the one before.
    assert judged == [2000, 2300, 2600]


def test_a_growing_run_is_judged_first_at_a_hundredth_of_a_large_plan(store: Store) -> None:
    put_run(store, [healthy(1) * 1000])
    gate = Gate(store, RUN)

    early = gate.report_if_grown(num_planned=210_000)
    put_shard(store, 2, healthy(1, 2) * 1100)
    due = gate.report_if_grown(num_planned=210_000)

    assert early is None
    assert due is not None
    assert due.facts["num_samples"] == 2100


def test_answers_that_were_left_out_count_as_growth(store: Store) -> None:
    put_run(store, [healthy(10)], skipped={"empty": 1989})
    gate = Gate(store, RUN)

    early = gate.report_if_grown(num_planned=5000)
    put_shard(store, 1, healthy(1, 10))
    due = gate.report_if_grown(num_planned=5000)

    assert early is None
    assert due is not None
    assert [v.rule for v in due.failed()] == ["empty_answers"]


def test_rubbish_that_comes_later_is_seen_when_the_run_has_grown(store: Store) -> None:
    put_run(store, shards_of(healthy(2000), 500))
    gate = Gate(store, RUN)
    first = gate.report_if_grown(num_planned=10_000)

    put_shard(store, 4, [sample_of(n, [9, 8, 7, STOP]) for n in range(1000)])
    later = gate.report_if_grown(num_planned=10_000)

    assert first is not None
    assert first.passed
    assert later is not None
    assert "empty_answers" in {v.rule for v in later.failed()}


@dataclass(frozen=True)
class WatchedStore(Store):
    """Notes what is read; refuses keys that hold `away`."""

    read: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)

    def get(self, key: str) -> bytes:
        self.read.append(key)
        if any(part in key for part in self.away):
            raise StoreUnavailable(key)
        return Store.get(self, key)


def watched(store: Store) -> WatchedStore:
    return WatchedStore(store.client, store.bucket, store.prefix, store.endpoint)


def test_a_look_at_a_run_that_has_not_grown_reads_no_shard_again(store: Store) -> None:
    put_run(store, shards_of(healthy(2000), 500))
    watching = watched(store)
    gate = Gate(watching, RUN)
    first = gate.report_if_grown(num_planned=10_000)
    num_read = len([key for key in watching.read if key.endswith(".arrow")])
    watching.read.clear()

    again = gate.report_if_grown(num_planned=10_000)

    assert first is not None
    assert num_read == 4
    assert again is None
    assert [key for key in watching.read if "/compact/" not in key] == []
    assert len(watching.read) <= 1


def test_a_shard_that_was_out_of_reach_is_judged_once_it_is_there(store: Store) -> None:
    put_run(store, shards_of(healthy(2000), 500))
    watching = watched(store)
    gate = Gate(watching, RUN)
    watching.away.append("b002.arrow")

    with pytest.raises(StoreUnavailable):
        gate.report_if_grown(num_planned=10_000)
    watching.away.clear()
    report = gate.report_if_grown(num_planned=10_000)

    assert report is not None
    assert report.facts["num_samples"] == 2000
    assert report.facts["unreadable"] == []


def test_a_compacted_shard_is_judged_in_place_of_the_small_ones_and_never_twice(
    store: Store,
) -> None:
    put_run(store, shards_of(healthy(300)))
    early = Gate(store, RUN)
    before = early.report()

    compact(store, RUN, with_rest=True)
    put_shard(store, 3, healthy(50, 300))
    grown, fresh = early.report(), Gate(store, RUN).report()

    assert before.facts["num_samples"] == 300
    assert grown.facts == fresh.facts
    assert (fresh.facts["num_samples"], fresh.facts["num_shards"]) == (350, 4)


def test_answers_that_a_short_limit_cuts_off_on_purpose_pass(store: Store) -> None:
    short = replace(SPEC, sampling=replace(SPEC.sampling, max_new_tokens=48))
    cut = [sample_of(n, random_answer(n, 48)[:-1]) for n in range(150)]
    put_run(store, shards_of(cut), spec=short)

    assert Gate(store, RUN).report().passed


def test_what_is_kept_does_not_grow_with_the_samples() -> None:
    """What a tally keeps beside its arrays, which have one size from the start."""
    tally = Tally(SPEC)

    tally.add(read_shard_of([sample_of(n, [*_digits(n), STOP]) for n in range(9000)]))

    kept = [tally.sources, tally.turns, tally.flags, tally.letters, tally.tokenizers]
    assert len(tally.repeats._kept) < 2 * 4096
    assert max(len(each) for each in kept) <= 1


def _digits(number: int) -> list[int]:
    return [3 + int(digit) for digit in f"{number:08d}"]
