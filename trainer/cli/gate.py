"""The data's verbs: gate, show.

fleet.py mounts `app`. The work is done by gate/ and tokens/show.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, out, progress_bar, report
from trainer.cli.words import AsJson, ModelDir, RunName, late
from trainer.gate.document import visible

if TYPE_CHECKING:
    from trainer.gate.judge import Report

app = typer.Typer()

_COLOURS = {"pass": "green", "fail": "bold red", "overridden": "yellow", "not judged": "dim"}

Page = Annotated[Path | None, typer.Option("--html", help="Write one HTML file, too.")]


@app.command()
def gate(
    run: RunName = "",
    page: Page = None,
    benchmarks: Annotated[
        list[Path] | None,
        typer.Option("--benchmark", help="JSON Lines or text with a benchmark's prompts; repeat."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--override", help="Let this rule fail; repeat.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a run's token shards: lengths, masks, repeats, loops, thinking, tokenizer.

    Exit code 3 where a rule fails; `train` judges by the same rules. Example: dflash-fleet gate
    --run maths --html gate.html
    """
    found = judge_run(load_settings({"run": run}), benchmarks or [], overrides or [])
    if page:
        write_page(page, late("trainer.gate.page").page_of(found))
    if as_json:
        facts = {"run": found.run, "passed": found.passed}
        verdicts = [dataclasses.asdict(v) for v in found.verdicts]
        report({**facts, "verdicts": verdicts, **found.facts}, as_json=True)
    else:
        _print_verdicts(found)
    if not found.passed:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def show(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT_ID", help="A prompt's id or key.")],
    run: RunName = "",
    model: ModelDir = "",
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Show a prompt's samples in colour; underlined is what a drafter learns from.

    Example: dflash-fleet show math-001 --run maths --model ./smollm2
    """
    settings = load_settings({"run": run, "model": model})
    showing = late("trainer.tokens.show")
    tokenizer = late("dflash_workers.contract.chat").load_tokenizer(settings.model)
    find_samples = late("trainer.tokens.finding").find_samples
    samples = find_samples(open_store(settings), settings.require_run(), prompt)
    shown = [(sample, showing.pieces_of(sample, tokenizer)) for sample in samples]
    if page:
        write_page(page, showing.page_of(shown))
    if as_json:
        found = [
            showing.facts_of(sample) | {"pieces": [dataclasses.asdict(p) for p in pieces]}
            for sample, pieces in shown
        ]
        report({"samples": found}, as_json=True)
        return
    for sample, pieces in shown:
        facts = showing.facts_of(sample)
        report({**facts, "id": visible(sample.id)}, as_json=False)
        out.print(showing.painted(pieces), soft_wrap=True)


def judge_run(settings: Settings, benchmarks: list[Path], overrides: list[str]) -> Report:
    """`gate` with a bar."""
    store, run = open_store(settings), settings.require_run()
    index = late("trainer.gate.benchmarks").read_benchmarks(benchmarks) if benchmarks else None
    judging = late("trainer.gate.judge").Gate(store, run, overrides=overrides, benchmarks=index)
    with progress_bar() as bar:
        task = bar.add_task("shards", total=None, note="")
        found: Report = judging.report(
            lambda num, total: bar.update(task, completed=num, total=total)
        )
    if not found.facts["num_shards"] and not found.facts["unreadable"]:
        raise NotEnough(f"run {run!r} has no shards to judge: has `tokenize` run?")
    return found


def write_page(path: Path, page: str) -> None:
    """Raises BadInput where the file can't be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--html {path}: {error.strerror}") from error
    err.print(f"written: {path}", markup=False, soft_wrap=True)


def _print_verdicts(found: Report) -> None:
    width = max(len(v.rule) for v in found.verdicts)
    for verdict in found.verdicts:
        out.print(f"{verdict.outcome:<10}", style=_COLOURS[verdict.outcome], end="  ")
        out.print(f"{verdict.rule:<{width}}  {verdict.sentence()}", markup=False, soft_wrap=True)
    facts = found.facts
    shown = ("num_samples", "num_tokens", "loss_share", "thinking_share", "num_refusals", "skipped")
    report({name: facts[name] for name in shown}, as_json=False)
