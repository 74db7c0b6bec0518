"""When a worker stops to take work, and that it always comes back: against a plain recount."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.breaker import Breaker, Kind, Limits, has_room

LIMITS = Limits(
    window_s=60,
    failed_share=0.5,
    min_attempts=10,
    failing_s=30,
    min_failures=3,
    pause_s=5,
    max_pause_s=60,
    probe_s=20,
)

Attempt = tuple[float, bool]  # (seconds since the one before, ok)

attempts = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 1.0, 7.0, 31.0, 61.0]), st.booleans()), max_size=60
)


def fails(breaker: Breaker, kind: Kind, since_s: float, num: int = 10) -> float:
    """Make `num` attempts fail, one a second; return when."""
    for now_s in range(num):
        breaker.record(kind, False, since_s + now_s)
    return since_s + num - 1


def must_be_open(history: list[tuple[float, bool]]) -> bool:
    """The rules in words, over the whole history of a breaker that has not opened before."""
    now_s, ok = history[-1]
    recent = [was_ok for at_s, was_ok in history if at_s > now_s - LIMITS.window_s]
    if len(recent) >= LIMITS.min_attempts and recent.count(False) / len(recent) >= 0.5 and not ok:
        return True
    failures = list(itertools.takewhile(lambda a: not a[1], reversed(history)))
    unbroken = failures[:1] + [
        earlier
        for later, earlier in itertools.takewhile(
            lambda pair: pair[0][0] - pair[1][0] <= LIMITS.window_s, itertools.pairwise(failures)
        )
    ]
    return len(unbroken) >= LIMITS.min_failures and now_s - unbroken[-1][0] >= LIMITS.failing_s


@given(attempts)
def test_it_opens_exactly_when_the_rules_say_so(attempts: list[Attempt]) -> None:
    breaker, history, now_s = Breaker(LIMITS), list[tuple[float, bool]](), 1000.0

    for after_s, ok in attempts:
        now_s += after_s
        history.append((now_s, ok))
        breaker.record("engine", ok, now_s)

        assert (breaker.why_open() is not None) == must_be_open(history)
        if breaker.why_open():
            return


@given(attempts)
def test_whatever_happened_it_comes_back_with_the_first_success_after_the_longest_pause(
    attempts: list[Attempt],
) -> None:
    breaker, now_s = Breaker(LIMITS), 0.0
    for after_s, ok in attempts:
        now_s += after_s
        breaker.record("store", ok, now_s)
        breaker.lets_through(now_s)

    now_s += LIMITS.max_pause_s + LIMITS.probe_s
    assert breaker.lets_through(now_s)
    breaker.record("store", True, now_s)

    assert breaker.why_open() is None
    assert breaker.lets_through(now_s)


@given(attempts, st.lists(st.floats(0, 30), max_size=100))
def test_while_it_is_open_no_two_probes_go_without_an_outcome_between_them(
    attempts: list[Attempt], waits_s: list[float]
) -> None:
    breaker, now_s = Breaker(LIMITS), 0.0
    for after_s, ok in attempts:
        now_s += after_s
        breaker.record("engine", ok, now_s)
    probed_s = []

    for wait_s in waits_s:
        now_s += wait_s
        if breaker.why_open() and breaker.lets_through(now_s):
            probed_s.append(now_s)

    assert all(b - a >= LIMITS.probe_s for a, b in itertools.pairwise(probed_s))


def test_the_pause_doubles_with_each_probe_that_fails_up_to_its_limit() -> None:
    breaker = Breaker(LIMITS)
    failed_s = fails(breaker, "engine", 0)
    pauses_s = []

    for now_s in range(int(failed_s), 300):
        if breaker.lets_through(now_s):
            pauses_s.append(now_s - failed_s)
            breaker.record("engine", False, now_s)
            failed_s = now_s

    assert pauses_s == [5, 10, 20, 40, 60, 60, 60]


def test_one_that_opens_again_waits_longer_and_after_a_quiet_window_as_at_first() -> None:
    breaker = Breaker(LIMITS)

    now_s = fails(breaker, "engine", 0) + 5
    breaker.record("engine", True, now_s)
    opened_s = fails(breaker, "engine", now_s + 1)
    assert not breaker.lets_through(opened_s + 9)
    assert breaker.lets_through(opened_s + 10)

    breaker.record("engine", True, opened_s + 10)
    opened_s = fails(breaker, "engine", opened_s + 200)
    assert not breaker.lets_through(opened_s + 4)
    assert breaker.lets_through(opened_s + 5)


def test_a_success_that_was_asked_for_before_it_opened_does_not_close_it() -> None:
    breaker = Breaker(LIMITS)
    opened_s = fails(breaker, "engine", 0)

    breaker.record("engine", True, opened_s + 1)

    assert breaker.why_open()
    assert not breaker.lets_through(opened_s + 1)


def test_a_few_failures_among_many_successes_do_not_open_it() -> None:
    breaker = Breaker(LIMITS)

    for now_s in range(600):
        breaker.record("engine", now_s % 5 != 0, now_s)

    assert breaker.why_open() is None


def test_a_worker_that_tries_seldom_finds_out_as_well() -> None:
    breaker = Breaker(LIMITS)

    for now_s in (0, 20, 40):
        breaker.record("store", False, now_s)

    assert breaker.why_open() == "store: no success for 40 s"


def test_two_failures_hours_apart_are_no_outage() -> None:
    breaker = Breaker(LIMITS)

    for hour in range(5):
        breaker.record("store", False, hour * 3600)

    assert breaker.why_open() is None


def test_one_open_kind_is_enough_and_all_reasons_are_told() -> None:
    breaker = Breaker(LIMITS)
    for now_s in range(20):
        breaker.record("redis", True, now_s)

    opened_s = fails(breaker, "engine", 0)
    fails(breaker, "store", 0)
    breaker.record("disk", False, opened_s)

    assert breaker.why_open() == (
        "engine: 10 of 10 failed within 60 s; store: 10 of 10 failed within 60 s; disk: nearly full"
    )


def test_a_full_disk_lets_nothing_through_until_it_has_room_again() -> None:
    breaker = Breaker(LIMITS)

    breaker.record("disk", False, 0)
    assert breaker.why_open() == "disk: nearly full"
    assert not breaker.lets_through(1000)

    breaker.record("disk", True, 1000)
    assert breaker.why_open() is None
    assert breaker.lets_through(1000)


def test_the_reason_stays_the_same_text_while_probes_fail() -> None:
    breaker = Breaker(LIMITS)
    now_s = fails(breaker, "engine", 0)
    told = breaker.why_open()

    for _ in range(5):
        now_s += 60
        breaker.record("engine", False, now_s)

    assert breaker.why_open() == told


def test_of_many_threads_that_ask_at_once_one_gets_the_probe() -> None:
    breaker = Breaker(LIMITS)
    opened_s = fails(breaker, "engine", 0)
    at_once = threading.Barrier(8)
    answers = []

    def ask() -> None:
        at_once.wait()
        answers.append(breaker.lets_through(opened_s + 5))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers.count(True) == 1


@pytest.mark.parametrize(("min_free_bytes", "found"), [(1, True), (1 << 62, False)])
def test_a_folder_has_room_while_its_disk_has_enough(
    tmp_path: Path, min_free_bytes: int, found: bool
) -> None:
    assert has_room(tmp_path, min_free_bytes) is found


def test_a_folder_that_is_gone_has_no_room(tmp_path: Path) -> None:
    assert not has_room(tmp_path / "gone", 1)
