"""What the measured crowds say about larger ones: the cost of a worker, of a prompt, the limit.

Called by __main__ with what crowd.py and objects.py measured. Redis runs every command in one
thread, so that thread's share of a core is the limit; it is taken as a sum of so much a worker and
so much an ended prompt, fitted to the crowds by least squares, and how far each crowd lies from
that sum is told. What is beyond the largest crowd is extrapolated, and called so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figures import Figure
from benchmarks.replay.crowd import Cost
from benchmarks.replay.objects import Mix, StoreCost
from benchmarks.replay.tape import Tape

FULL_SHARE = 0.7  # of Redis' thread: beyond that, waits grow faster than work
REAL_PROMPTS_PER_S = 0.8  # of a worker: answers of 2,306 tokens, 48 at once, a large model
LATE_S = 0.5  # a crowd that is this far behind says nothing about Redis any more
READ_SHARE = 0.95  # of what a crowd sends: the rest piles up
SLOW_MS = 100.0
_NUM_TERMS = 2  # of the law
_PACES = (REAL_PROMPTS_PER_S, 5.0, 50.0)
_COLUMNS = (
    "workers",
    "prompts/s, all",
    "commands/s",
    "pieces/s",
    "Redis' thread, cores",
    "Redis, cores",
    "sent KB/s",
    "in KB/s",
    "out KB/s",
    "data MB",
    "connections MB",
    "answer p50 / p99 ms",
    "observer ms",
    "late s",
)
_STORE_COLUMNS = (
    "workers",
    "batches/s",
    "wanted",
    "requests/s",
    "PUT/s",
    "store, cores",
    "p50 / p99 ms",
)


@dataclass(frozen=True, slots=True)
class Found:
    """All that was recorded and measured. Of costs and stores the first is of all workers at the
    real pace.
    """

    tape: Tape
    mix: Mix
    waiting_bytes: float  # of a batch, in Redis
    held_bytes: float
    costs: Sequence[Cost]
    stores: Sequence[StoreCost]


@dataclass(frozen=True, slots=True)
class Law:
    """Redis' thread, in seconds a second."""

    per_worker: float
    per_prompt: float  # and a second
    worst_miss: float  # of the crowds it was fitted to, relative

    def share(self, num_workers: float, prompts_per_s: float) -> float:
        """Of a core, for so many workers of that pace each."""
        return num_workers * (self.per_worker + self.per_prompt * prompts_per_s)

    def most_workers(self, prompts_per_s: float) -> float:
        """Of that pace each, at FULL_SHARE."""
        return FULL_SHARE / self.share(1, prompts_per_s)


def law_of(costs: Sequence[Cost]) -> Law | None:
    """Of those crowds that kept their times; None with fewer than two. Fitted to relative misses,
    so that small crowds count as much as large ones.
    """
    kept = [cost for cost in costs if has_kept_time(cost)]
    if len(kept) < _NUM_TERMS:
        return None
    shares = np.array([cost.main_share for cost in kept])
    terms = np.array([(cost.crowd.num_workers, cost.prompts_per_s) for cost in kept])
    found, *_ = np.linalg.lstsq(terms / shares[:, None], np.ones(len(kept)), rcond=None)
    misses = np.abs(terms @ found / shares - 1)
    return Law(float(found[0]), float(found[1]), float(misses.max()))


def has_kept_time(cost: Cost) -> bool:
    """What was due was sent, read by Redis and understood: its CPU time counts, however long
    answers took on a machine that others use.
    """
    is_read = cost.in_bytes_per_s > READ_SHARE * cost.sent_bytes_per_s
    return is_read and cost.lag_s < LATE_S and not cost.num_errors


def is_sound(cost: Cost) -> bool:
    """And Redis answered in good time."""
    return has_kept_time(cost) and cost.answer_p99_ms < SLOW_MS


