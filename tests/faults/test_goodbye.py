"""A worker is told to go, by a signal or a notice: what it holds is at once at hand for others."""

from __future__ import annotations

import dataclasses
import http.server
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest

from dflash_workers.goodbye import ECHO_S
from tests.faults.fleet import Fleet
from tests.faults.processes import until
from tests.faults.runs import FaultRun, prompts

pytestmark = pytest.mark.slow

GOODBYE_S = 2.0  # from the signal to the batch at hand for others


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_go_hands_its_batches_on_within_two_seconds_and_no_token_is_lost(
    fleet: Fleet, run: FaultRun, number: signal.Signals
) -> None:
    worker = run.worker("w1", engine="slow")
    messages = run.add(*[prompts(run, 3, f"tokens=250 {n}") for n in range(2)])
    until(lambda: len(fleet.engine("slow").running()) == 6)
    time.sleep(1.5)  # some ten tokens of each

    started = time.monotonic()
    worker.send(number)
    until(lambda: run.num_waiting_first_in_line() == 2)
    took_s = time.monotonic() - started
    code = worker.wait(20)
    run.worker("w2")
    run.wait(*messages)

    assert took_s < GOODBYE_S
    assert code == 0
    run.prove()
    assert run.num_made_twice() == 0
    assert any(request.num_given for request in run.asked())


@pytest.mark.alone
def test_a_second_signal_leaves_at_once_and_the_batch_comes_back(
    fleet: Fleet, run: FaultRun
) -> None:
    worker = fleet.worker("w1", run.settings(fleet.engine("slow")), grace_s=60)
    (message,) = run.add(prompts(run, 2, "tokens=250"))
    until(lambda: len(fleet.engine("slow").running()) == 2)

    worker.send(signal.SIGTERM)
    time.sleep(ECHO_S + 0.1)
    started = time.monotonic()
    worker.send(signal.SIGTERM)
    worker.wait(10)
    took_s = time.monotonic() - started
    run.worker("w2")
    run.wait(message)

    assert took_s < 1
    run.prove()


def test_a_signal_that_comes_twice_in_one_moment_is_one_wish(fleet: Fleet, run: FaultRun) -> None:
    worker = run.worker("w1", engine="slow")
    (message,) = run.add(prompts(run, 2, "tokens=250"))
    until(lambda: len(fleet.engine("slow").running()) == 2)

    worker.send(signal.SIGTERM)
    time.sleep(0.02)
    worker.send(signal.SIGTERM)

    assert worker.wait(10) == 0
    run.worker("w2")
    run.wait(message)
    run.prove()


def test_celerys_cold_shutdown_gives_the_batch_back_as_well(fleet: Fleet, run: FaultRun) -> None:
    worker = run.worker("w1", engine="slow")
    (message,) = run.add(prompts(run, 2, "tokens=250"))
    until(lambda: len(fleet.engine("slow").running()) == 2)

    worker.send(signal.SIGQUIT)
    worker.wait(20)
    run.worker("w2")
    run.wait(message)

    run.prove()
    assert "NotImplementedError" not in worker.tail()


@pytest.mark.alone
def test_an_idle_worker_told_to_go_is_gone_in_seconds(run: FaultRun) -> None:
    worker = run.worker()

    started = time.monotonic()
    worker.send(signal.SIGTERM)

    assert worker.wait(20) == 0
    assert time.monotonic() - started < 4


def test_a_worker_whose_prompts_end_within_its_grace_commits_them_and_leaves_then(
    fleet: Fleet, run: FaultRun
) -> None:
    worker = fleet.worker("w1", run.settings(fleet.engine()), grace_s=60)
    (message,) = run.add(prompts(run, 4, "tokens=150"))
    until(lambda: len(fleet.engine().running()) == 4)

    started = time.monotonic()
    worker.send(signal.SIGTERM)

    assert worker.wait(30) == 0
    assert time.monotonic() - started < 15
    assert run.is_done([message])
    assert [request.outcome for request in run.asked()] == ["stop"] * 4


class _Metadata(http.server.BaseHTTPRequestHandler):
    """AWS' instance metadata, of an instance that goes once `leaves` is set."""

    leaves = threading.Event()

    def do_PUT(self) -> None:
        self._say(200, b"token")

    def do_GET(self) -> None:
        if "spot/instance-action" not in self.path or not self.leaves.is_set():
            return self._say(404, b"")
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return self._say(200, orjson.dumps({"action": "terminate", "time": at}))

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def metadata_url() -> Iterator[str]:
    """A cloud that has given no notice yet."""
    _Metadata.leaves.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.alone
def test_a_clouds_spot_notice_makes_a_worker_hand_its_batch_on_and_leave(
    fleet: Fleet, run: FaultRun, metadata_url: str
) -> None:
    settings = run.settings(fleet.engine("slow"))
    settings = dataclasses.replace(settings, spot_provider="aws", spot_url=metadata_url)
    worker = fleet.worker("w1", settings)
    (message,) = run.add(prompts(run, 2, "tokens=250"))
    until(lambda: len(fleet.engine("slow").running()) == 2)

    _Metadata.leaves.set()
    until(lambda: run.num_waiting_first_in_line() == 1, 2 + GOODBYE_S, "the hand-over")

    assert worker.wait(20) == 0
    run.worker("w2")
    run.wait(message)
    run.prove()
    assert run.num_made_twice() == 0


def test_a_notice_file_makes_a_worker_leave(fleet: Fleet, run: FaultRun, tmp_path: Path) -> None:
    notice = tmp_path / "leaving"
    settings = dataclasses.replace(run.settings(fleet.engine()), spot_file=str(notice))
    worker = fleet.worker("w1", settings)

    notice.touch()

    assert worker.wait(20) == 0
