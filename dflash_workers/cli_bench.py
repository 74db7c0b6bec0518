"""The verbs that measure and foretell: bench, estimate.

Mounted by fleet.py. bench writes what estimate reads. A verb's parameters are its flags, however
many.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_workers.bench import Bench, Sweep, prompts_of
from dflash_workers.bench_plot import draw
from dflash_workers.bench_result import BenchResult
from dflash_workers.canary import check_engine
from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.prices import Prices, store_prices
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.contract.terminal import err, report
from dflash_workers.engine import DIALECTS, Engine
from dflash_workers.estimate import (
    Features,
    Work,
    break_even_accept_length,
    costs,
    durations,
    gpu_hours,
    prompts_per_s,
    read_prices,
    with_drafter,
)
from dflash_workers.pace import Patience
from dflash_workers.progress import Progress, measure
from dflash_workers.runs import Run, open_runs

READY_S = 5.0  # for an engine that should be there

app = typer.Typer()

RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def bench(
    run: RunOption = "",
    model: Annotated[str, typer.Option(help="Folder of the target model.")] = "",
    engine_url: Annotated[str, typer.Option(help="The server.", show_default=False)] = "",
    max_in_flight: Annotated[int, typer.Option(help="The most that is tried.", min=1)] = 512,
    window_s: Annotated[float, typer.Option(help="Seconds measured per step.", min=0.1)] = 10.0,
    settle_s: Annotated[float, typer.Option(help="Seconds before that.", min=0)] = 4.0,
    max_tokens: Annotated[int, typer.Option(help="Per answer, at most.", min=1)] = 512,
    out: Annotated[Path, typer.Option(help="Folder for bench-RUN.json and .png.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Find how many requests in flight suit the engine, with the run's own prompts.

    The engine must be idle. Proposes a value for --max-in-flight of `worker` and for the server's
    own limit. Example: dflash-fleet bench --run qwen3-8b --model /models/Qwen3-8B
    """
    settings = load_settings({"run": run, "model": model, "engine_url": engine_url})
    result = sweep(settings, Sweep(max_in_flight, settle_s, window_s, max_tokens))
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"bench-{result.run}.json"
    path.write_bytes(dump(result))
    facts: Json = {**result.summary(), "json": f"{path}", "png": None}
    try:
        facts["png"] = f"{draw(result, path.with_suffix('.png'))}"
    except Missing as error:
        err.print(f"{error}", markup=False)
    report(facts, as_json=as_json)


@app.command()
def estimate(
    run: RunOption = "",
    bench_file: Annotated[
        Path | None, typer.Option("--bench", help="What `bench` wrote; else the run's own rate.")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="Requests in flight in --bench; 0: the proposed.", min=0)
    ] = 0,
    prompts: Annotated[int, typer.Option(help="How many; 0: what is left of the run.", min=0)] = 0,
    input_tokens: Annotated[float, typer.Option(help="Per prompt; 0: as the run's.", min=0)] = 0,
    output_tokens: Annotated[float, typer.Option(help="Per prompt; 0: as the run's.", min=0)] = 0,
    gpus_now: Annotated[
        int, typer.Option(help="GPUs that make the run's present rate.", min=1)
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Up to so many nodes.", min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs in each.", min=1)] = 1,
    gpu: Annotated[str, typer.Option(help="Prices: h200=3.2,b200=6 (USD an hour).")] = "",
    spot: Annotated[
        float | None, typer.Option(help="Spot price over the one on demand.", min=0, max=1)
    ] = None,
    drafted: Annotated[
        Path | None, typer.Option(help="What `bench` wrote with a drafter in the engine.")
    ] = None,
    drafted_accept_length: Annotated[
        float, typer.Option(help="The accept length in --drafted.", min=1)
    ] = 1.0,
    accept_length: Annotated[
        float, typer.Option(help="Of the drafter that is hoped for; 0: none.", min=0)
    ] = 0.0,
    hidden_size: Annotated[int, typer.Option(help="Of the target; 0: not told.", min=0)] = 0,
    feature_layers: Annotated[int, typer.Option(help="That a drafter reads.", min=1)] = 5,
    as_json: JsonOption = False,
) -> None:
    """Say what a run will take: hours, GPU-hours, money, tokens, bytes.

    From a bench, or from a live run's present rate. Prices are kept with the run: status says then
    what it has cost so far. Example: dflash-fleet estimate --run qwen3-8b
    --bench bench-qwen3-8b.json --output-tokens 1800 --gpu h200=3.2,b200=6 --spot 0.35 --nodes 8
    """
    progress = _progress(load_settings({"run": run})) if run or bench_file is None else None
    prices = read_prices(gpu)
    if progress and prices:
        _keep_prices(load_settings({"run": run}), Prices(prices, spot))
    work = _work(progress, prompts, input_tokens, output_tokens)
    plain = load(BenchResult, _read(bench_file)) if bench_file else None
    rate = _rate(plain, in_flight, progress, work, gpus_now)
    total_gpu_hours = gpu_hours(work, rate)
    facts: Json = {
        "prompts": work.num_prompts,
        "prompts_per_s_per_gpu": round(rate, 4),
        "output_tokens": round(work.output_tokens),
        "tokens": round(work.tokens),
        "s3_bytes": _rounded(work.s3_bytes),
        "gpu_hours": round(total_gpu_hours, 2),
        "durations": _plain(durations(total_gpu_hours, nodes, gpus_per_node)),
        "costs": _plain(costs(total_gpu_hours, prices, spot)),
    }
    if hidden_size:
        features = Features(feature_layers, hidden_size)
        facts["hidden_state_bytes"] = round(features.stored_bytes(work))
    if plain and drafted:
        table = Drafted(plain, load(BenchResult, _read(drafted)), drafted_accept_length)
        facts["drafter"] = table.rows(accept_length)
    report(facts if as_json else _for_people(facts), as_json=as_json)


