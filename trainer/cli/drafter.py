"""The drafter's verbs: train, evaluate, export.

fleet.py mounts `app`; demo.py calls the functions below the verbs. The work is done by online/,
drafter/ and evaluate.py. A verb's parameters are its flags, however many.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_workers.contract.errors import Draining
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, progress_bar, report
from trainer.cli.evaluation import (
    PROMPTS_AT_ONCE,
    DecodingTerms,
    beginning_of,
    print_evaluation,
)
from trainer.cli.parity import parity_check
from trainer.cli.showing import print_recipe, step_line
from trainer.cli.words import AsJson, ModelDir, RunName, late
from trainer.drafter.engines import ENGINES, NEWEST

if TYPE_CHECKING:
    from trainer.evaluate import Evaluation
    from trainer.online.stopping import Stop
    from trainer.online.train import TrainReport
    from trainer.online.watching import StepRecord

app = typer.Typer()


@app.command()
def train(
    run: RunName = "",
    model: ModelDir = "",
    recipe: Annotated[str, typer.Option(help="A name in trainer/recipes.py.")] = "smollm2_cpu",
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value; repeat.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="As --set num_steps; 0: the recipe's.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("drafter"),
    name: Annotated[str, typer.Option(help="Of this training in S3; else --out's name.")] = "",
    start_from: Annotated[
        Path | None, typer.Option("--from", help="Folder of a published drafter to go on with.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--override", help="Train though this rule of the gate fails; repeat."),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of Prometheus, on 127.0.0.1; 0: none.")
    ] = 0,
    tracker: Annotated[str, typer.Option(help="wandb or trackio, where one is installed.")] = "",
    num_ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes on this machine, one a GPU.")
    ] = 1,
    is_elastic: Annotated[
        bool, typer.Option("--elastic", help="Where a rank dies, start all of them again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a drafter on a run's shards; goes on where a stopped one was.

    Shards are followed as they come. Data that fail `dflash-fleet gate` are refused; what was
    overridden stands in the checkpoint. On the GPUs of one machine: --ranks 4; on several machines:
    torchrun ... -m trainer.online.train -- ARGUMENTS. Example: dflash-fleet train --run maths
    --model ./smollm2 --out ./drafter --set num_steps=100
    """
    settings = load_settings({"run": run, "model": model})
    changes = [*(changes or []), *([f"num_steps={steps}"] if steps else [])]
    options = TrainOptions(name, overrides or [], start_from, metrics_port, tracker)
    with _goodbye() as stop:
        if num_ranks > 1 or is_elastic:
            check_training(settings, recipe, changes, num_ranks)
            stop.note_from_now_on()  # the launcher takes signals itself
            arguments = sys.argv[sys.argv.index("train") + 1 :]
            launching = late("trainer.online.launching")
            launching.launch(arguments, num_ranks=num_ranks, out=out, is_elastic=is_elastic)
        elif done := train_drafter(settings, recipe, changes, out, options):  # the leader's
            report(dataclasses.asdict(done), as_json=as_json)


