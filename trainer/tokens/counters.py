"""What a tokenizer has done since its start, over all its processes, and its /metrics.

Made by the main process before the pool forks; each process adds to the same few numbers in shared
memory, the main one answers Prometheus. Names and meanings: contract/metrics.py.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.metrics import TOKENIZER

NAMES = tuple(metric.name for metric in TOKENIZER)


class Counters(Collector):
    """Safe to share between processes that were forked from the one that made it."""

    def __init__(self) -> None:
        self._values = multiprocessing.Array("Q", len(NAMES))

    def add(self, what: str, number: int = 1) -> None:
        """`what`: shards | samples | tokens | quarantined | failures."""
        at = NAMES.index(f"dflash_tokenizer_{what}_total")
        with self._values:
            self._values[at] += number

    def read(self) -> dict[str, int]:
        """By the names that Prometheus is told."""
        return dict(zip(NAMES, self._values[:], strict=True))

    def collect(self) -> Iterable[CounterMetricFamily]:
        """As prometheus_client asks for it."""
        values = self.read()
        for metric in TOKENIZER:
            name = metric.name.removesuffix("_total")
            yield CounterMetricFamily(name, metric.meaning, value=values[metric.name])


def serve(counters: Counters, host: str, port: int) -> int:
    """Answer /metrics in a thread; the port, which 0 leaves to the system. Raises BadInput."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(counters)
    try:
        server, _thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadInput(f"metrics at {host}:{port}: {error.strerror}: choose another") from error
    return int(server.server_port)
