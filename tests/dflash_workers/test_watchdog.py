"""A deaf worker reconnects, then exits; a dumb engine is found out; and nobody is accused idly."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from dflash_workers.embedded import start_redis
from dflash_workers.watchdog import Limits, Verdict, View, Watchdog, reconnect
from tests.batches import until

LIMITS = Limits(reconnect_s=20, exit_s=35, engine_s=180, longest_step_s=5)
IDLE = View(0, True, num_received=0, num_running=0, num_replies=0, num_tokens=0)
HUNGRY = dataclasses.replace(IDLE, num_queued=7)
WAITING = dataclasses.replace(IDLE, num_running=48)
EVERY_S = 2


def verdicts(*stretches: tuple[View, int], watchdog: Watchdog | None = None) -> dict[int, Verdict]:
    """All verdicts but OK, by second, of looks at one view after the other for so many seconds."""
    watchdog = watchdog or Watchdog(0, LIMITS)
    views = [view for view, seconds in stretches for _ in range(seconds // EVERY_S)]
    found = {i * EVERY_S: watchdog.look(view, i * EVERY_S) for i, view in enumerate(views, 1)}
    return {now_s: verdict for now_s, verdict in found.items() if verdict is not Verdict.OK}


def test_a_queue_that_waits_while_a_slot_is_free_means_reconnect_and_then_exit() -> None:
    assert verdicts((HUNGRY, 60)) == {20: Verdict.RECONNECT, 56: Verdict.EXIT}


def test_a_message_after_the_reconnect_starts_the_clock_anew() -> None:
    received = dataclasses.replace(HUNGRY, num_received=1)

    assert verdicts((HUNGRY, 30), (received, 20)) == {20: Verdict.RECONNECT}
    assert verdicts((HUNGRY, 30), (received, 24)) == {20: Verdict.RECONNECT, 52: Verdict.RECONNECT}


@pytest.mark.parametrize(
    "changes",
    [{"num_queued": 0}, {"num_queued": None}, {"wants_more": False}],
    ids=["queue_empty", "redis_away", "full_or_leaving"],
)
def test_a_worker_that_can_receive_nothing_is_not_deaf(changes: dict[str, Any]) -> None:
    view = dataclasses.replace(HUNGRY, **changes)

    assert verdicts((view, 600)) == {}
    assert verdicts((HUNGRY, 18), (view, 2), (HUNGRY, 18)) == {}


def test_messages_that_come_keep_it_quiet() -> None:
    views = [(dataclasses.replace(HUNGRY, num_received=n), 18) for n in range(20)]

    assert verdicts(*views) == {}


def test_requests_without_a_token_or_a_reply_mean_that_the_engine_is_stuck() -> None:
    assert verdicts((WAITING, 400)) == {182: Verdict.ENGINE_STUCK, 362: Verdict.ENGINE_STUCK}


@pytest.mark.parametrize("progress", ["num_tokens", "num_replies"])
def test_one_token_or_one_reply_in_time_is_a_sign_of_life(progress: str) -> None:
    counts: list[dict[str, Any]] = [{progress: n} for n in range(10)]
    views = [(dataclasses.replace(WAITING, **count), 178) for count in counts]

    assert verdicts(*views) == {}


def test_an_engine_without_requests_owes_nothing() -> None:
    assert verdicts((IDLE, 1000), (WAITING, 170)) == {}


def test_a_deaf_worker_with_a_stuck_engine_hears_of_both() -> None:
    both = dataclasses.replace(HUNGRY, num_running=3)

    found = verdicts((both, 200))

    assert found[20] is Verdict.RECONNECT
    assert Verdict.EXIT in found.values()
    assert Verdict.ENGINE_STUCK in found.values()


def test_a_process_that_was_stopped_for_hours_accuses_nobody() -> None:
    watchdog = Watchdog(0, LIMITS)
    both = dataclasses.replace(HUNGRY, num_running=3)
    assert watchdog.look(both, 2) is Verdict.OK

    assert watchdog.look(both, 7200) is Verdict.OK
    assert watchdog.look(both, 7202) is Verdict.OK


views = st.builds(
    View,
    num_queued=st.sampled_from([None, 0, 5]),
    wants_more=st.booleans(),
    num_received=st.integers(0, 3),
    num_running=st.integers(0, 2),
    num_replies=st.integers(0, 3),
    num_tokens=st.integers(0, 3),
)


@given(st.lists(st.tuples(views, st.integers(0, 10_000)), max_size=30))
def test_no_one_is_accused_before_enough_looks_have_seen_no_progress(
    looks: list[tuple[View, int]],
) -> None:
    watchdog, now_s = Watchdog(0, LIMITS), 0
    since: dict[Verdict, int] = {}

    for num_looks, (view, after_s) in enumerate(looks, 1):
        now_s += after_s
        verdict = watchdog.look(view, now_s)
        if verdict is Verdict.RECONNECT:
            assert num_looks - since.get(verdict, 0) >= LIMITS.reconnect_s / LIMITS.longest_step_s
        if verdict is Verdict.EXIT:
            assert num_looks - since[Verdict.RECONNECT] >= LIMITS.exit_s / LIMITS.longest_step_s
        if verdict is Verdict.ENGINE_STUCK:
            assert num_looks >= LIMITS.engine_s / LIMITS.longest_step_s
        since[verdict] = num_looks


# A Celery worker as ours is run, that obeys a line of its standard input.
PROCESS = """
import sys, threading, time
import celery
from celery import signals
from dflash_workers.watchdog import reconnect