def figures_of(found: Found) -> list[Figure]:
    """What was not seen is left out."""
    costs, stores = found.costs, found.stores
    real, workers = costs[0], costs[0].crowd.num_workers
    figures = [
        Figure("replay.workers", workers, 200, "higher", "workers"),
        Figure("replay.redis_cpu_share", real.main_share, FULL_SHARE, "lower", "cores"),
        Figure("replay.redis_ops_per_s", real.commands_per_s, None, "higher", "commands/s"),
        Figure("replay.redis_mb", found.held_bytes / 1e3, None, "lower", "MB, 1000 batches held"),
        Figure("replay.redis_mb_waiting", found.waiting_bytes / 1e3, None, "lower", "MB, waiting"),
        Figure("replay.redis_connections", found.tape.num_connections, None, "lower", "a worker"),
        Figure("replay.redis_answer_p99_ms", real.answer_p99_ms, None, "lower", "ms"),
        Figure("replay.redis_observer_ms", real.observer_ms, None, "lower", "ms"),
        Figure("replay.redis_errors", sum(c.num_errors for c in costs), 0, "lower", "replies"),
        Figure("replay.s3_puts_per_s", stores[0].puts_per_s, None, "higher", "1/s"),
        Figure("replay.s3_requests_per_s", stores[0].requests_per_s, None, "higher", "1/s"),
        Figure(
            "replay.s3_most_puts_per_s", max(s.puts_per_s for s in stores), None, "higher", "1/s"
        ),
    ]
    if sound := [cost for cost in costs if is_sound(cost)]:
        most = max(sound, key=lambda cost: cost.commands_per_s)
        figures += [
            Figure("replay.redis_most_ops_per_s", most.commands_per_s, None, "higher", "1/s"),
            Figure("replay.redis_most_cpu_share", most.main_share, None, "higher", "cores"),
        ]
    if law := law_of(costs):
        most_workers = law.most_workers(REAL_PROMPTS_PER_S)
        figures += [
            Figure("replay.redis_us_per_worker_s", law.per_worker * 1e6, None, "lower", "us/s"),
            Figure("replay.redis_us_per_prompt", law.per_prompt * 1e6, None, "lower", "us"),
            Figure("replay.max_workers_one_redis", most_workers, workers, "higher", "workers"),
        ]
    return figures


def prose_of(found: Found) -> str:
    """The tables, and what they rest on."""
    tape, mix, costs, stores = found.tape, found.mix, found.costs, found.stores
    lines = [
        f"Recorded: {tape.num_batches} batches and {tape.num_prompts:,} prompts in "
        f"{tape.length_s:.0f} s of one worker, over {tape.num_connections} connections to Redis. "
        f"Of S3 a batch takes {mix.requests_per_batch:.2f} requests, {mix.puts_per_batch:.2f} "
        f"of them PUTs ({mix.data_bytes:,} and {mix.commit_bytes:,} bytes in the mean); "
        f"a worker looks at the control log {mix.looks_per_s:.2f} times a second besides.",
        "",
        *_head(_COLUMNS),
        *map(_row, costs),
        "",
        _in_words(law_of(costs)),
        "",
        *_head(_STORE_COLUMNS),
        *map(_store_row, stores),
        "",
        f"Where the thread's time goes with the most prompts, microseconds a second: "
        f"{_most(costs[-1])}. A script's time holds that of the commands it calls.",
    ]
    return "\n".join(lines)


def _in_words(law: Law | None) -> str:
    if law is None:
        return "Too few crowds kept their times to say what a worker and a prompt cost."
    paces = ", ".join(
        f"{law.most_workers(pace):,.0f} workers at {pace:g} prompts/s each" for pace in _PACES
    )
    return (
        f"Redis' thread takes {law.per_worker * 1e6:.1f} us a second for each worker and "
        f"{law.per_prompt * 1e6:.1f} us for each ended prompt; the worst of the crowds lies "
        f"{law.worst_miss:.0%} from that. Extrapolated to {FULL_SHARE:.0%} of that thread: {paces}."
    )


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _row(cost: Cost) -> str:
    cells = [
        f"{cost.crowd.num_workers}",
        f"{cost.prompts_per_s:,.0f}",
        f"{cost.commands_per_s:,.0f}",
        f"{cost.pieces_per_s:,.0f}",
        f"{cost.main_share:.3f}",
        f"{cost.cpu_share:.3f}",
        f"{cost.sent_bytes_per_s / 1e3:,.0f}",
        f"{cost.in_bytes_per_s / 1e3:,.0f}",
        f"{cost.out_bytes_per_s / 1e3:,.0f}",
        f"{cost.memory_mb:.1f}",
        f"{cost.clients_mb:.1f}",
        f"{cost.answer_p50_ms:.2f} / {cost.answer_p99_ms:.2f}",
        f"{cost.observer_ms:.1f}",
        f"{cost.lag_s:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _store_row(cost: StoreCost) -> str:
    cells = [
        f"{cost.num_workers}",
        f"{cost.batches_per_s:.1f}",
        f"{cost.wanted_batches_per_s:.1f}",
        f"{cost.requests_per_s:,.0f}",
        f"{cost.puts_per_s:,.1f}",
        f"{cost.cpu_share:.3f}",
        f"{cost.request_p50_ms:.1f} / {cost.request_p99_ms:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _most(cost: Cost) -> str:
    first = list(cost.usec_by_command.items())[:8]
    return ", ".join(f"{name} {usec:,.0f}" for name, usec in first)
