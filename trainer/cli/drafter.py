"""The drafter's verbs: train, evaluate, export.

fleet.py mounts `app`; demo.py calls the functions below the verbs. The work is done by online/,
drafter/ and evaluate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, progress_bar, report
from trainer.cli.parity import heldout_samples, parity_check
from trainer.cli.words import AsJson, ModelDir, RunName, late

if TYPE_CHECKING:
    from trainer.evaluate import Evaluation
    from trainer.online.train import TrainReport

app = typer.Typer()


@app.command()
def train(
    run: RunName = "",
    model: ModelDir = "",
    recipe: Annotated[str, typer.Option(help="A name in trainer/recipes.py.")] = "smollm2_cpu",
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("drafter"),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--override", help="Train though this rule of the gate fails; repeat."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter on a run's shards; goes on where a stopped one was.

    Data that fail `dflash-fleet gate` are refused; what was overridden stands in the checkpoint.
    Example: dflash-fleet train --run maths --model ./smollm2 --out ./drafter --set num_steps=100
    """
    settings = load_settings({"run": run, "model": model})
    done = train_drafter(settings, recipe, changes or [], out, overrides or [])
    report(dataclasses.asdict(done), as_json=as_json)


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Option(help="Folder that `export` wrote.")],
    run: RunName = "",
    model: ModelDir = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts, at most.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per reply.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target's choices.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per verify step on a run's held-out prompts, trained against untrained.

    Exit code 3 where speculation changed a reply. Example: dflash-fleet evaluate --run maths
    --model ./smollm2 --drafter ./export
    """
    settings = load_settings({"run": run, "model": model})
    measured = measure_drafter(
        settings, drafter, num_prompts, max_new_tokens, temperature=temperature
    )
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
    run: RunName = "",
    model: ModelDir = "",
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Without `parity`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's drafter in the format that the servers load, once `parity` finds no
    fault in it.

    Example: dflash-fleet export ./drafter ./export --run maths --model ./smollm2
    """
    settings = None if unchecked else load_settings({"run": run, "model": model})
    export_checkpoint(checkpoint, out, dtype, check_with=settings)
    report({"export": str(out), "dtype": dtype}, as_json=as_json)


def train_drafter(
    settings: Settings,
    recipe: str,
    changes: Sequence[str],
    out: Path,
    overrides: Sequence[str] = (),
) -> TrainReport:
    """`train` with a bar. `overrides`: rules of the gate that may fail."""
    chosen = late("trainer.recipes").named_recipe(recipe, changes)
    online = late("trainer.online.train")
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
            overrides=overrides,
        )
    return done


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: str = "bfloat16", *, check_with: Settings | None
) -> None:
    """`export`: the drafter of a checkpoint, with where it came from; checked on a run's held-out
    samples and its target.
    """
    checkpoints = late("trainer.online.checkpoint")
    checkpoint = checkpoints.latest_checkpoint(checkpoint) or checkpoint
    state = checkpoints.read_state(checkpoint)
    provenance = {
        **state.provenance,
        "step": state.step,
        "recipe": state.recipe,
        "corpus_digest": state.corpus_digest,
    }
    late("trainer.drafter.export").export_drafter(
        checkpoints.read_drafter(checkpoint),
        out,
        dtype=dtype,
        provenance=provenance,
        check=parity_check(check_with) if check_with else None,
    )


def measure_drafter(
    settings: Settings,
    drafter: Path,
    num_prompts: int,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
) -> Evaluation:
    """`evaluate` on the run's first held-out prompts."""
    samples, stop_ids = heldout_samples(settings)
    prompts = [s.ids[: s.prompt_len].tolist() for s in samples if s.turn == 0]
    err.print(f"{len(prompts)} held-out prompts, the first {num_prompts} are used", markup=False)
    exports = late("trainer.drafter.export")
    recipe = exports.read_provenance(drafter).get("recipe", {})
    start = late("trainer.drafter.start").Start(
        seed=recipe.get("seed", 0),
        copies_target=recipe.get("drafter", {}).get("copy_target_layers", False),
    )
    measured: Evaluation = late("trainer.evaluate").evaluate(
        settings.model,
        exports.load_export(drafter),
        prompts[:num_prompts],
        late("trainer.drafter.speculate").Limits(max_new_tokens, frozenset(stop_ids)),
        start=start,
        temperature=temperature,
    )
    return measured
