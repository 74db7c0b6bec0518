"""`dflash-fleet node`: a GPU machine as a working member of the fleet, and what is asked of it.

Mounted by fleet.py. `node --run R` is `node start --run R`; stop, status, logs and leave find the
node by its folder. A verb's parameters are its flags, however many, which makes this file long.
Redis, S3 and the run come from the settings, so that a new machine needs nothing but these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.provenance import may_differ
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, out, report
from dflash_workers.logs import set_up_logs
from dflash_workers.node.folder import FAILED, NodeFolder, default_folder
from dflash_workers.node.layout import BASE_PORT, NodeOptions, lay_out
from dflash_workers.node.leaving import as_facts, find_held, send_logs
from dflash_workers.node.machine import Node
from dflash_workers.node.presets import SGLANG, THROUGHPUT
from dflash_workers.node.staged import AUTO, in_use

ENGINE_PYTHON = Path(__file__).resolve().parents[1] / ".venv-engine/bin/python"
DETACH = "--detach"
POLL_S = 0.5
TAIL_LINES = 20
STOP_S = 120.0


class StartsByDefault(TyperGroup):
    """Flags without a verb are those of `start`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As if `start` had been written."""
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["start", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=StartsByDefault, no_args_is_help=True, rich_markup_mode=None)

StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="The node's folder: logs, staged models.", show_default=False),
]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.callback()
def node() -> None:
    """Keep every GPU of this machine busy with a run, from one command.

    `dflash-fleet node --run qwen3-8b` is short for `node start --run qwen3-8b`: see
    `dflash-fleet node start --help` for its flags.
    """


@app.command()
def start(
    run: RunOption = "",
    model: Annotated[
        str,
        typer.Option(
            help="Folder, s3://BUCKET/KEY or hf:ORG/NAME; else models/TARGET beside the runs.",
            show_default=False,
        ),
    ] = "",
    gpus: Annotated[
        str, typer.Option(help="Indices or UUIDs, as 0,1; else all.", show_default=False)
    ] = "",
    cpu: Annotated[
        bool, typer.Option("--cpu", help="No GPU: SGLang's native PyTorch path.")
    ] = False,
    engines: Annotated[int, typer.Option(help="With --cpu: how many engines.", min=1)] = 1,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Requests running in each engine at once.", min=1)
    ] = None,
    engine: Annotated[str, typer.Option(help="sglang or vllm.")] = SGLANG,
    engine_python: Annotated[
        Path, typer.Option(help="Python of the engine's own venv.")
    ] = ENGINE_PYTHON,
    preset: Annotated[
        list[str] | None,
        typer.Option(help="throughput, mtp, hicache, dflash; may be repeated.", show_default=False),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="Drafter of the preset dflash, as --model.", show_default=False)
    ] = "",
    override: Annotated[
        list[str] | None,
        typer.Option(
            help="target: though the drafter was trained for another.", show_default=False
        ),
    ] = None,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="Any flag of the engine's: '--name value'.", show_default=False),
    ] = None,
    worker_arg: Annotated[
        list[str] | None,
        typer.Option(help="Any flag of `worker`: '--name value'.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int,
        typer.Option(
            help="Of the first worker's /metrics; each next one's is ten higher. 0: none."
        ),
    ] = 0,
    metrics_host: Annotated[str, typer.Option(help="Where they listen.")] = "127.0.0.1",
    stage: Annotated[
        str, typer.Option(help="Where a model is copied to: auto, ram, disk, never.")
    ] = AUTO,
    base_port: Annotated[
        int, typer.Option(help="Of the first engine; the next ones follow.", min=1, max=65000)
    ] = BASE_PORT,
    grace_s: Annotated[
        float, typer.Option(help="Seconds for running prompts to end, once told to go.", min=0)
    ] = 0.0,
    idle_exit_s: Annotated[
        float, typer.Option(help="Leave after so many seconds without work; 0: never.", min=0)
    ] = 0.0,
    state: StateOption = None,
    detach: Annotated[
        bool, typer.Option(DETACH, help="Go on without this terminal, once it serves.")
    ] = False,
) -> None:
    """Check this machine, stage the model, and keep an engine and a worker per GPU running.

    What dies is started again; what dies too often ends the node with exit code 1. SIGTERM, Ctrl-C
    or a spot notice (DFLASH_SPOT_PROVIDER, DFLASH_SPOT_FILE) drains it, workers first; a second
    signal ends it at once.

    Example: dflash-fleet node --run qwen3-8b --model s3://models/Qwen3-8B --detach
    """
    set_up_logs()
    folder = _folder(state)
    settings = load_settings({"run": run, "model": model, "max_in_flight": max_in_flight})
    settings.require_run()
    if detach:
        _detach(folder)
        return
    options = NodeOptions(
        engine_python=engine_python,
        gpus=tuple(gpus.split(",")) if gpus else (),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        is_cpu=cpu,
        num_cpu_engines=engines,
        engine=engine,
        presets=tuple(preset or (THROUGHPUT,)),
        drafter=drafter,
        may_differ=may_differ(override or ()),
        engine_args=tuple(engine_arg or ()),
        worker_args=tuple(worker_arg or ()),
        metrics_at=(metrics_host, metrics_port) if metrics_port else None,
        stage=stage,
        base_port=base_port,
        grace_s=grace_s,
        idle_exit_s=idle_exit_s,
    )
    with folder.held(), ExitStack() as staged:
        lanes = lay_out(options, settings, folder)
        for model_dir in lanes[0].models:
            staged.enter_context(in_use(model_dir))
        raise typer.Exit(Node(lanes, settings, folder).run())


@app.command()
def stop(
    state: StateOption = None,
    wait_s: Annotated[float, typer.Option(help="For it to drain, then it is killed.")] = STOP_S,
) -> None:
    """Have the node hand its batches on and end, and wait for it.

    Example: dflash-fleet node stop
    """
    folder = _folder(state)
    if not folder.stop(wait_s):
        err.print("no node runs here", markup=False)


@app.command()
def status(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Say what the node's engines and workers do. Exit code 3 unless all of them serve.

    Example: dflash-fleet node status --json
    """
    folder = _folder(state)
    facts = folder.read()
    if not folder.is_alive():
        facts = facts | {"state": facts.get("state") if _has_ended(facts) else "dead"}
    if not facts.get("pid"):
        facts = {"state": "never started"}
    report(facts if as_json else _in_lines(facts), as_json=as_json)
    if facts["state"] != "serving":
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="node, engine-0, worker-0, ...")] = "node",
    lines: Annotated[int, typer.Option("--lines", "-n", help="From the end.", min=0)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    state: StateOption = None,
) -> None:
    """Show the end of a log.

    Example: dflash-fleet node logs engine-0 --follow
    """
    path = _folder(state).log(name)
    argv = ["tail", "-n", str(lines), *(["-F"] if follow else []), str(path)]
    raise typer.Exit(subprocess.call(argv))


