"""The sweep on a simulated engine whose knee is known, over real HTTP."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.fleet_run import simulated_engine
from dflash_workers.bench import STEPS, Bench, Sweep, prompts_of
from dflash_workers.bench_plot import draw
from dflash_workers.bench_result import BenchResult
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.control import Control
from dflash_workers.contract.errors import EngineUnavailable, Missing, NotEnough
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.store import Store
from dflash_workers.dialects.sglang import Sglang
from dflash_workers.runs import Run
from tests.dflash_workers.test_bench_result import result
from tests.planned import Plan, prompt

QUICK = Sweep(max_in_flight=64, settle_s=0.4, window_s=1.0)

StartEngine = Callable[..., str]


@pytest.fixture
def start_engine(model_dir: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts simulated engines; flags as the program's."""
    with ExitStack() as running:
        yield lambda **flags: running.enter_context(
            simulated_engine(model_dir, tmp_path / "engine.log", **flags)
        )


@pytest.fixture
def run(store: Store, spec: RunSpec, chat: Chat) -> Run:
    return Run(spec, chat, Control(store, spec.run))


def bench(url: str, run: Run, sweep: Sweep = QUICK) -> BenchResult:
    prompts = [[70 + n, 71, 72] for n in range(20)]

    async def measured() -> BenchResult:
        return await Bench(url, Sglang(), run, prompts, sweep).measure()

    return asyncio.run(measured())


@pytest.mark.slow
def test_the_setting_before_a_collapse_is_found_and_the_collapse_is_narrowed_down(
    run: Run, start_engine: StartEngine
) -> None:
    # An eighth of the requests of an H200 that made 56,052 tokens/s at 256 and 16,099 at 512.
    url = start_engine(
        max_running=64, mean_tokens=60, step_ms=22.8, per_request_ms=0.71, knee=40, collapse=4.64
    )

    found = bench(url, run)

    summary = found.summary()
    assert 32 <= summary["max_in_flight"] <= 40
    assert 40 < summary["collapses_at"] <= 48
    assert [p.in_flight for p in found.points] == sorted(p.in_flight for p in found.points)
    expected = {n: n / (0.0228 + 0.00071 * n) for n in (8, 16, 32)}
    measured = {p.in_flight: p.tokens_per_s for p in found.points}
    for in_flight, rate in expected.items():
        assert measured[in_flight] == pytest.approx(rate, rel=0.25)
    (best,) = [p for p in found.points if p.in_flight == 32]
    assert best.kv_usage == pytest.approx(0.5, abs=0.05)  # 32 of the engine's 64 places
    assert best.ttft_p50_s is not None and 0 < best.ttft_p50_s < 1


@pytest.mark.slow
def test_where_the_engine_lets_requests_wait_the_sweep_ends_and_says_so(
    run: Run, start_engine: StartEngine
) -> None:
    url = start_engine(max_running=16, mean_tokens=40, step_ms=10)

    found = bench(url, run)

    assert max(p.in_flight for p in found.points) == 32
    assert found.summary()["max_in_flight"] == 16
    (warning,) = found.warnings
    assert re.fullmatch(r"32 in flight: the engine lets \d+ wait", warning)


def test_without_an_engine_nothing_is_measured(run: Run) -> None:
    with pytest.raises(EngineUnavailable):
        bench("http://127.0.0.1:1", run)


def test_the_largest_step_is_the_one_asked_for() -> None:
    assert Sweep(max_in_flight=100).steps() == [1, 8, 16, 32, 48, 64, 96, 100]
    assert Sweep(max_in_flight=2048).steps() == list(STEPS)


def test_the_runs_own_first_turns_are_asked(plan: Plan, store: Store, run: Run, chat: Chat) -> None:
    with pytest.raises(NotEnough, match="no prompts yet"):
        prompts_of(store, run)
    plan.add([prompt("one", "two"), prompt("three")], [prompt("four")])

    asked = prompts_of(store, run, most=2)

    assert "one" in chat.text(asked[0]) and "two" not in chat.text(asked[0])
    assert "three" in chat.text(asked[1])
    assert len(asked) == 2


def test_a_sweep_is_drawn_where_matplotlib_is_there_and_else_said_to_need_it(
    tmp_path: Path,
) -> None:
    found = result((8, 800.0), (16, 1000.0), (32, 100.0))
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(Missing, match=r"dflash-fleet\[plot\]"):
            draw(found, tmp_path / "bench.png")
        return

    path = draw(found, tmp_path / "bench.png")

    assert path.read_bytes().startswith(b"\x89PNG")