@app.command()
def evaluate(
    drafter: Annotated[Path, typer.Option(help="Folder that `export` wrote.")],
    run: RunName = "",
    model: ModelDir = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts, at most.")] = 12,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per reply.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of the target's choices.")] = 0.0,
    at_once: Annotated[
        int, typer.Option(min=1, help="Prompts decoded at once; 1: the speed of a single stream.")
    ] = PROMPTS_AT_ONCE,
    began_with: Annotated[
        Path | None, typer.Option("--from", help="As `train --from`, where that was given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per verify step on a run's held-out prompts, trained against untrained, and
    the speed against the target's own.

    By source, turn, thinking or answer, and place in the block, with 95 % intervals over prompts.
    Exit code 3 where speculation changed a reply. Example: dflash-fleet evaluate --run maths
    --model ./smollm2 --drafter ./export
    """
    settings = load_settings({"run": run, "model": model})
    terms = DecodingTerms(temperature, at_once, began_with)
    measured = measure_drafter(settings, drafter, num_prompts, max_new_tokens, terms)
    if as_json:
        report(dataclasses.asdict(measured), as_json=True)
    else:
        print_evaluation(measured)
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
    engine: Annotated[
        str, typer.Option("--for", help=f"Who will run it: {', '.join(ENGINES)}.")
    ] = NEWEST,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Without `parity`.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's drafter in the format that the servers load, once `parity` finds no
    fault in it; refused where the engine that it is for would run something else than was trained.

    Example: dflash-fleet export ./drafter ./export --run maths --model ./smollm2
    """
    settings = None if unchecked else load_settings({"run": run, "model": model})
    export_checkpoint(checkpoint, out, dtype, engine=engine, check_with=settings)
    report({"export": str(out), "dtype": dtype, "engine": engine}, as_json=as_json)


@contextmanager
def _goodbye() -> Iterator[Stop]:
    """Whoever is asked to leave says so once, and it is no failure: nothing is lost."""
    try:
        with late("trainer.online.stopping").stop_signals() as stop:
            yield stop
    except Draining as error:
        if late("trainer.online.topology").read_launch(os.environ).rank == 0:
            err.print(f"dflash-fleet: {error}", markup=False, soft_wrap=True)


def check_training(settings: Settings, recipe: str, changes: Sequence[str], num_ranks: int) -> None:
    """What every rank would find wrong, said once. Raises BadInput, Missing, Conflict."""
    choices = late("trainer.recipes").named_recipe(recipe, changes)
    topology = late("trainer.online.topology").Topology(num_ranks, choices.topology)
    topology.check_step(choices.num_microbatches)
    spec = read_spec(open_store(settings), settings.require_run())
    late("trainer.online.fingerprint").check_target(spec, settings.model)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What of `train` has a default."""

    name: str = ""
    overrides: Sequence[str] = ()
    start_from: Path | None = None
    metrics_port: int = 0
    tracker: str = ""


DEFAULTS = TrainOptions()


def train_drafter(
    settings: Settings,
    recipe: str,
    changes: Sequence[str],
    out: Path,
    options: TrainOptions = DEFAULTS,
) -> TrainReport | None:
    """`train` with a bar; None on other ranks than the leader. Raises Draining after SIGTERM."""
    launch = late("trainer.online.topology").read_launch(os.environ)
    job = late("trainer.online.recipe").TrainJob(
        recipe=late("trainer.recipes").named_recipe(recipe, changes),
        model_dir=settings.model,
        out=out,
        name=options.name,
        overrides=list(options.overrides),
        start_from=options.start_from,
        launch=launch,
        metrics_port=options.metrics_port,
        tracker=options.tracker,
    )
    online = late("trainer.online.train")
    store, run = open_store(settings), settings.require_run()
    if launch.rank == 0:
        print_recipe(job.recipe)
    with progress_bar() as bar:
        task = bar.add_task("steps", total=None, note="", visible=False)

        def show(record: StepRecord) -> None:
            bar.update(
                task,
                visible=True,
                total=record.num_steps,
                completed=record.step,
                note=step_line(record),
            )

        done: TrainReport | None = online.train(store, run, job=job, on_step=show)
    return done


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    dtype: str = "bfloat16",
    *,
    engine: str = NEWEST,
    check_with: Settings | None,
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
        engine=engine,
        check=parity_check(check_with) if check_with else None,
    )


def measure_drafter(
    settings: Settings,
    drafter: Path,
    num_prompts: int,
    max_new_tokens: int,
    terms: DecodingTerms | None = None,
) -> Evaluation:
    """`evaluate` on some of a run's held-out prompts, every turn of a conversation one of them."""
    heldout = late("trainer.heldout").read_heldout(settings, num_prompts)
    module, samples = late("trainer.evaluate"), heldout.samples
    err.print(f"measuring on {len(samples)} held-out prompts", markup=False)
    sources = heldout.sources({s.prompt_key for s in samples})
    exports, terms = late("trainer.drafter.export"), terms or DecodingTerms()
    measured: Evaluation = module.evaluate(
        settings.model,
        exports.load_export(drafter),
        [
            module.Question(
                s.ids[: s.prompt_len].tolist(), sources[s.prompt_key], s.turn, s.thinking_end >= 0
            )
            for s in samples
        ],
        module.Terms(
            late("trainer.drafter.speculate").Limits(max_new_tokens, heldout.stop_ids),
            temperature=terms.temperature,
            prompts_at_once=terms.at_once,
            thinking_end_id=heldout.spec.thinking_end_id,
        ),
        start=beginning_of(exports.read_provenance(drafter), terms.began_with),
    )
    return measured
