"""`dflash-fleet demo`: the whole way of a prompt on a laptop.

The one module that knows all three packages. Examples -> plan -> queue -> a real SGLang on the CPU
-> S3 -> shards -> a trained drafter -> its export, measured on held-out prompts. Every part is the
real one and keeps its data in one state folder; what an earlier call finished is found, not done
again. However this process ends, nothing it started stays (launcher.py). Longer than 300 lines,
because it is the one place where a reader sees all the steps in a row, each with what it shows.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from dflash_workers.contract.errors import BadInput, EngineFailed, FleetError, Missing, NotEnough
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.terminal import ExitCode, err, out, progress_bar, report
from dflash_workers.embedded import embedded_services, free_ports
from dflash_workers.launcher import Child, spawn
from dflash_workers.progress import measure
from dflash_workers.server import EngineConfig, start_engine, wait_until_ready
from dflash_workers.staging import is_staged
from producer.api import EnqueueOptions, Run, RunOptions
from producer.rejected import rejections
from trainer.cli.drafter import export_checkpoint, measure_drafter, train_drafter
from trainer.cli.tokens import make_shards

app = typer.Typer()

ROOT = Path(__file__).resolve().parent
STATE = Path(".dflash-demo")
ENGINE_PYTHON = ROOT / ".venv-engine/bin/python"
EXAMPLES = ROOT / "examples"

NEEDED_DISK_GB = 2.0  # model, services' data, checkpoints
NEEDED_MEMORY_GB = 4.0
EXPECTED_MINUTES = 12  # on 2 cores, the installs not counted

RUN = "demo"
RECIPE = "smollm2_cpu"
BATCH_SIZE = 16  # prompts; three batches at once fill the engine
MAX_IN_FLIGHT = 48  # where two cores decode most tokens a second
ENGINE_TIMEOUT_S = 300.0

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demo:
    """What to do and where to keep it."""

    state: Path
    engine_python: Path
    num_rows: int | None  # of the examples; None: all
    max_new_tokens: int  # per answer
    num_steps: int
    num_heldout: int  # prompts to measure on, at most
    settings: Settings
    seconds: dict[str, float] = field(default_factory=dict)  # by stage

    @property
    def checkpoints(self) -> Path:
        return self.state / "drafter"

    @property
    def export(self) -> Path:
        return self.state / "export"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside, under a headline."""
        err.print(f"[bold]{name}[/bold]")
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)


