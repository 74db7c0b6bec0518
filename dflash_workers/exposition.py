"""Numbers as Prometheus reads them: the one door from ours to prometheus_client's.

Used by worker_metrics and exporter. Only what stands in contract/metrics.py can be exposed, with
its very labels; a number that isn't known is left out, never told as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.metrics import COUNTER, METRICS

Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(slots=True)
class Numbers:
    """What is told at one moment, by name and label values."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """None: not known."""
        if value is not None:
            self.values.setdefault(name, {})[labels] = float(value)

    def put_all(self, name: str, values: Mapping[str, float], *labels: str) -> None:
        """One number for each value of the last label."""
        for last, value in values.items():
            self.put(name, value, *labels, last)

    def families(self) -> Iterator[Family]:
        """As prometheus_client wants them. A name that is not in the table is a KeyError."""
        for name, by_labels in self.values.items():
            metric = METRICS[name]
            make = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = make(name.removesuffix("_total"), metric.meaning, labels=metric.labels)
            for labels, value in by_labels.items():
                assert len(labels) == len(metric.labels), f"{name}{labels}"
                family.add_metric(labels, value)
            yield family


class _Read(Collector):
    def __init__(self, read: Callable[[], Numbers]) -> None:
        self._read = read

    def collect(self) -> Iterable[Family]:
        return self._read().families()


def serve(read: Callable[[], Numbers], host: str, port: int) -> int:
    """Answer /metrics with what `read` gives, in a thread, until the process ends; the port, which
    0 leaves to the system. Raises BadInput where it can't be had.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(read))
    try:
        server, _thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadInput(
            f"metrics at {host}:{port}: {error.strerror}: choose another port"
        ) from error
    return int(server.server_port)
