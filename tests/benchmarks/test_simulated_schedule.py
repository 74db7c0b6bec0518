"""How far requests come in a simulated engine, and when."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.simulated.pace import Drafter, Pace, Prefill, linear_steps
from benchmarks.simulated.schedule import Job, Schedule

FREE = Pace(linear_steps(0.01))


def run_to_end(schedule: Schedule) -> None:
    while schedule.due_s() < math.inf:
        schedule.advance(schedule.due_s())


def stepped(pace: Pace, max_running: int, jobs: list[tuple[int, int]]) -> list[float]:
    """When each of (prompt ids, answer ids), all there at 0, ends: token by token, batch by batch.

    A second telling of the rules: no counter, no events.
    """
    at_s, waiting, running = 0.0, list(range(len(jobs))), dict[int, int]()
    ends, chunk = [0.0] * len(jobs), pace.prefill.chunk_tokens
    reading: dict[int, int] = {}
    while waiting or running or reading:
        while waiting and len(running) + len(reading) < max_running:
            number = waiting.pop(0)
            reading[number] = jobs[number][0]
        if reading:
            room, read = chunk, 0
            for number in list(reading):
                part = min(reading[number], room)
                room, read = room - part, read + part
                reading[number] -= part
            at_s += pace.prefill_s(read)
            for number in [n for n, left in reading.items() if not left]:
                del reading[number]
                running[number] = 1
        else:
            at_s += pace.step_s(len(running))
            running = {number: made + 1 for number, made in running.items()}
        for number in [n for n, made in running.items() if made >= jobs[n][1]]:
            del running[number]
            ends[number] = at_s
    return ends


def test_requests_end_when_a_step_by_step_telling_says() -> None:
    dice = random.Random(3)
    asked = [(dice.randint(1, 900), dice.randint(1, 60)) for _ in range(80)]
    pace = Pace(linear_steps(0.002, 0.0003, 5, 3.0), Prefill(20_000.0, 0.004, 512))
    schedule = Schedule(pace, max_running=7)
    jobs = [Job(num_input, num_wanted, "stop") for num_input, num_wanted in asked]

    for job in jobs:
        schedule.add(job, 0.0)
    run_to_end(schedule)

    # All but the first was there when the first batch began.
    first, *others = stepped(pace, 7, asked)
    assert jobs[0].moved_s == pytest.approx(first, rel=0.2)
    assert [job.moved_s for job in jobs[1:]] == pytest.approx(others, rel=0.02)
    assert {job.outcome for job in jobs} == {"stop"}
    assert schedule.num_tokens == pytest.approx(sum(num_wanted for _, num_wanted in asked))


def test_whoever_looks_late_sees_what_would_have_been_seen_in_time() -> None:
    def ends(look_every_s: float) -> list[float | None]:
        schedule = Schedule(FREE, max_running=3)
        jobs = [Job(5, 10 * number, "stop") for number in range(1, 9)]
        for job in jobs:
            schedule.add(job, 0.0)
        for look in range(1, int(10 / look_every_s) + 1):
            schedule.advance(look * look_every_s)
        return [job.moved_s for job in jobs]

    assert ends(5.0) == pytest.approx(ends(0.003))


def test_a_client_hears_of_the_first_token_and_then_at_its_interval() -> None:
    heard: list[int] = []
    schedule = Schedule(FREE, max_running=4)
    job = Job(3, 200, "length", stream_every=64)
    job.hear = lambda: heard.append(schedule.num_made(job))

    schedule.add(job, 0.0)
    run_to_end(schedule)

    assert heard == [1, 65, 129, 193, 200]


def test_a_full_engine_lets_the_others_wait_in_the_order_of_their_coming() -> None:
    schedule = Schedule(FREE, max_running=2)
    jobs = [Job(1, 100, "length") for _ in range(4)]

    for job in jobs:
        schedule.add(job, 0.0)
    schedule.advance(0.5)
    waiting = list(schedule.waiting)
    schedule.drop(jobs[0], 0.5, "abort")
    schedule.advance(10.0)

    assert waiting == jobs[2:]
    assert jobs[0].num_kept == 50
    assert [job.moved_s for job in jobs] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_reading_a_prompt_holds_up_whoever_decodes() -> None:
    schedule = Schedule(Pace(linear_steps(0.01), Prefill(1000.0)), max_running=4)
    first, second = Job(100, 51, "stop"), Job(300, 11, "stop")

    schedule.add(first, 0.0)
    schedule.advance(0.2)
    schedule.add(second, 0.2)
    run_to_end(schedule)

    assert first.first_s == pytest.approx(0.1)
    assert second.first_s == pytest.approx(0.5)
    assert first.moved_s == pytest.approx(0.1 + 50 * 0.01 + 0.3)


def test_where_memory_is_full_the_last_one_goes_back_and_still_gets_its_answer() -> None:
    schedule = Schedule(Pace(linear_steps(0.001), Prefill(1e6)), max_running=8, kv_tokens=1000)
    jobs = [Job(100, 300, "stop") for _ in range(12)]

    for job in jobs:
        schedule.add(job, 0.0)
    used = []
    while (due_s := schedule.due_s()) < math.inf:
        schedule.advance(due_s - 1e-9)
        used.append(schedule.kv_used)
        schedule.advance(due_s)

    assert 950 < max(used) <= 1001
    assert schedule.num_retracted > 0
    assert {job.outcome for job in jobs} == {"stop"}
    assert {job.num_kept for job in jobs} == {300}


def test_while_it_hangs_nobody_gains_anything() -> None:
    schedule = Schedule(FREE, max_running=2)
    job = Job(1, 100, "stop")
    schedule.add(job, 0.0)

    schedule.pause(0.3, True)
    schedule.advance(5.0)
    during, due_s = schedule.num_made(job), schedule.due_s()
    schedule.pause(6.0, False)
    run_to_end(schedule)

    assert (during, due_s) == (30, math.inf)
    assert job.moved_s == pytest.approx(6.7)


def test_a_prompt_that_was_being_read_or_came_while_it_hung_is_read_after_that() -> None:
    schedule = Schedule(Pace(linear_steps(0.01), Prefill(1000.0)), max_running=4)
    before, during = Job(1000, 1, "stop"), Job(500, 1, "stop")

    schedule.add(before, 0.0)
    schedule.pause(0.4, True)
    schedule.add(during, 1.0)
    schedule.pause(5.0, False)
    run_to_end(schedule)

    assert before.moved_s == pytest.approx(5.6)
    assert during.moved_s == pytest.approx(6.1)


def test_one_that_came_to_an_idle_engine_while_it_hung_is_read_after_that() -> None:
    schedule = Schedule(Pace(linear_steps(0.01), Prefill(1000.0)), max_running=4)
    job = Job(500, 1, "stop")

    schedule.pause(0.0, True)
    schedule.add(job, 1.0)
    schedule.pause(5.0, False)
    run_to_end(schedule)

    assert job.moved_s == pytest.approx(5.5)


def test_past_its_knee_a_step_takes_so_many_times_as_long() -> None:
    pace = Pace(linear_steps(0.002, 0.00001, 256, 4.0))

    assert pace.step_s(256) == pytest.approx(0.00456)
    assert pace.step_s(300) == pytest.approx(0.02)


def test_steps_between_two_rows_lie_between_them_and_a_factor_divides_all() -> None:
    rows = ((1, 0.002), (11, 0.004), (12, 0.04))
    pace = Pace(rows, Prefill(1000.0, 0.5), time_factor=10.0)

    assert [Pace(rows).step_s(n) for n in (0, 1, 6, 11, 12)] == pytest.approx(
        [0.002, 0.002, 0.003, 0.004, 0.04]
    )
    assert pace.step_s(6) == pytest.approx(0.0003)
    assert pace.prefill_s(500) == pytest.approx(0.1)


def test_a_drafter_makes_steps_longer_and_brings_more_tokens_of_each() -> None:
    pace = Pace(linear_steps(0.01), drafter=Drafter(2.4, 1.2, 0.05))

    assert pace.step_s(1) == pytest.approx(0.01 * 1.25 / 2.4)
    assert pace.step_s(32) == pytest.approx(0.01 * 2.8 / 2.4)
