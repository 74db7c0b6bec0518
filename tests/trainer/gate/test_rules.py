"""Each rule holds up to its threshold and fails just above it, on data that break it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import RunSpec
from tests.trainer.gate.making import (
    SPEC,
    STOP,
    THINKING_SPEC,
    healthy,
    random_answer,
    read_shard_of,
    sample_of,
    words,
)
from trainer.gate.benchmarks import Benchmarks
from trainer.gate.reading import ReadShard
from trainer.gate.rules import FAIL, NOT_JUDGED, OVERRIDDEN, PASS, RULES, Rule, Share, judge
from trainer.gate.tally import Tally

Shards = Sequence[ReadShard]
NUM = 200
LIMITS = {rule.name: rule.max_share for rule in RULES}


def outcomes(
    shards: Shards, *, spec: RunSpec = SPEC, benchmarks: Benchmarks | None = None
) -> dict[str, str]:
    tally = Tally(spec, benchmarks)
    for shard in shards:
        tally.add(shard)
    return {v.rule: v.outcome for v in judge(tally.shares())}


def nearly_empty(num_bad: int) -> Shards:
    bad = [sample_of(n, [3 + n, 4, 5, 6, 7, STOP]) for n in range(num_bad)]
    return [read_shard_of([*bad, *healthy(NUM - num_bad, num_bad)])]


def flagged_empty(num_bad: int) -> Shards:
    bad = [sample_of(n, random_answer(n, 40), flags=["empty"]) for n in range(num_bad)]
    return [read_shard_of([*bad, *healthy(NUM - num_bad, num_bad)])]


def skipped_as_empty(num_bad: int) -> Shards:
    return [read_shard_of(healthy(NUM - num_bad), skipped={"empty": num_bad})]


def cut_off(num_bad: int) -> Shards:
    bad = [sample_of(n, random_answer(n, 40)[:-1]) for n in range(num_bad)]
    return [read_shard_of([*bad, *healthy(NUM - num_bad, num_bad)])]


def nearly_repeated(num_bad: int) -> Shards:
    """Of each four near-duplicates, three repeat the first."""
    good = healthy(NUM - num_bad)
    models = [s.ids[s.prompt_len :].tolist() for s in good if len(s.ids) > 90]
    bad = []
    for number in range(num_bad):
        model = models[number // 3 % len(models)]
        bad.append(sample_of(NUM - num_bad + number, [*model[:-1], 3 + number, STOP]))
    return [read_shard_of([*good, *bad])]


def looping(num_bad: int) -> Shards:
    bad = [sample_of(n, [*random_answer(n, 20)[:-1], *[5, 6, 7] * 9]) for n in range(num_bad)]
    return [read_shard_of([*bad, *healthy(NUM - num_bad, num_bad)])]


def skipped_as_looping(num_bad: int) -> Shards:
    skipped = {"repetition": num_bad // 2, "tool_call_loop": num_bad - num_bad // 2}
    return [read_shard_of(healthy(NUM - num_bad), skipped=skipped)]


def saying_the_same(num_bad: int) -> Shards:
    """Too short to be a near-duplicate, too long to be empty."""
    bad = [sample_of(n, [*range(10, 20), STOP]) for n in range(num_bad)]
    return [read_shard_of([*bad, *healthy(NUM - num_bad, num_bad)])]


def other_tokenizer(num_bad: int) -> Shards:
    good = [read_shard_of(healthy(10, 10 * n)) for n in range(4)]
    return [*good, *[read_shard_of(healthy(5, 50), tokenizer="o" * 64)] * num_bad]


def thinking(num_bad: int) -> Shards:
    """The bad ones have an empty thinking: markers and the lines between them."""
    samples = [
        sample_of(n, random_answer(n, 60), thinking=4 if n < num_bad else 5) for n in range(NUM)
    ]
    return [read_shard_of(samples)]


def asking_a_benchmark(num_bad: int) -> Shards:
    asked = ["one two three four five six seven eight"] * num_bad
    said = [words(asked=text) for text in [*asked, *["something else"] * (NUM - num_bad)]]
    return [read_shard_of(healthy(NUM), said)]


@pytest.mark.parametrize(
    ("rule", "make", "spec"),
    [
        ("empty_answers", nearly_empty, SPEC),
        ("empty_answers", flagged_empty, SPEC),
        ("empty_answers", skipped_as_empty, SPEC),
        ("truncated", cut_off, SPEC),
        ("near_duplicates", nearly_repeated, SPEC),
        ("loops", looping, SPEC),
        ("loops", skipped_as_looping, SPEC),
        ("dominating_answer", saying_the_same, SPEC),
        ("thinking_missing", thinking, THINKING_SPEC),
        ("benchmark_overlap", asking_a_benchmark, SPEC),
        ("tokenizer_mismatch", other_tokenizer, SPEC),
    ],
)
def test_a_rule_holds_up_to_its_threshold_and_fails_above_it(
    rule: str, make: Callable[[int], Shards], spec: RunSpec
) -> None:
    benchmarks = Benchmarks([("b", "one two three four five six seven eight")])
    most = int(LIMITS[rule] * NUM)

    below = outcomes(make(most), spec=spec, benchmarks=benchmarks)
    above = outcomes(make(most + 1), spec=spec, benchmarks=benchmarks)

    assert below[rule] == PASS
    assert FAIL not in below.values()
    assert [name for name, outcome in above.items() if outcome == FAIL] == [rule]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_few_answers_are_not_judged(rule: Rule) -> None:
    few = judge({rule.name: Share(rule.min_total - 1, rule.min_total - 1)})
    enough = judge({rule.name: Share(rule.min_total, rule.min_total)})

    (unjudged,) = [v for v in few if v.rule == rule.name]
    assert unjudged.outcome == NOT_JUDGED
    assert unjudged.sentence() == f"too few to judge: {rule.min_total - 1} of {rule.min_total}"
    assert [v.outcome for v in enough if v.rule == rule.name] == [FAIL]


def test_a_run_with_a_short_limit_means_to_cut_its_answers() -> None:
    short = replace(SPEC, sampling=replace(SPEC.sampling, max_new_tokens=255))

    assert outcomes(cut_off(NUM), spec=short)["truncated"] == NOT_JUDGED
    assert outcomes(cut_off(NUM))["truncated"] == FAIL


def test_a_rule_that_does_not_apply_says_why() -> None:
    short = replace(SPEC, sampling=replace(SPEC.sampling, max_new_tokens=48))
    tally = Tally(short)
    for shard in cut_off(NUM):
        tally.add(shard)

    verdicts = {v.rule: v for v in judge(tally.shares())}

    said = "skipped: the run's limit of 48 new tokens is below 256"
    assert verdicts["truncated"].sentence() == said
    assert "does not ask for thinking" in verdicts["thinking_missing"].sentence()
    assert "no file" in verdicts["benchmark_overlap"].sentence()
    assert verdicts["loops"].sentence().endswith("at most 10%")


def test_thinking_is_not_asked_for_where_the_run_does_not() -> None:
    assert outcomes(thinking(NUM))["thinking_missing"] == NOT_JUDGED


@pytest.mark.parametrize("flags", [[], ["unfinished_thinking"]])
def test_thinking_that_was_cut_off_is_thinking(flags: list[str]) -> None:
    samples = [sample_of(n, random_answer(n, 60)[:-1], flags=flags) for n in range(20)]
    said = [words("", reasoning="So")] * 20 if not flags else []

    found = outcomes([read_shard_of(samples, said)], spec=THINKING_SPEC)

    assert found["thinking_missing"] == PASS


def test_an_override_lets_its_rule_pass_and_no_other() -> None:
    shares = {"loops": Share(60, 100), "truncated": Share(100, 100)}

    verdicts = {v.rule: v.outcome for v in judge(shares, ["loops"])}

    assert (verdicts["loops"], verdicts["truncated"]) == (OVERRIDDEN, FAIL)


def test_an_override_of_a_rule_that_holds_changes_nothing() -> None:
    verdicts = {v.rule: v.outcome for v in judge({"loops": Share(0, 100)}, ["loops"])}

    assert verdicts["loops"] == PASS


def test_an_override_of_no_rule_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(BadInput, match=r"lops.*empty_answers.*loops"):
        judge({}, ["lops"])