app = celery.Celery("deaf", broker=sys.argv[1])
app.config_from_object("celeryconfig")
app.conf.update(broker_url=sys.argv[1], task_default_queue="q", worker_redirect_stdouts=False)

@app.task(name="say")
def say(word, pause_s=0.0):
    time.sleep(pause_s)
    print("said", word, flush=True)

@signals.worker_ready.connect
def listen(sender, **_):
    threading.Thread(target=obey, args=(sender,), daemon=True).start()
    print("ready", flush=True)

def deafen(consumer):
    consumer.task_consumer.cancel()
    print("deaf", flush=True)

def obey(consumer):
    for line in sys.stdin:
        if line == "deafen\\n":
            consumer.call_soon(deafen, consumer)
        else:
            reconnect(consumer)

app.worker_main(["worker", "-P", "threads", "-c", "3", "--without-gossip", "--without-mingle"])
"""


class Listener:
    """That worker, its private Redis, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.redis, url = start_redis(folder)
        self.app = celery.Celery("speaker", broker=url, set_as_current=False)
        self.app.config_from_object("celeryconfig")
        self.app.conf.update(broker_url=url)
        self._client = redis.Redis.from_url(url)
        self._said = folder / "said"
        with self._said.open("wb") as said, (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROCESS, url],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=log,
                text=True,
                cwd=Path(__file__).parent.parent.parent,
            )
        until(lambda: self.has_printed("ready"), timeout_s=20)

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()

    def send(self, word: str, pause_s: float = 0.0) -> None:
        kwargs = {"word": word, "pause_s": pause_s}
        self.app.send_task("say", kwargs=kwargs, queue="q", priority=6)

    def num_waiting(self) -> int:
        return int(self._client.llen("q\x06\x166"))

    def num_blocked(self) -> int:
        return int(self._client.info("clients")["blocked_clients"])

    def has_said(self, word: str) -> bool:
        return self.has_printed(f"said {word}")

    def has_printed(self, line: str) -> bool:
        return line in self._said.read_text().splitlines()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._client.close()
        self.app.close()
        self.redis.stop(0)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path)
    yield listener
    listener.close()


def test_a_deaf_consumer_hears_again_after_reconnect_and_running_tasks_go_on(
    listener: Listener,
) -> None:
    listener.send("running", pause_s=3.0)
    until(lambda: listener.num_waiting() == 0)
    listener.tell("deafen")
    until(lambda: listener.has_printed("deaf"))
    until(lambda: listener.num_blocked() == 0)  # what it asked for before that has ended
    listener.send("later")
    time.sleep(1.5)
    assert not listener.has_said("later")

    listener.tell("reconnect")

    until(lambda: listener.has_said("later"), timeout_s=10)
    until(lambda: listener.has_said("running"), timeout_s=10)


def test_reconnecting_twice_at_once_is_reconnecting(listener: Listener) -> None:
    for _ in range(3):
        listener.tell("reconnect")
    listener.send("hello")

    until(lambda: listener.has_said("hello"), timeout_s=10)


def test_a_consumer_that_is_connecting_already_is_left_alone() -> None:
    class Connecting:
        connection: object | None = object()

        def call_soon(self, p: Callable[[], None], /) -> None:
            self.connection = None
            p()
            self.connection = object()
            p()

    reconnect(Connecting())


@pytest.mark.slow
def test_after_a_redis_that_stood_still_for_longer_than_every_timeout_it_hears_again(
    listener: Listener,
) -> None:
    os.kill(listener.redis.pid, signal.SIGSTOP)
    time.sleep(5)
    listener.tell("reconnect")
    time.sleep(35)
    listener.tell("reconnect")
    os.kill(listener.redis.pid, signal.SIGCONT)

    listener.send("hello")

    until(lambda: listener.has_said("hello"), timeout_s=20)
