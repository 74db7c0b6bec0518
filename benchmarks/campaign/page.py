"""A campaign's result as one HTML file that loads nothing: verdict, figures, what happened when.

Called by the campaign's program with its result, or by hand with a result's file:
`python -m benchmarks.campaign.page RESULT.json` writes the page beside it. Each text goes through
document.escaped, because findings quote what a store holds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.campaign import pictures
from benchmarks.campaign.result import Recovery, Result, Series, Stage
from benchmarks.figures import Figure
from trainer.gate.document import document, escaped

STYLE = """
figure { margin: 1rem 0; } figure svg { background: #fff; max-width: 60rem; }
pre { background: none; } td { font-variant-numeric: tabular-nums; }
"""
CPU = "cpu."  # begins the names of those series that are CPU seconds of a kind
COUNTED = ("prompts", "answers")  # series of how many there are so far
_NUM_RATES = 120  # in a picture

Rows = Iterable[Sequence[str]]


def page_of(result: Result) -> str:
    """The whole document."""
    title = f"Campaign {result.name}"
    body = [
        f"<h1>{escaped(title)}</h1>",
        f"<p>{escaped(result.began_at)}, {escaped(result.machine)}, commit "
        f"{escaped(result.commit[:12])}</p><pre>{escaped(result.command)}</pre>",
        _verdict(result),
        "<h2>Figures</h2>",
        _table(("figure", "value", "goal", "unit"), map(_figure_row, result.figures)),
        "<h2>Facts</h2>",
        _table((), ((name, _text(value)) for name, value in result.facts.items())),
        "<h2>Over time</h2>",
        *_over_time(result),
        "<h2>Where the CPU time goes</h2>",
        *_cpu(result),
        "<h2>Faults, and how soon what they cut went on</h2>",
        *_faults(result),
        "<h2>What stands in the store</h2>",
        *_oracle(result),
        "<h2>What was asked for</h2>",
        _table((), ((name, _text(value)) for name, value in result.configuration.items())),
    ]
    return document(title, "\n".join(body), STYLE)


def write_page(result: Result, path: Path) -> Path:
    """The page as a file."""
    path.write_text(page_of(result), encoding="utf-8")
    return path


def _verdict(result: Result) -> str:
    if not result.broken_laws:
        return '<p class="pass">Every law held.</p>'
    laws = "".join(f"<li>{escaped(law)}</li>" for law in result.broken_laws)
    return f'<p class="fail">Broken:</p><ul class="fail">{laws}</ul>'


def _figure_row(figure: Figure) -> Sequence[str]:
    goal = ""
    if figure.goal is not None:
        sign = "≥" if figure.better == "higher" else "≤"
        goal = f"{sign} {figure.goal:g}{'' if figure.is_met else ', missed'}"
    return figure.figure, f"{figure.value:.4g}", goal, figure.unit


def _over_time(result: Result) -> Iterable[str]:
    note = "Ticks: faults." if result.faults else ""
    for one in result.series:
        if one.t_s and not one.name.startswith(CPU):
            shown = rate_of(one) if one.name in COUNTED else one
            title = f"{shown.name} ({shown.unit})"
            yield _picture(title, pictures.over_time(shown, result.faults), note)
    if lived := [one for one in result.processes if one.rss.t_s]:
        steepest = max(lived, key=lambda one: one.slope_mb_per_min or float("-inf"))
        note = ""
        if steepest.slope_mb_per_min is not None:
            told = f"{steepest.name}, {steepest.slope_mb_per_min:.3g} MB a minute"
            note = f"Grows fastest over the last 80 % of its life: {told}."
        yield _picture(f"Memory of {len(lived)} processes", pictures.memory(lived), note)


def rate_of(counted: Series) -> Series:
    """What came a second, of a series of how much there was so far."""
    step = max(len(counted.t_s) // _NUM_RATES, 1)
    points = list(zip(counted.t_s[::step], counted.value[::step], strict=True))
    rates = [
        ((begin_s + end_s) / 2, (after - before) / max(end_s - begin_s, 1e-9))
        for (begin_s, before), (end_s, after) in pairwise(points)
    ]
    times_s, values = [at_s for at_s, _ in rates], [rate for _, rate in rates]
    return Series(counted.name, f"{counted.unit}/s", times_s, values)


def _cpu(result: Result) -> Iterable[str]:
    used = [one for one in result.series if one.name.startswith(CPU) and len(one.t_s) > 1]
    if used:
        yield _picture("Cores busy, by kind of process", pictures.cores(used))
    if result.stages:
        yield _picture("CPU time of a prompt, by kind of process", pictures.stages(result.stages))
        yield _table(
            ("kind", "CPU s", "CPU ms a prompt", "MB at most, of one"),
            map(_stage_row, result.stages),
        )


def _stage_row(stage: Stage) -> Sequence[str]:
    cost, peak_mb = f"{stage.cpu_ms_per_prompt:.3f}", f"{stage.peak_rss_mb:,.0f}"
    return stage.kind, f"{stage.cpu_s:,.1f}", cost, peak_mb


def _faults(result: Result) -> Iterable[str]:
    if not result.faults:
        yield "<p>None were made.</p>"
        return
    if any(fault.recovery_s for fault in result.faults):
        yield _picture("Recovery", pictures.recoveries(result.faults), "A dot: a batch cut.")
    heads = ("kind", "faults", "batches cut", "median s", "p99 s")
    yield _table(heads, map(_recovery_row, result.recoveries))
    if result.left_out:
        yield f"<p>Found nothing to hit: {escaped(', '.join(result.left_out))}.</p>"


def _recovery_row(one: Recovery) -> Sequence[str]:
    times = ["" if value is None else f"{value:.2f}" for value in (one.median_s, one.p99_s)]
    return one.kind, f"{one.num_faults:,}", f"{one.num_batches:,}", *times


def _oracle(result: Result) -> Iterable[str]:
    oracle = result.oracle
    counts = {
        "planned": oracle.num_planned,
        "completed": oracle.num_completed,
        "rejected": oracle.num_rejected,
        "lost": oracle.num_lost,
        "doubled": oracle.num_doubled,
        "not the engine's answer": oracle.num_wrong,
        "rows in token shards": oracle.num_token_rows,
        "tokens in the answers": oracle.num_output_tokens,
        "tokens that the engines made": oracle.num_made_tokens,
        "tokens made again": oracle.num_made_again,
        **{f"made again: {reason}": count for reason, count in oracle.made_again_by.items()},
        **{f"audit: {name}": count for name, count in oracle.audit.items()},
    }
    yield _table((), ((name, _text(count)) for name, count in counts.items() if count is not None))
    if oracle.findings:
        yield f"<pre>{escaped(chr(10).join(oracle.findings), keep_lines=True)}</pre>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    return str(value)


def _table(heads: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _picture(title: str, svg: str, note: str = "") -> str:
    return f"<figure><figcaption>{escaped(title)}</figcaption>{svg}<p>{escaped(note)}</p></figure>"


if __name__ == "__main__":
    told = Path(sys.argv[1])
    print(write_page(Result.read(told), told.with_suffix(".html")))
