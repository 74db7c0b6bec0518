"""A crowd of replayed workers on one Redis: what it costs Redis, by its own account.

Called by __main__ with a tape, for one number of workers and one pace at a time. Redis and the
crowd share a machine, so what counts is Redis' CPU time, never the clock: Redis says how long each
command took it, and the kernel how long the whole process worked.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import redis

from benchmarks.replay.players import NUM_COUNTS, Part, play
from benchmarks.replay.tape import Tape
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.roll import Roll
from dflash_workers.throughput import read_noted

RUN = "replay"  # the recorded one
PROBE_KEY = "dflash:lease:probe:0/probe"
NUM_PROCESSES = 2
READY_S = 300.0  # on a machine that others use
_PROBE_EVERY_S = 0.02
_NUM_LOOKS = 5
_AT_START = 16  # hints that a worker takes at once, and some more
_HINT_BYTES = 900
_COUNTED = ("pieces", "commands", "prompts", "bytes", "lag_s")
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who plays, and how fast."""

    num_workers: int
    prompts_per_s: float  # of each


@dataclass(frozen=True, slots=True)
class Cost:
    """What a crowd cost Redis over a stretch of time. Rates are a second of the clock."""

    crowd: Crowd
    seconds: float
    cpu_share: float  # of one core, the whole process
    main_share: float  # of one core, the thread that runs every command
    commands_per_s: float  # sent by the crowd
    pieces_per_s: float  # sent in one go
    prompts_per_s: float
    sent_bytes_per_s: float  # by the crowd
    in_bytes_per_s: float  # read by Redis
    out_bytes_per_s: float
    memory_mb: float  # at the end, without hints that wait; journals had begun empty
    clients_mb: float  # and what the connections take
    lag_s: float  # by which the crowd itself was behind its times, at the end
    answer_p50_ms: float  # of one command of a client of its own
    answer_p99_ms: float
    observer_ms: float  # of Redis' thread, for one look of the one observer
    num_errors: int  # replies that were errors
    usec_by_command: dict[str, float]  # of the thread's time, a second; a script's hold its parts