@app.command()
def leave(
    check: Annotated[bool, typer.Option("--check", help="Only say what is held here.")] = False,
    run: RunOption = "",
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a training on this machine.", show_default=False),
    ] = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop the node, send its logs to S3, and say what would be lost with this machine.

    With --check nothing is stopped or sent. Exit code 3 if anything is held here that isn't in S3.

    Example: dflash-fleet node leave --check --checkpoints drafter
    """
    folder = _folder(state)
    settings = load_settings({"run": run or folder.read().get("run", "")})
    store = open_store(settings)
    if not check:
        folder.stop(STOP_S)
        num_sent = send_logs(folder, store, settings.require_run())
        err.print(f"{num_sent} logs sent to {store.url(settings.run)}/nodes/", markup=False)
    held = find_held(folder, settings, store, checkpoints or [])
    if as_json:
        report(as_facts(held), as_json=True)
    else:
        for each in held:
            out.print(f"{each.what}: {each.where}: {each.detail}", markup=False, soft_wrap=True)
        if not held:
            out.print("nothing is held here that isn't in S3", markup=False)
    if held:
        raise typer.Exit(ExitCode.SOME_REFUSED)


def _folder(state: Path | None) -> NodeFolder:
    return NodeFolder(state or default_folder())


def _detach(folder: NodeFolder) -> None:
    """The same command without --detach, in a session of its own; wait until it serves."""
    folder.make()
    if folder.is_alive():
        raise BadInput(f"a node runs here already (pid {folder.read().get('pid')}): stop it first")
    words = [word for word in sys.argv[1:] if word != DETACH]
    with folder.node_log.open("ab") as log:
        log_start = log.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "fleet", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    err.print(f"node {child.pid}, log {folder.node_log}", markup=False, soft_wrap=True)
    shown = log_start
    while child.poll() is None and not _serves(folder, child.pid):
        shown = _show_growth(folder.node_log, shown)
        time.sleep(POLL_S)
    _show_growth(folder.node_log, shown)
    if child.poll() is not None:
        raise NotEnough(f"the node ended with status {child.returncode}: see {folder.node_log}")
    err.print("it serves: `dflash-fleet node status`, `logs`, `stop`", markup=False)


def _serves(folder: NodeFolder, pid: int) -> bool:
    facts = folder.read()
    return facts.get("pid") == pid and facts.get("state") == "serving"


def _show_growth(path: Path, shown: int) -> int:
    with path.open("rb") as log:
        log.seek(shown)
        err.print(log.read().decode(errors="replace"), end="", markup=False, soft_wrap=True)
        return log.tell()


def _has_ended(facts: dict[str, Any]) -> bool:
    return facts.get("state") in ("stopped", "given up", FAILED)


def _in_lines(facts: dict[str, Any]) -> dict[str, str]:
    """One line per lane."""
    lines = {name: str(facts[name]) for name in ("state", "why", "run", "pid") if facts.get(name)}
    for number, lane in enumerate(facts.get("lanes", [])):
        beat = lane["worker"]["heartbeat"]
        lines[f"lane {number}"] = (
            f"{lane['gpu']}, port {lane['port']}: engine {lane['engine']['state']}, "
            f"worker {lane['worker']['state']}, {beat.get('in_flight', '?')} in flight, "
            f"{beat.get('tokens_per_s', '?')} tokens/s"
        )
    return lines