@dataclass(frozen=True, slots=True)
class Drafted:
    """Two sweeps of one engine, without and with a drafter."""

    plain: BenchResult
    drafted: BenchResult
    accept_length: float  # of the second

    def rows(self, hoped: float) -> list[Json]:
        """Where both were measured: from which accept length on a drafter pays, and what it gives.

        `hoped`: of the drafter to come; 0 where none is named.
        """
        rows = []
        for point in self.plain.points:
            other = self.drafted.at(point.in_flight)
            if other.in_flight != point.in_flight:
                continue
            rates = other.tokens_per_s, self.accept_length
            row: Json = {
                "in_flight": point.in_flight,
                "break_even_accept_length": round(
                    break_even_accept_length(point.tokens_per_s, *rates), 3
                ),
            }
            if hoped:
                row["speedup"] = round(with_drafter(*rates, hoped) / point.tokens_per_s, 3)
            rows.append(row)
        return rows


def sweep(settings: Settings, wanted: Sweep) -> BenchResult:
    """One bench of the engine that the settings name. Raises what is missing."""
    store = open_store(settings)
    opened = open_runs(store, settings.require_run(), settings.model).open(settings.run)
    prompts = prompts_of(store, opened)
    dialect = DIALECTS[settings.engine_dialect]

    async def measured() -> BenchResult:
        warnings = await _check_model(settings, opened, store)
        result = await Bench(settings.engine_url, dialect, opened, prompts, wanted).measure()
        return replace(result, warnings=warnings + result.warnings)

    with err.status("measuring"):
        return asyncio.run(measured())


async def _check_model(settings: Settings, run: Run, store: Store) -> list[str]:
    """What is odd about the engine. Raises BadInput where it is known to serve another model."""
    engine = Engine(
        settings.engine_url, 8, Patience(), dialect=settings.engine_dialect, tokenizer=run.chat
    )
    try:
        await engine.wait_until_there(READY_S)
        await engine.look()
        verdict = await check_engine(engine, run.spec, run.chat, store, may_be_first=False)
    finally:
        await engine.close()
    return verdict.warnings


def _keep_prices(settings: Settings, prices: Prices) -> None:
    store_prices(open_store(settings), settings.require_run(), prices)


def _progress(settings: Settings) -> Progress:
    store = open_store(settings)
    read_spec(store, settings.require_run())  # there is such a run
    return measure(store, settings.run)


def _work(
    progress: Progress | None, prompts: int, input_tokens: float, output_tokens: float
) -> Work:
    """What a person says wins over what the run shows."""
    done = progress.completed if progress else 0
    left = progress.total - progress.completed - progress.failed if progress else 0
    if progress and done:
        input_tokens = input_tokens or progress.total_input_tokens / done
        output_tokens = output_tokens or progress.avg_output_tokens
    if not output_tokens:
        raise BadInput("nothing is completed yet, so no length is known: pass --output-tokens")
    if not (prompts or left):
        raise BadInput("nothing is left to do: pass --prompts, or enqueue some")
    s3_bytes = progress.s3_bytes / done if progress and done else None
    return Work(prompts or left, input_tokens, output_tokens, s3_bytes)


def _rate(
    plain: BenchResult | None,
    in_flight: int,
    progress: Progress | None,
    work: Work,
    gpus_now: int,
) -> float:
    """Prompts per second of one GPU."""
    if plain:
        point = plain.at(in_flight) if in_flight else plain.proposed()
        return prompts_per_s(point.tokens_per_s, work)
    assert progress is not None  # asked for where there is no bench
    return progress.rate_per_sec / gpus_now


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}: name a file that `bench` wrote") from error


def _plain(records: Sequence[Any]) -> list[Json]:
    return [json.loads(dump(record)) for record in records]


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _for_people(facts: Json) -> Json:
    """Lists as lines of their own."""
    lines: Json = {}
    for name, value in facts.items():
        if not isinstance(value, list):
            lines[name] = f"{value:,}" if isinstance(value, int | float) else value
            continue
        for row in value:
            head, *rest = row.items()
            told = ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in rest)
            lines[f"{name.removesuffix('s')} {head[0].replace('_', ' ')} {head[1]}"] = told
    return lines


def _short(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value}"
