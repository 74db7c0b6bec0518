"""The engine dies, hangs, refuses, lies or is another: good prompts get their answers, once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.fleet import Fleet
from tests.faults.processes import EngineServer, until
from tests.faults.proxy import Mode, Proxy
from tests.faults.runs import FaultRun, prompts
from tests.planned import prompt

pytestmark = pytest.mark.slow


def test_prompts_in_an_engine_that_dies_are_asked_once_more_and_answered_ones_never(
    fleet: Fleet, run: FaultRun
) -> None:
    engine = fleet.engine("slow")
    run.worker(engine="slow")
    (message,) = run.add([*prompts(run, 4, "tokens=3"), *prompts(run, 4, "tokens=60 long")])
    until(lambda: run.num_noted(message) == 4)

    engine.kill()
    time.sleep(1)
    engine.start()
    run.wait(message)

    run.prove()
    assert len(run.asked()) == 4 + 4 + 4
    assert {r.outcome for r in run.asked(containing="tokens=3")} == {"stop"}


def test_an_engine_that_answers_500_for_a_while_costs_no_prompt(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    fleet.engine().set_mode("500")
    (message,) = run.add(prompts(run, 6, "later"))

    time.sleep(2)
    fleet.engine().set_mode("ok")
    run.wait(message)

    run.prove()
    assert run.commit(message).rejected == []


def test_a_health_that_says_503_does_not_end_an_engine_that_answers(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    run.wait(*run.add(prompts(run, 1, "it is known to be the run's")))

    fleet.engine().set_mode("unhealthy")
    try:
        messages = run.add(*[prompts(run, 4, f"{number}") for number in range(4)])
        run.wait(*messages)
    finally:
        fleet.engine().set_mode("ok")

    run.prove()
    assert run.num_made_twice() == 0


def test_an_engine_that_hangs_behind_a_good_health_goes_on_where_it_is_started_anew(
    fleet: Fleet, run: FaultRun
) -> None:
    engine = fleet.engine("slow")
    run.worker(engine="slow")
    (message,) = run.add(prompts(run, 4, "tokens=40"))
    until(lambda: len(engine.running()) == 4)

    engine.set_mode("hang")
    time.sleep(3)
    engine.kill()
    engine.start()
    run.wait(message)

    run.prove()


def test_prompts_that_are_too_long_are_rejected_unsent_and_the_batch_goes_on(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    much_too_long = prompt(run.text("x " * 5000))
    by_a_little = prompt(run.text("x " * (run.spec.target.context_len // 2 - 64)))
    (message,) = run.add([much_too_long, *prompts(run, 3, "fine"), by_a_little])

    run.wait(message)

    run.prove()
    rejected = run.commit(message).rejected
    assert [r.key for r in rejected] == [much_too_long.key, by_a_little.key]
    assert {r.reason for r in rejected} == {"context_length"}
    assert len(run.asked()) == 3


def test_a_prompt_that_the_engine_refuses_is_rejected_alone(shared_run: FaultRun) -> None:
    run = shared_run
    run.keep_worker()
    (message,) = run.add([*prompts(run, 3, "fine"), prompt(run.text("refuse"))])

    run.wait(message)

    assert [r.reason for r in run.commit(message).rejected] == ["engine_refused"]
    assert run.commit(message).num_rows == 3


def test_an_answer_cut_by_its_limit_and_one_that_loops_are_kept_and_flagged(
    shared_run: FaultRun,
) -> None:
    run = shared_run
    run.keep_worker()
    (message,) = run.add([prompt(run.text("tokens=300 cut")), prompt(run.text("tokens=250 loop"))])

    run.wait(message)

    cut, loop = run.rows(message)
    assert "truncated" in cut.flags
    assert cut.answers[0].finish_reason == "length"
    assert len(cut.answers[0].output_ids) == 256
    assert "repetition" in loop.flags


@contextmanager
def supervised(engine: EngineServer) -> Iterator[list[float]]:
    """Start the engine again whenever it dies; the list fills with the moments of its deaths.

    At once, so that nobody finds it away: it is back before most who ask try again.
    """
    deaths: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if not engine.is_alive:
                deaths.append(time.monotonic())
                engine.start()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield deaths
    finally:
        over.set()
        thread.join()


def test_the_one_prompt_that_takes_the_engine_down_is_rejected_and_its_batch_commits(
    fleet: Fleet, run: FaultRun
) -> None:
    engine = fleet.engine("mortal")
    run.worker(engine="mortal")
    poison = prompt(run.text("tokens=40 kills"))
    innocents = prompts(run, 7, "tokens=40")
    (message, other) = run.add([*innocents[:4], poison, *innocents[4:]], prompts(run, 4, "else"))

    with supervised(engine) as deaths:
        run.wait(message, other, timeout_s=240)

    (rejected,) = run.commit(message).rejected
    assert rejected.key == poison.key
    assert rejected.detail
    assert run.commit(message).num_rows == 7
    assert run.commit(other).rejected == []
    assert 2 <= len(deaths) <= 8
    run.prove()


def test_a_network_that_fails_towards_the_engine_costs_no_prompt(
    fleet: Fleet, run: FaultRun
) -> None:
    engine = fleet.engine("slow")
    with Proxy(("127.0.0.1", engine.port)) as proxy:
        settings = dataclasses.replace(
            run.settings(engine), engine_url=f"http://127.0.0.1:{proxy.port}"
        )
        fleet.worker("w1", settings)
        for mode in (Mode.RESET, Mode.LOSE_REPLY, Mode.REFUSE, Mode.FREEZE):
            (message,) = run.add(prompts(run, 4, f"tokens=20 {mode}"))
            until(lambda: len(engine.running()) == 4, what=f"a full engine before {mode}")

            proxy.set(mode)
            time.sleep(3)
            proxy.set(Mode.PASS)
            run.wait(message, timeout_s=90)

            assert run.commit(message).rejected == [], mode
    run.prove()


def test_an_engine_that_comes_back_as_another_model_answers_nothing_for_the_run(
    fleet: Fleet, run: FaultRun
) -> None:
    engine = fleet.engine("changing")
    worker = run.worker(engine="changing")
    (first,) = run.add(prompts(run, 4, "first"))
    run.wait(first)

    engine.kill()
    engine.argv += ["--weights", "others"]
    engine.start()
    (second,) = run.add(prompts(run, 4, "second"))
    until(lambda: worker.has_logged("is not tiny as run") or run.is_done([second]))

    assert not run.is_done([second])
    engine.kill()
    engine.argv = engine.argv[:-2]
    engine.start()
    run.wait_with_supervisor("w1", second, timeout_s=120)
    run.prove()
    assert {request.engine for request in run.asked(containing="second")} == {"changing"}


def test_an_answer_that_contradicts_itself_reaches_no_commit(run: FaultRun) -> None:
    run.worker()
    (message, sound) = run.add([prompt(run.text("mismatch"))], prompts(run, 4, "sound"))

    run.wait(sound)
    until(lambda: len(run.asked(containing="mismatch")) >= 3)

    assert not run.is_done([message])
