"""The trainer's verbs: tokenize, train, evaluate, export.

fleet.py mounts `app`; demo.py calls the functions below the verbs. The work is done by tokens/,
online/, drafter/ and evaluate.py. Those import torch, transformers or pyarrow, which take seconds,
and this module is imported by every verb of the command and its --help: so they are loaded by
`_load`, when a verb runs, and by nothing else.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, progress_bar, report

if TYPE_CHECKING:
    from trainer.evaluate import Evaluation
    from trainer.online.train import TrainReport
    from trainer.tokens.build import TokenizeReport

app = typer.Typer()

RunFlag = Annotated[str, typer.Option("--run", help="Name of the run; else DFLASH_RUN.")]
ModelFlag = Annotated[str, typer.Option("--model", help="Folder of the target; else DFLASH_MODEL.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def tokenize(run: RunFlag = "", as_json: JsonFlag = False) -> None:
    """Make a token shard of every committed batch that has none.

    Safe to repeat. Example: dflash-fleet tokenize --run maths
    """
    made = make_shards(load_settings({"run": run}))
    report(dataclasses.asdict(made), as_json=as_json)
    if made.quarantined:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def train(
    run: RunFlag = "",
    model: ModelFlag = "",
    recipe: Annotated[str, typer.Option(help="A name in trainer/recipes.py.")] = "smollm2_cpu",
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("drafter"),
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter on a run's shards; goes on where a stopped one was.

    Example: dflash-fleet train --run maths --model ./smollm2 --out ./drafter --set num_steps=100
    """
    settings = load_settings({"run": run, "model": model})
    done = train_drafter(settings, recipe, changes or [], out)
    report(dataclasses.asdict(done), as_json=as_json)


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Option(help="Folder that `export` wrote.")],
    run: RunFlag = "",
    model: ModelFlag = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts, at most.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per reply.")] = 64,
    as_json: JsonFlag = False,
) -> None:
    """Measure tokens per verify step on a run's held-out prompts, trained against untrained.

    Exit code 3 where speculation changed a reply. Example: dflash-fleet evaluate --run maths
    --model ./smollm2 --drafter ./export
    """
    settings = load_settings({"run": run, "model": model})
    measured = measure_drafter(settings, drafter, num_prompts, max_new_tokens)
    report(dataclasses.asdict(measured), as_json=as_json)
    if measured.num_faults:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="What `train --out` named, or one step of it.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint's drafter in the format that the servers load.

    Example: dflash-fleet export ./drafter ./export
    """
    export_checkpoint(checkpoint, out, dtype)
    report({"export": str(out), "dtype": dtype}, as_json=as_json)


def make_shards(settings: Settings) -> TokenizeReport:
    """`tokenize` with a bar."""
    build = _load("trainer.tokens.build")
    with progress_bar() as bar:
        task = bar.add_task("shards", total=None, note="")
        made: TokenizeReport = build.tokenize_run(
            open_store(settings),
            settings.require_run(),
            lambda key: bar.update(task, advance=1, note=key),
        )
    return made


def train_drafter(
    settings: Settings, recipe: str, changes: Sequence[str], out: Path
) -> TrainReport:
    """`train` with a bar."""
    chosen = _load("trainer.recipes").named_recipe(recipe, changes)
    online = _load("trainer.online.train")
    with progress_bar() as bar:
        task = bar.add_task("steps", total=chosen.num_steps, note="")
        done: TrainReport = online.train(
            open_store(settings),
            settings.require_run(),
            recipe=chosen,
            paths=online.TrainPaths(settings.model, out),
            on_step=lambda step, metrics: bar.update(
                task, completed=step, note=f"loss {metrics.loss:.2f}"
            ),
        )
    return done


def export_checkpoint(checkpoint: Path, out: Path, dtype: str = "bfloat16") -> None:
    """`export`: the drafter of a checkpoint, with where it came from."""
    checkpoints = _load("trainer.online.checkpoint")
    checkpoint = checkpoints.latest_checkpoint(checkpoint) or checkpoint
    state = checkpoints.read_state(checkpoint)
    provenance = {
        **state.provenance,
        "step": state.step,
        "recipe": state.recipe,
        "corpus_digest": state.corpus_digest,
    }
    _load("trainer.drafter.export").export_drafter(
        checkpoints.read_drafter(checkpoint), out, dtype=dtype, provenance=provenance
    )


def measure_drafter(
    settings: Settings, drafter: Path, num_prompts: int, max_new_tokens: int
) -> Evaluation:
    """`evaluate` on the run's first held-out prompts."""
    prompts, stop_ids = _heldout_prompts(settings)
    err.print(f"{len(prompts)} held-out prompts, the first {num_prompts} are used", markup=False)
    exports = _load("trainer.drafter.export")
    recipe = exports.read_provenance(drafter).get("recipe", {})
    start = _load("trainer.drafter.start").Start(
        seed=recipe.get("seed", 0),
        copies_target=recipe.get("drafter", {}).get("copy_target_layers", False),
    )
    measured: Evaluation = _load("trainer.evaluate").evaluate(
        settings.model,
        exports.load_export(drafter),
        prompts[:num_prompts],
        _load("trainer.drafter.speculate").Limits(max_new_tokens, frozenset(stop_ids)),
        start=start,
    )
    return measured


def _heldout_prompts(settings: Settings) -> tuple[list[list[int]], list[int]]:
    """First turns of the held-out prompts, as ids, and the run's stop ids."""
    store, run = open_store(settings), settings.require_run()
    spec = load(RunSpec, store.get(RunKeys(run).spec))
    _load("trainer.online.target").check_target(spec, settings.model)
    samples = _load("trainer.online.batches").read_samples(store, run, heldout=True)
    prompts = [s.ids[: s.prompt_len].tolist() for s in samples if s.turn == 0]
    return prompts, spec.sampling.stop_token_ids


def _load(module: str) -> Any:
    """A module of ours that is slow to import: see the header."""
    return importlib.import_module(module)
