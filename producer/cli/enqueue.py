"""The verb enqueue: flags and report only; what it does is in api.py and intake.py.

Errors become one line and an exit code in fleet.py. The verb has a parameter for each flag, because
that is how typer reads them: what makes it long is each flag's one declaration, and the lines
behind those only sort the flags into the two records that api.py takes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from dflash_workers.contract.chat import CONTROL_POLICIES
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.terminal import ExitCode, out, report
from producer.api import EnqueueOptions, Run, RunOptions, Shape, preview
from producer.cli.words import AsJson, RunName, facts, share, show_refusals
from producer.conversations import POLICIES
from producer.plan import Survey
from producer.rules import DUPLICATES
from producer.schemas import SCHEMAS
from producer.sources.inputs import check_inputs

app = typer.Typer()

MAX_INT = 2**31 - 1
SHOWN_CHARS = 2000  # of a normalised prompt, by a dry run to people


def pair(text: str) -> tuple[str, str]:
    """'a=b' as (a, b)."""
    name, equals, value = text.rpartition("=")
    if not (name and equals and value):
        raise typer.BadParameter(f"{text!r}: write NAME=VALUE")
    return name, value


def weight(text: str) -> tuple[str, float]:
    """'PATH=0.5' as (path, 0.5)."""
    path, value = pair(text)
    try:
        return path, float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is no number") from error


def one_of(names: tuple[str, ...]) -> str:
    """The names as a flag's help lists them."""
    return " | ".join(names)


@app.command()
def enqueue(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, folders, patterns, s3:// URLs of these, hf:ORG/NAME[:CONFIG][@SPLIT]; "
            "- is stdin. JSON Lines or array, Parquet, Arrow, CSV, TSV; .gz, .zst, .bz2.",
        ),
    ],
    run: RunName = "",
    model: Annotated[str, typer.Option(help="Folder of the target model; or DFLASH_MODEL.")] = "",
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file in place of the model's.")
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Passed to the template.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_INT, help="New tokens per turn. Default: 2048."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the model's, else 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling. Default: the model's, else 1.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=-1, max=MAX_INT, help="-1: no limit. Default: the model's."),
    ] = None,
    multi_turn: Annotated[
        str | None,
        typer.Option(help=f"Recorded answers: {one_of(POLICIES)}. Default: rollout."),
    ] = None,
    control_tokens: Annotated[
        str | None,
        typer.Option(
            help=f"The target's inside a text: {one_of(CONTROL_POLICIES)}. Default: escape."
        ),
    ] = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(help="An answer's fault: empty=reject, repetition=retry-once; repeat."),
    ] = None,
    schema: Annotated[
        str, typer.Option(help=f"Of all rows: {one_of(SCHEMAS)}. Default: told by each row.")
    ] = "",
    field: Annotated[
        list[str] | None, typer.Option(help="messages=NAME where a row calls it NAME; repeat.")
    ] = None,
    template: Annotated[
        str, typer.Option(help="Text of plain prompts over a row's fields: 'Q: {question}'.")
    ] = "",
    system: Annotated[str, typer.Option(help="System prompt where a row has none.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Answers per row, each of its own.")] = 1,
    source_weight: Annotated[
        list[str] | None,
        typer.Option("--weight", help="PATH=0.5 plans half of its rows, 2 each twice; repeat."),
    ] = None,
    heldout: Annotated[float, typer.Option(parser=share, help="Share never trained on.")] = 0.02,
    duplicates: Annotated[
        str, typer.Option(help=f"An id that comes again: {one_of(DUPLICATES)}.")
    ] = "keep-first",
    drop_same_content: Annotated[
        bool, typer.Option("--drop-same-content", help="Under another id, too.")
    ] = False,
    shuffle: Annotated[int | None, typer.Option(help="Seed of a random order.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, max=sys.maxsize, help="Read N rows only.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 64,
    priority: Annotated[str, typer.Option(help="high | normal | low.")] = "normal",
    max_bad: Annotated[
        float, typer.Option(parser=share, help="Plan nothing if more rows are refused.")
    ] = 1.0,
    max_queued: Annotated[
        int | None, typer.Option(min=1, help="Hints in the queue to wait at.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be planned in a new run; needs no run, S3, Redis."
        ),
    ] = False,
    seal_after: Annotated[bool, typer.Option("--seal", help="End the plan afterwards.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the new rows of prompt files and send them to the queue. Safe to repeat.

    Example: dflash-fleet enqueue prompts.jsonl --run first --model /models/qwen3 --max-tokens 1024
    """
    check_inputs(files)
    settings = load_settings({"run": run, "model": model})
    run_options = RunOptions(
        chat_template=_read_template(chat_template),
        template_kwargs=None if thinking is None else {"enable_thinking": thinking},
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        multi_turn=multi_turn,
        control_tokens=control_tokens,
        quality=dict(map(pair, quality)) if quality else None,
    )
    options = EnqueueOptions(
        shape=Shape(schema, dict(map(pair, field or [])), template, system),
        samples=samples,
        heldout=heldout,
        weights=dict(map(weight, source_weight or [])),
        duplicates=duplicates,
        drop_same_content=drop_same_content,
        shuffle=shuffle,
        limit=limit,
        batch_size=batch_size,
        priority=priority,
        max_bad=max_bad,
        max_queued=max_queued,
    )
    if dry_run:
        found = preview(files, options, settings, run_options)
        _show(found, as_json)
        refused = dict(found.report.refused)
    else:
        with Run.create(settings, settings.model, run_options) as opened:
            done = opened.enqueue(files, options)
            if seal_after:
                opened.seal()
        refused = done.refused
        made = {"run": opened.spec.run, **dataclasses.asdict(done)}
        if not as_json:
            show_refusals(done.first_refusals)
            del made["first_refusals"]
        report(facts(made, as_json), as_json=as_json)
    if refused:
        raise typer.Exit(ExitCode.SOME_REFUSED)


def _show(found: Survey, as_json: bool) -> None:
    fields = dataclasses.fields(found.report)
    counts: dict[str, Any] = {"dry_run": True}
    counts |= {field.name: getattr(found.report, field.name) for field in fields}
    refusals = counts.pop("first_refusals")
    if as_json:
        report({**counts, "first_refusals": refusals, "prompts": found.prompts}, as_json=True)
        return
    show_refusals(refusals)
    report(facts(counts, as_json), as_json=False)
    for prompt in found.prompts:
        _show_prompt(prompt)


def _show_prompt(prompt: Json) -> None:
    body = orjson.dumps(prompt, option=orjson.OPT_INDENT_2).decode()
    cut = body if len(body) <= SHOWN_CHARS else f"{body[:SHOWN_CHARS]}\n..."
    out.print(cut, markup=False, soft_wrap=True)


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read: {error}") from error
