"""A worker's /metrics, and what its engine tells of itself."""

from __future__ import annotations

import dataclasses
import http.server
import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.metrics import WORKER
from dflash_workers.contract.settings import Settings
from dflash_workers.engine_load import EngineLoad, Load, ask
from dflash_workers.exposition import serve
from dflash_workers.worker import Worker
from dflash_workers.worker_metrics import WorkerMetrics
from tests.batches import until, work
from tests.dflash_workers.test_exporter import scrape
from tests.planned import Plan, prompt

# As SGLang 0.5.17 answers, with two data-parallel ranks.
LOADS = b"""{"timestamp": "t", "version": "0.5.17", "loads": [
  {"dp_rank": 0, "token_usage": 0.25, "speculative": {"accept_length": 3.0, "accept_rate": 0.5}},
  {"dp_rank": 1, "token_usage": 0.75, "speculative": {"accept_length": 4.0, "accept_rate": 1}}]}"""


class _Answers(http.server.BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.body else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def loads_url() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (LOADS, Load(0.75, 3.5)),
        (b'{"loads": [{"token_usage": 0.5}]}', Load(0.5, None)),
        (b'{"loads": []}', Load()),
        (b'{"loads": null}', Load()),
        (b"[]", Load()),
        (b"<html>", Load()),
        (b"", Load()),
    ],
)
def test_an_engine_tells_what_it_can(
    loads_url: str, monkeypatch: pytest.MonkeyPatch, body: bytes, load: Load
) -> None:
    monkeypatch.setattr(_Answers, "body", body)

    assert ask(loads_url) == load


def test_an_engine_that_is_away_tells_nothing() -> None:
    assert ask("http://127.0.0.1:9") == Load()


def test_a_heartbeat_is_told_more_and_never_made_anew(
    loads_url: str,
    redis_settings: Settings,
    hints: Hints,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Answers, "body", LOADS)
    settings = dataclasses.replace(redis_settings, engine_url=loads_url)
    key = hints.keys.worker("w")
    redis_client.hset(key, "state", "up")
    load = EngineLoad(settings, "w", hints, every_s=0.02)
    load.start()

    until(lambda: redis_client.hget(key, "kv_use") == b"0.7500")
    redis_client.delete(key)
    seen = load.load
    until(lambda: load.load is not seen)
    until(lambda: load.load is not seen)

    assert not redis_client.exists(key)
    assert load.load == Load(0.75, 3.5)
    load.stop()


def test_every_number_of_a_worker_can_be_scraped_and_is_true(
    plan: Plan, worker_settings: Settings, make_worker: Callable[..., Worker]
) -> None:
    (message,) = plan.add([prompt("say:abc"), prompt("say:de")])
    worker = make_worker("w1")
    load = EngineLoad(worker_settings, "w1", worker.site.hints)
    load.load = Load(0.5, 2.5)
    port = serve(WorkerMetrics(worker.site, load).read, "127.0.0.1", 0)

    work(worker, message).join()
    seen = scrape(port)

    assert set(seen) == {metric.name for metric in WORKER}
    assert seen["dflash_worker_messages_total"][("w1", "received")] == 1
    assert seen["dflash_worker_state"] == {
        ("w1", "up"): 1,
        ("w1", "draining"): 0,
        ("w1", "paused"): 0,
    }
    assert seen["dflash_worker_limit_requests"] == {("w1",): 4}
    assert seen["dflash_worker_output_tokens_total"][("w1",)] > 0
    assert seen["dflash_worker_kv_use_ratio"] == {("w1",): 0.5}