def measure(client: redis.Redis, url: str, tape: Tape, crowd: Crowd, seconds: float) -> Cost:
    """Empty Redis, let the crowd settle for a quarter of the time, and look for `seconds`.

    The queue is filled, as hints are popped from it.
    """
    client.flushall()
    for script in tape.scripts:
        client.script_load(script)
    queue = _fill_queue(client, tape, crowd, seconds)
    with _playing(url, tape, crowd) as counts:
        time.sleep(seconds / 4)
        before, before_s, sent = _look(client), time.monotonic(), _sums(counts)
        answers_ms = _probe(client, seconds)
        after, length_s = _look(client), time.monotonic() - before_s
        now_sent, lag_s = _sums(counts), max(part[-1] for part in counts)
        queue_bytes = client.memory_usage(queue, samples=0) or 0
    rates = {name: (now_sent[name] - sent[name]) / length_s for name in _COUNTED}
    moved = {name: (after[name] - before[name]) / length_s for name in _MOVING}
    return Cost(
        crowd=crowd,
        seconds=length_s,
        cpu_share=moved["used_cpu_sys"] + moved["used_cpu_user"],
        main_share=moved["used_cpu_sys_main_thread"] + moved["used_cpu_user_main_thread"],
        commands_per_s=rates["commands"],
        pieces_per_s=rates["pieces"],
        prompts_per_s=rates["prompts"],
        sent_bytes_per_s=rates["bytes"],
        in_bytes_per_s=moved["total_net_input_bytes"],
        out_bytes_per_s=moved["total_net_output_bytes"],
        memory_mb=(after["used_memory"] - after["mem_clients_normal"] - queue_bytes) / 1e6,
        clients_mb=after["mem_clients_normal"] / 1e6,
        lag_s=lag_s,
        answer_p50_ms=answers_ms[len(answers_ms) // 2],
        answer_p99_ms=answers_ms[len(answers_ms) * 99 // 100],
        observer_ms=_observe(client),
        num_errors=int(after["total_error_replies"] - before["total_error_replies"]),
        usec_by_command=_per_s(before["commands"], after["commands"], length_s),
    )


_MOVING = (
    "used_cpu_sys",
    "used_cpu_user",
    "used_cpu_sys_main_thread",
    "used_cpu_user_main_thread",
    "total_net_input_bytes",
    "total_net_output_bytes",
)


@contextmanager
def _playing(url: str, tape: Tape, crowd: Crowd) -> Iterator[list[Sequence[float]]]:
    """The crowd, once each of its processes is connected; what each counts."""
    over = _CONTEXT.Event()
    counts = [_CONTEXT.Array("d", NUM_COUNTS) for _ in range(NUM_PROCESSES)]
    processes = []
    for number, counted in enumerate(counts):
        numbers = range(number, crowd.num_workers, NUM_PROCESSES)
        part = Part(tape, url, numbers, crowd.prompts_per_s)
        processes.append(_CONTEXT.Process(target=play, args=(part, counted, over), daemon=True))
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + READY_S
        while not all(counted[0] for counted in counts):
            if time.monotonic() > deadline or any(p.exitcode is not None for p in processes):
                raise RuntimeError("the replayed workers did not get to Redis")
            time.sleep(0.05)
        yield cast("list[Sequence[float]]", counts)
    finally:
        over.set()
        for process in processes:
            process.join(10)


def _sums(counts: Sequence[Sequence[float]]) -> dict[str, float]:
    columns = list(zip(*(list(part)[1:] for part in counts), strict=True))
    return {name: sum(column) for name, column in zip(_COUNTED, columns, strict=True)}


def _look(client: redis.Redis) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for section in ("cpu", "stats", "memory"):
        facts |= client.info(section)
    told = client.info("commandstats")
    facts["commands"] = {name.removeprefix("cmdstat_"): s["usec"] for name, s in told.items()}
    return facts


def _per_s(before: dict[str, int], after: dict[str, int], seconds: float) -> dict[str, float]:
    used = {name: (usec - before.get(name, 0)) / seconds for name, usec in after.items()}
    return dict(sorted(used.items(), key=lambda pair: -pair[1]))


def _probe(client: redis.Redis, seconds: float) -> list[float]:
    """How long a client waits for an answer, in milliseconds, in order."""
    answers_ms = []
    until_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < until_s:
        client.set(PROBE_KEY, "probe", px=15_000)
        answers_ms.append((time.monotonic() - began_s) * 1e3)
        time.sleep(_PROBE_EVERY_S)
    return sorted(answers_ms)


def _observe(client: redis.Redis) -> float:
    """What a look of the one observer costs Redis, in ms: at every heartbeat, and at what is noted
    of every batch. The crowd has just stopped: its heartbeats and leases stand for a while.
    """
    keys = RedisKeys()
    roll = Roll(client, keys, every_s=0.0)
    before_s = _main_s(client)
    for _ in range(_NUM_LOOKS):
        roll.look()
        read_noted(client, keys, RUN)
    return (_main_s(client) - before_s) / _NUM_LOOKS * 1e3


def _main_s(client: redis.Redis) -> float:
    told = client.info("cpu")
    return float(told["used_cpu_sys_main_thread"] + told["used_cpu_user_main_thread"])


def _fill_queue(client: redis.Redis, tape: Tape, crowd: Crowd, seconds: float) -> bytes:
    """With more hints than will be popped; the list's name."""
    popped = next(step for step in tape.work if b"BRPOP" in step.body)
    *_, name, _timeout_bytes, _timeout, _end = popped.body.split(b"\r\n")
    batches_per_prompt = tape.num_batches / tape.num_prompts
    popped_per_s = crowd.num_workers * crowd.prompts_per_s * batches_per_prompt
    num_hints = int(crowd.num_workers * _AT_START + popped_per_s * seconds * 2)
    with client.pipeline(transaction=False) as pipe:
        for _ in range(num_hints):
            pipe.lpush(name, b"x" * _HINT_BYTES)
        pipe.execute()
    return name
