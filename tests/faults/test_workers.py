"""A worker dies, stalls, or can't start: what it held runs elsewhere, and soon."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path

import pytest

from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.records import BatchMessage
from tests.faults.fleet import LONG, Fleet
from tests.faults.processes import EngineServer, Process, until
from tests.faults.runs import FaultRun, prompts
from tests.faults.starts import run_worker
from tests.planned import prompt

pytestmark = pytest.mark.slow

AWAY_S = 20.0  # from the kill to the batch at work elsewhere


@pytest.mark.alone
def test_a_dead_workers_batch_runs_elsewhere_within_20_s_and_1000_waiting_ones_do_not_delay_it(
    fleet: Fleet, run: FaultRun
) -> None:
    victim = run.worker("victim", engine="still", module=LONG)
    (held,) = run.add(prompts(run, 8, "tokens=250 held"))
    until(lambda: len(fleet.engine("still").running()) == 8)
    fleet.engine("still").set_mode("hang")  # or the batch might end before its worker is killed
    run.worker("heir", module=LONG)
    run.add(*[prompts(run, 1, f"waiting {number}") for number in range(1000)])
    until(lambda: len(run.committed()) > 3)

    victim.kill()
    killed_s = time.time()
    until(lambda: bool(_held_elsewhere(run)), 60, "the batch's next run")

    assert _held_elsewhere(run)[0] - killed_s < AWAY_S
    assert fleet.hints.num_queued(run.queue) > 200
    run.wait(held)


def _held_elsewhere(run: FaultRun) -> list[float]:
    """When the heir's engine was asked for the dead worker's prompts."""
    asked = run.asked(containing="held")
    return [request.started_s for request in asked if request.engine == "engine"]


def test_a_worker_killed_at_nine_tenths_of_a_batch_costs_the_last_tenth_alone(
    fleet: Fleet, run: FaultRun
) -> None:
    victim = run.worker("w1", engine="slow")
    (message,) = run.add([*prompts(run, 9, "tokens=3"), prompt(run.text("tokens=200 long"))])
    until(lambda: run.num_noted(message) == 9)

    in_flight = fleet.engine("slow").running()
    victim.kill()
    run.worker("w2")
    run.wait(message)

    run.prove()
    assert len(run.asked()) == 11
    # The engine goes on for a moment, until it notices that nobody listens any more.
    assert run.num_made_twice() <= sum(in_flight.values()) + 10


def test_a_node_that_is_gone_with_its_engine_costs_what_was_in_flight(
    fleet: Fleet, run: FaultRun
) -> None:
    victim = run.worker("w1", engine="slow-b")
    first = [*prompts(run, 3, "tokens=20"), *prompts(run, 1, "tokens=400 the last")]
    messages = run.add(first, *[prompts(run, 4, f"tokens={60 + 40 * n}") for n in range(2)])
    until(lambda: run.num_noted(messages[0]) == 3)

    in_flight = fleet.engine("slow-b").running()
    victim.kill()
    fleet.engine("slow-b").kill()
    run.worker("w2")
    run.wait(*messages)

    run.prove()
    assert 0 < run.num_made_twice() <= sum(in_flight.values()) + 8 * 2


def test_a_worker_whose_engine_is_killed_does_not_disturb_the_others(
    fleet: Fleet, run: FaultRun
) -> None:
    run.worker("w1", engine="slow-c")
    run.worker("w2", engine="slow-d")
    messages = run.add(*[prompts(run, 4, f"tokens=60 {number}") for number in range(4)])
    until(lambda: len(fleet.engine("slow-c").running()) == 8)
    until(lambda: len(fleet.engine("slow-d").running()) == 8)

    fleet.engines["slow-c"].kill()
    killed_s = time.time()
    run.wait(*messages, timeout_s=90)

    run.prove()
    others = [r for r in run.asked() if r.engine == "slow-d" and r.started_s < killed_s]
    assert {request.outcome for request in others} == {"stop"}


@pytest.mark.alone
def test_the_engine_is_kept_full_while_batches_wait(fleet: Fleet, run: FaultRun) -> None:
    messages = run.add(
        *[
            [prompt(run.text(f"tokens={(7 * n * n) % 60 + 2} {n} {m}")) for m in range(8)]
            for n in range(14)
        ]
    )
    run.worker(engine="slow-e", max_in_flight=16)
    until(lambda: len(run.committed()) >= 1)

    samples = []
    while len(run.committed()) < len(messages) - 5:
        samples.append(len(fleet.engine("slow-e").running()))
        time.sleep(0.2)

    assert sum(samples) / len(samples) >= 0.9 * 16


def test_a_batch_whose_plan_is_broken_is_buried_and_the_next_one_is_done(
    fleet: Fleet, shared_run: FaultRun
) -> None:
    run = shared_run
    run.keep_worker()
    unplanned = BatchMessage(run.name, 7, "0123456789abcdef")
    planned = run.plan.add(prompts(run, 2, "sound"))

    fleet.hints.offer([unplanned, *planned], run.queue)
    run.wait(*planned)

    letters = fleet.hints.redis.lrange(fleet.hints.keys.dead("plan"), 0, -1)
    assert any(run.name.encode() in letter and b"segment 7" in letter for letter in letters)


def test_work_in_flight_is_shown_though_no_message_waits(fleet: Fleet, run: FaultRun) -> None:
    run.worker("w1", engine="slow")
    (message,) = run.add(prompts(run, 2, "tokens=250"))
    heartbeat = fleet.hints.keys.worker("w1")

    until(lambda: fleet.hints.redis.hget(heartbeat, "in_flight") == b"2")

    assert fleet.hints.num_queued(run.queue) == 0
    assert fleet.hints.redis.zcard(fleet.hints.keys.inflight(run.name)) == 1
    assert not run.is_done([message])


def test_a_worker_without_an_engine_says_so_in_one_line_and_leaves(
    fleet: Fleet, run: FaultRun
) -> None:
    run.plan.add(prompts(run, 1, "never"))
    settings = dataclasses.replace(
        run.settings(fleet.engine()), engine_url="http://127.0.0.1:9", slot="none"
    )

    started = time.monotonic()
    code, said = run_worker(settings)

    assert code == 1
    assert time.monotonic() - started < 30
    assert said.strip().splitlines()[-1].startswith("dflash-fleet: no engine within 2 s")
    assert "Traceback" not in said


def test_an_engine_with_other_weights_is_refused_before_the_first_batch(
    fleet: Fleet, run: FaultRun, tmp_path: Path
) -> None:
    run.worker("w1")
    run.wait(*run.add(prompts(run, 1, "the first engine's")))
    fleet.workers["w1"].close()
    (message,) = run.add(prompts(run, 1, "never by the wrong one"))
    other = EngineServer("other", fleet.place.model_dir, tmp_path, token_s=0.01)
    other.argv += ["--weights", "others"]

    try:
        other.start()
        code, said = run_worker(run.settings(other))
    finally:
        other.close()

    assert code == 1
    assert "is not tiny as run" in said
    assert not run.is_done([message])
    assert not run.store.exists(RunKeys(run.name).commit(message.segment, message.batch))


def test_a_frozen_worker_that_wakes_leaves_its_successors_lease_alone(
    fleet: Fleet, run: FaultRun
) -> None:
    sleeper: Process = run.worker("w1", engine="slow-f")
    (message,) = run.add(prompts(run, 2, "tokens=120"))
    until(lambda: len(fleet.engine("slow-f").running()) == 2)

    sleeper.send(signal.SIGSTOP)
    run.worker("w2", engine="slow-g")
    until(lambda: len(fleet.engine("slow-g").running()) == 2)
    lease = fleet.hints.keys.lease(run.name, batch_name(message.segment, message.batch))
    heirs = fleet.hints.redis.get(lease)
    sleeper.send(signal.SIGCONT)
    until(lambda: fleet.engine("slow-f").running() == {})

    assert fleet.hints.redis.get(lease) == heirs
    run.wait(message)
    run.prove()
    assert run.commit(message).worker == "w2"
