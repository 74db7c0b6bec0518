"""What a sweep over requests in flight found, and the setting that it proposes.

Made by bench, kept as JSON, drawn by bench_plot, read by estimate. The proposal is the fewest
requests in flight that reach nearly the best rate: more of them only make each one wait. An engine
may collapse past its best (beyond the batch sizes that it has prepared for), so what lies past it
is said as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_workers.contract.records import SCHEMA_VERSION, Json

ENOUGH = 0.97  # of the best rate: within what two measurements of a few seconds differ by
COLLAPSED = 0.8  # of the best rate: less is no noise


@dataclass(frozen=True, slots=True)
class Point:
    """The engine with so many requests in flight."""

    in_flight: int
    tokens_per_s: float
    tokens_per_s_per_stream: float
    requests_per_s: float  # that ended
    ttft_p50_s: float | None  # to the first token; None: no request told, or none began
    ttft_p99_s: float | None
    kv_usage: float | None  # largest share of the KV cache seen in use; None: not told
    num_waiting: int | None  # most requests seen waiting in the engine; None: not told
    cached_share: float  # of the prompts' tokens: what the prefix cache spared


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One sweep."""

    run: str
    engine: Json  # version and flags as the server reports them
    max_new_tokens: int
    points: list[Point]  # by requests in flight, upwards
    warnings: list[str] = field(default_factory=list)
    schema: int = SCHEMA_VERSION

    def best(self) -> Point:
        """The most tokens a second, of those where the engine ran all that it was asked."""
        return max(self._running(), key=lambda point: point.tokens_per_s)

    def proposed(self) -> Point:
        """The one with the fewest requests that is nearly as good."""
        enough = ENOUGH * self.best().tokens_per_s
        return min(
            (point for point in self._running() if point.tokens_per_s >= enough),
            key=lambda point: point.in_flight,
        )

    def collapse(self) -> Point | None:
        """The first one past the best that is far below it; None: nothing was seen to collapse."""
        best = self.best()
        return next(
            (
                point
                for point in self.points
                if point.in_flight > best.in_flight and is_collapsed(point, best)
            ),
            None,
        )

    def at(self, in_flight: int) -> Point:
        """The measured one that is nearest to so many."""
        return min(self.points, key=lambda point: abs(point.in_flight - in_flight))

    def _running(self) -> list[Point]:
        """What waits in the engine is better left in the queue, where others may take it."""
        return [point for point in self.points if not lets_wait(point)] or self.points

    def summary(self) -> Json:
        """For people and scripts."""
        best, proposed, collapse = self.best(), self.proposed(), self.collapse()
        return {
            "run": self.run,
            "max_in_flight": proposed.in_flight,
            "tokens_per_s": round(proposed.tokens_per_s, 1),
            "tokens_per_s_per_stream": round(proposed.tokens_per_s_per_stream, 2),
            "ttft_p50_s": _rounded(proposed.ttft_p50_s),
            "ttft_p99_s": _rounded(proposed.ttft_p99_s),
            "kv_usage": _rounded(proposed.kv_usage),
            "best_in_flight": best.in_flight,
            "best_tokens_per_s": round(best.tokens_per_s, 1),
            "collapses_at": collapse.in_flight if collapse else None,
            "collapsed_tokens_per_s": round(collapse.tokens_per_s, 1) if collapse else None,
            "warnings": self.warnings,
        }


def is_collapsed(point: Point, best: Point) -> bool:
    """Whether it is so far below the best that no noise explains it."""
    return point.tokens_per_s < COLLAPSED * best.tokens_per_s


def lets_wait(point: Point) -> bool:
    """Whether many requests waited in the engine: more than come and go at a moment."""
    return (point.num_waiting or 0) > point.in_flight // 10


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
