"""The files of campaigns, and the schedule that is drawn from them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.campaign import kinds, schedule
from benchmarks.campaign.configuration import Churn, Configuration, Faults, read_configuration
from dflash_workers.contract.errors import BadUsage

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "campaigns").glob("*.toml"))
SHORT = next(file for file in FILES if file.stem == "short")
FAULTS = next(file for file in FILES if file.stem == "faults")


def drawn(wanted: Configuration) -> list[schedule.Fault]:
    return schedule.draw(wanted.seed, wanted.faults, wanted.churn, wanted.workers.count)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_campaign_can_be_read_and_is_named_as_its_file(file: Path) -> None:
    assert read_configuration(file).name == file.stem


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("batch_size =", "batchsize =", "batchsize"),
        ('name = "short"', 'name = "short"\ncolour = 1', "colour"),
        ("in_flight = 12", 'in_flight = "12"', "in_flight"),
        ("s3_proxy = true", "s3_proxy = false", "s3_proxy"),
        ("redis_proxy = true", "redis_proxy = false", "redis_proxy"),
        ("clocks = true", "clocks = false", "clocks"),
        ("at_s = 0.0", "at_s = 9.0", "joins"),
        ("worker_killed =", "worker_kiled =", "worker_kiled"),
    ],
)
def test_what_a_file_says_wrongly_is_named(
    tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    text = SHORT.read_text()
    assert before in text
    file = tmp_path / "wrong.toml"
    file.write_text(text.replace(before, after))

    with pytest.raises(BadUsage, match=complaint):
        read_configuration(file)


def test_a_seed_draws_one_schedule_and_another_seed_another() -> None:
    wanted = read_configuration(FAULTS)

    assert drawn(wanted) == drawn(wanted)
    assert drawn(wanted) != drawn(dataclasses.replace(wanted, seed=wanted.seed + 1))


def test_the_short_campaign_meets_every_kind_of_fault() -> None:
    faults = drawn(read_configuration(SHORT))

    assert {fault.kind for fault in faults} == set(kinds.ALL)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


def test_of_a_thousand_faults_half_are_workers_that_go_and_half_of_these_are_told() -> None:
    met = Counter(fault.kind for fault in drawn(read_configuration(FAULTS)))

    assert met.total() == 1000
    assert set(met) == set(kinds.ALL)
    assert met[kinds.WORKER_KILLED] + met[kinds.WORKER_TOLD] >= 0.45 * 1000
    assert 0.8 < met[kinds.WORKER_TOLD] / met[kinds.WORKER_KILLED] < 1.25


def test_deaths_come_at_their_rate_and_as_often_with_notice_as_was_asked() -> None:
    churn = Churn(deaths_per_worker_hour=6.0, notice_share=0.25, over_s=36_000.0)

    faults = schedule.draw(3, Faults(), churn, num_workers=20)

    assert 1000 < len(faults) < 1400
    told = sum(fault.kind == kinds.WORKER_TOLD for fault in faults)
    assert 0.2 < told / len(faults) < 0.3
    assert {fault.victim for fault in faults} == set(range(20))
    assert max(fault.at_s for fault in faults) < 36_000


def test_a_quick_campaign_is_smaller_and_still_whole() -> None:
    wanted = read_configuration(FAULTS)

    quick = wanted.resized(0.1)

    assert quick.prompts.count == 10_000
    assert len(drawn(quick)) == 100
    assert quick.faults.over_s == pytest.approx(wanted.faults.over_s / 10)
    assert wanted.lasting(1.0).faults_over_s == 60
