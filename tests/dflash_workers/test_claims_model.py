"""The claims keep their promises in every order of steps and faults; broken rules are noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.dflash_workers.claims_model import Rules
from tests.dflash_workers.claims_search import (
    HELD_PENDING,
    LITTER_ROWS,
    STALE_PENDING,
    STUCK_ALONE,
    Scope,
    search,
)
from tests.dflash_workers.claims_steps import Fault
from tests.dflash_workers.claims_task import DANGLING, MADE_AGAIN, ROBBED, SECOND_COMMIT, UNTOLD

# Each rule, the faults in which breaking it shows, and how.
BROKEN = [
    ("a_lease_lapses_with_its_deadline", [], HELD_PENDING),
    ("renewing_tells_of_a_lapse", [Fault.STALL], MADE_AGAIN),
    ("renewing_tells_of_a_clear", [Fault.STALL], UNTOLD),
    ("an_unanswered_renewal_counts_as_a_lapse", [Fault.STALL, Fault.UNANSWERED], MADE_AGAIN),
    ("releasing_drops_the_lease_first", [Fault.DRAIN], STUCK_ALONE),
    ("reaping_leaves_an_entry", [Fault.CRASH, Fault.CRASH], STUCK_ALONE),
    ("settling_looks_at_the_deadline", [Fault.STALL], HELD_PENDING),
    ("clearing_leaves_anothers_lease", [Fault.STALL], ROBBED),
    ("clearing_removes_the_journal", [], LITTER_ROWS),
    ("offering_spares_what_is_held", [], HELD_PENDING),
    ("reconciling_offers_what_is_committed_but_pending", [Fault.CRASH], STALE_PENDING),
    ("the_journal_is_read_before_s3", [Fault.STALL], MADE_AGAIN),
    ("s3_is_asked_after_a_claim", [Fault.HINT_DOUBLED], MADE_AGAIN),
    ("the_commit_is_conditional", [Fault.STALL], SECOND_COMMIT),
    ("data_stays_when_the_lease_is_lost", [Fault.STALL, Fault.LATE_PUT], DANGLING),
    ("data_stays_when_the_commit_names_it", [Fault.UNANSWERED], DANGLING),
]


def wrongs(scope: Scope) -> dict[str, list[str]]:
    """What is wrong, each with the shortest way there."""
    return search(scope)[1]


def test_nothing_goes_wrong_where_nothing_fails() -> None:
    assert wrongs(Scope(num_faults=0)) == {}


def test_nothing_goes_wrong_with_one_fault_anywhere() -> None:
    assert wrongs(Scope(num_faults=1, rules=Rules(prompts=(1, 2)))) == {}


@pytest.mark.slow
def test_nothing_goes_wrong_with_two_faults_anywhere() -> None:
    assert wrongs(Scope(num_faults=2)) == {}


@pytest.mark.slow
def test_nothing_goes_wrong_with_two_sweeps_and_two_who_offer() -> None:
    assert wrongs(Scope(num_faults=1, num_sweeps=2, num_offers=2)) == {}


@pytest.mark.parametrize(("rule", "faults", "wrong"), BROKEN)
def test_a_broken_rule_is_noticed(rule: str, faults: list[Fault], wrong: str) -> None:
    change: dict[str, Any] = {rule: False}
    rules = dataclasses.replace(Rules(), **change)

    assert wrong in wrongs(Scope(len(faults), rules, frozenset(faults), until=wrong))


def test_every_rule_has_been_broken() -> None:
    rules = {field.name for field in dataclasses.fields(Rules) if field.type == "bool"}

    assert rules == {rule for rule, _, _ in BROKEN}
