"""A tokenizer's numbers: of all its processes together, by the names of the table."""

from __future__ import annotations

import multiprocessing
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.metrics import TOKENIZER
from trainer.tokens.counters import Counters, serve


def add_much(counters: Counters) -> None:
    for _ in range(500):
        counters.add("shards")
        counters.add("tokens", 3)


def test_what_forked_processes_add_is_told_as_one_number() -> None:
    counters = Counters()
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=add_much, args=(counters,)) for _ in range(3)]
    for other in others:
        other.start()
    add_much(counters)
    for other in others:
        other.join()

    port = serve(counters, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    told = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}

    assert set(told) == {metric.name for metric in TOKENIZER}
    assert told["dflash_tokenizer_shards_total"] == 2000
    assert told["dflash_tokenizer_tokens_total"] == 6000


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadInput, match="in use"):
        serve(Counters(), "127.0.0.1", taken.getsockname()[1])