@app.command()
def demo(
    state: Annotated[Path, typer.Option(help="Folder that keeps everything.")] = STATE,
    engine_python: Annotated[
        Path, typer.Option(help="Python of the engine's own venv.")
    ] = ENGINE_PYTHON,
    rows: Annotated[int | None, typer.Option(min=1, help="Read fewer examples.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per answer.")] = 48,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    heldout: Annotated[int, typer.Option(min=1, help="Prompts to measure on, at most.")] = 14,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Go the whole way of a prompt on this machine, from examples to a measured drafter.

    Safe to interrupt and to repeat: what is finished is found. Example: dflash-fleet demo
    """
    state = state.resolve()
    settings = load_settings(
        {
            "run": RUN,
            "slot": "demo",
            "max_in_flight": MAX_IN_FLIGHT,
            "model": state / "smollm2-135m",
        }
    )
    setup = Demo(state, engine_python, rows, max_tokens, steps, heldout, settings)
    check_room(state)
    facts = go_the_whole_way(setup)
    if as_json:
        report(facts, as_json=True)
    else:
        print_table(facts)
        print_what_next(setup)
    if facts["gain_low"] <= 0 or facts["replies_changed"]:
        err.print("The trained drafter did not beat the untrained one: the demo failed.")
        raise typer.Exit(ExitCode.COULD_NOT)


def check_room(state: Path) -> None:
    """Say what the demo needs and what is there. Raises NotEnough."""
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--state {state}: {error.strerror}: name a folder") from error
    disk_gb = shutil.disk_usage(state).free / 1e9
    memory_gb = psutil.virtual_memory().available / 1e9
    err.print(
        f"disk: {NEEDED_DISK_GB:g} GB needed, {disk_gb:.1f} GB there; "
        f"memory: {NEEDED_MEMORY_GB:g} GB needed, {memory_gb:.1f} GB there; "
        f"about {EXPECTED_MINUTES} minutes on 2 cores, less when it was run before"
    )
    if disk_gb < NEEDED_DISK_GB:
        raise NotEnough(f"{state}: too little disk: free some, or pass --state FOLDER elsewhere")
    if memory_gb < NEEDED_MEMORY_GB:
        raise NotEnough("too little memory: stop something first")


def go_the_whole_way(setup: Demo) -> Facts:
    """Every stage in order; return what the table shows."""
    with ExitStack() as running:
        with setup.stage("Redis and S3"), err.status("starting"):
            settings = running.enter_context(start_services(setup))
            setup = dataclasses.replace(setup, settings=settings)
        with setup.stage("model"):
            stage_model(setup)
        with setup.stage("plan"), err.status("reading the examples"):
            run = running.enter_context(plan_examples(setup))
        with setup.stage("generate"):
            generate(setup, run)
        facts = committed_facts(run)
        with setup.stage("tokenize"):
            facts |= tokenize(setup)
        with setup.stage("train"):
            facts |= train(setup)
        with setup.stage("measure"):
            facts |= export_and_measure(setup)
    return facts | {"seconds": setup.seconds}


@contextmanager
def start_services(setup: Demo) -> Iterator[Settings]:
    """Redis and S3: those that the settings name, or our own."""
    given = setup.settings
    with embedded_services(
        setup.state,
        given,
        external_redis=bool(given.redis_url),
        external_s3=bool(given.s3_endpoint),
    ) as settings:
        yield settings


def stage_model(setup: Demo) -> None:
    """In a child, whose torch gives its memory back."""
    model = Path(setup.settings.model)
    if is_staged(model):
        return
    argv = [sys.executable, "-m", "dflash_workers.staging", str(model)]
    with start_child(setup, "staging", argv) as child, err.status("unpacking SmolLM2-135M"):
        if child.wait():
            raise FleetError(f"the model could not be staged:\n{child.tail()}")


def plan_examples(setup: Demo) -> Run:
    """The examples as a sealed plan, with a hint in the queue for each batch that has no commit."""
    run_options = RunOptions(
        chat_template=(EXAMPLES / "chatml.jinja").read_text(encoding="utf-8"),
        max_new_tokens=setup.max_new_tokens,
        temperature=0.0,
    )
    run = Run.create(setup.settings, setup.settings.model, run_options)
    if not run.progress().sealed:
        options = EnqueueOptions(batch_size=BATCH_SIZE, heldout=0, limit=setup.num_rows)
        run.enqueue(EXAMPLES / "prompts.jsonl", options)
        run.seal()
    return run


def generate(setup: Demo, run: Run) -> None:
    """Until every batch has its commit; the engine is gone afterwards, and its cores are free."""
    if all_committed(run):
        return
    engine = EngineConfig(
        python=setup.engine_python,
        model_dir=Path(setup.settings.model),
        port=free_ports(1)[0],
        cpu=True,
        max_running_requests=MAX_IN_FLIGHT,
        max_total_tokens=32768,
        dtype="float32",  # without AVX-512 or AMX a CPU multiplies bf16 five times slower
    )
    if not engine.python.exists():
        raise Missing(f"{engine.python}: no engine there: `make demo` installs it")
    with ExitStack() as running:
        log_path = setup.state / "logs" / "engine.log"
        server = running.enter_context(start_engine(engine, log_path))
        with err.status("starting SGLang") as status:
            wait_until_ready(
                server,
                engine.url,
                ENGINE_TIMEOUT_S,
                lambda waited_s: status.update(f"starting SGLang, {waited_s:.0f} s"),
            )
        settings = dataclasses.replace(setup.settings, engine_url=engine.url)
        argv = [sys.executable, "-m", "fleet", "worker"]
        environ = dict(os.environ) | settings.environment()
        worker = running.enter_context(start_child(setup, "worker", argv, environ))
        watch_until_committed(run, [server, worker])


def all_committed(run: Run) -> bool:
    progress = run.progress()
    return progress.num_batches_done == progress.num_batches


def watch_until_committed(run: Run, children: list[Child]) -> None:
    """A bar of committed prompts. Raises EngineFailed where a child ends before the work does."""
    reconciler = run.reconciler()
    with progress_bar() as bar:
        task = bar.add_task("prompts", total=run.progress().num_prompts, note="")
        while True:
            reconciler.ledger.refresh()
            progress = reconciler.ledger.progress()
            bar.update(task, completed=progress.num_prompts_done)
            if not reconciler.ledger.open:
                return
            for child in children:
                if child.poll() is not None:
                    raise EngineFailed(f"the {child.name} ended early:\n{child.tail()}")
            reconciler.look()
            time.sleep(1)


def committed_facts(run: Run) -> Facts:
    """What stands in S3."""
    progress = measure(run.store, run.spec.run)
    refused, rejected = rejections(run.store, run.spec.run)
    sizes = [size for _key, size in run.store.list(f"{run.spec.run}/")]
    return {
        "planned": progress.total,
        "completed": progress.completed,
        "rejected": dict(rejected),
        "refused": dict(refused),
        "output_tokens": progress.total_output_tokens,
        "s3_objects": len(sizes),
        "s3_bytes": sum(sizes),
    }


def tokenize(setup: Demo) -> Facts:
    made = make_shards(setup.settings)
    return {
        "samples": made.num_samples,
        "loss_share": round(made.num_loss_tokens / max(made.num_tokens, 1), 3),
        "samples_skipped": made.skipped,
    }


def train(setup: Demo) -> Facts:
    changes = [f"num_steps={setup.num_steps}"]
    done = train_drafter(setup.settings, RECIPE, changes, setup.checkpoints)
    assert done is not None  # a process by itself has the report
    return {
        "steps": done.num_steps,
        "first_loss": round(done.first_loss, 3),
        "last_loss": round(done.last_loss, 3),
    }


def export_and_measure(setup: Demo) -> Facts:
    """What is exported is what is measured."""
    if not setup.export.exists():
        export_checkpoint(setup.checkpoints, setup.export, check_with=setup.settings)
    with err.status("decoding held-out prompts, plain and with the drafter"):
        found = measure_drafter(
            setup.settings, setup.export, setup.num_heldout, setup.max_new_tokens
        )
    return {
        "accept_length_untrained": round(found.accept_length_untrained, 3),
        "accept_length": round(found.accept_length, 3),
        "gain_low": round(found.gain_low, 3),
        "gain_high": round(found.gain_high, 3),
        "prompts_measured": found.num_prompts,
        "loops_left_out": found.num_loops,
        "replies_changed": found.num_faults,
        "ties": found.num_ties,
    }


def start_child(
    setup: Demo, name: str, argv: list[str], environ: dict[str, str] | None = None
) -> Child:
    return spawn(
        argv, name=name, log_path=setup.state / "logs" / f"{name}.log", environ=environ, cwd=ROOT
    )


def print_table(facts: Facts) -> None:
    """The demo's end, for people."""
    gain = f"gain {facts['gain_low']} to {facts['gain_high']} with 95 % confidence"
    same = "equal to plain greedy decoding" if not facts["replies_changed"] else "CHANGED"
    rows = {
        "prompts": f"{facts['planned']} planned, {facts['completed']} completed, "
        f"{sum(facts['rejected'].values())} rejected",
        "rows refused": ", ".join(f"{n} {reason}" for reason, n in facts["refused"].items()),
        "output tokens": f"{facts['output_tokens']:,}",
        "in S3": f"{facts['s3_objects']} objects, {facts['s3_bytes']:,} bytes",
        "samples": f"{facts['samples']}, {facts['loss_share']:.0%} of their tokens carry loss",
        "loss": f"{facts['first_loss']} -> {facts['last_loss']} in {facts['steps']} steps",
        "accept length": f"{facts['accept_length_untrained']} untrained -> "
        f"{facts['accept_length']} trained ({gain})",
        "measured on": f"{facts['prompts_measured']} held-out prompts "
        f"({facts['loops_left_out']} loops left out)",
        "replies": f"{same}, token for token ({facts['ties']} ties)",
        "seconds": ", ".join(f"{name} {s:.0f}" for name, s in facts["seconds"].items()),
    }
    table = Table(show_header=False)
    for label, text in rows.items():
        table.add_row(label, text)
    out.print(table)


def print_what_next(setup: Demo) -> None:
    """Where things lie, and what to type."""
    run = f"{setup.settings.s3_bucket}/{RUN}"
    out.print(
        f"completions   s3://{run}/data/, named by s3://{run}/commits/\n"
        f"shards        s3://{run}/tokens/\n"
        f"checkpoints   {setup.checkpoints}\n"
        f"drafter       {setup.export}  (the published DFlash format)\n"
        f"S3 and Redis  kept in {setup.state}, started again by the next `dflash-fleet demo`\n"
        "next          your own prompts and GPUs: see 'On your GPUs' in README.md",
        markup=False,
        soft_wrap=True,
    )
