"""The gate's report as one HTML file that loads nothing: verdicts, plots, tables.

Called by the `gate` verb with what judge.py found. Every text in it comes from data that nobody
has looked at, so each goes through document.escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dflash_workers.contract.records import Json
from trainer.gate.document import document, escaped
from trainer.gate.judge import Report
from trainer.gate.plots import bars, histogram

_NOTED = ("p1", "p50", "p90", "p99", "max", "mean")


def page_of(report: Report) -> str:
    """The whole document."""
    verdict = "may be trained on" if report.passed else "may NOT be trained on"
    outcome = "pass" if report.passed else "fail"
    title = f"Run {report.run}: the data {verdict}"
    body = [
        f'<h1 class="{outcome}">{escaped(title)}</h1>',
        _summary(report.facts),
        "<h2>Rules</h2>",
        _rules(report),
        "<h2>Distributions</h2>",
        f'<div class="plots">{"".join(_plots(report.facts))}</div>',
        "<h2>Sources</h2>",
        _sources(report.facts["sources"]),
        "<h2>Answers given most often</h2>",
        _top_answers(report.facts["top_answers"]),
        *_unreadable(report.facts["unreadable"]),
    ]
    return document(title, "\n".join(body))


def _summary(facts: Json) -> str:
    heldout = f"{facts['num_heldout']:,} of them held out"
    skipped = ", ".join(f"{n:,} {reason}" for reason, n in facts["skipped"].items()) or "none"
    lines = [
        f"{facts['num_samples']:,} samples ({heldout}) in {facts['num_shards']:,} shards; "
        f"{facts['num_tokens']:,} tokens, {facts['loss_share']:.1%} of them carry loss, "
        f"{facts['thinking_share']:.1%} of these are thinking.",
        f"Left out by the tokenizer: {skipped}. Near-duplicates: {facts['num_near_duplicates']:,}"
        f"{' at least' if facts['near_duplicates_are_a_lower_bound'] else ''}. "
        f"Loops: {facts['num_loops']:,}. Refusals: {facts['num_refusals']:,}. "
        f"With tools: {facts['num_with_tools']:,}, {facts['num_with_calls']:,} call one.",
    ]
    without = facts["num_samples"] - facts["num_with_words"]
    if without:
        lines.append(f"The rows of {without:,} samples are not there: their text is not judged.")
    return "".join(f"<p>{escaped(line)}</p>" for line in lines)


def _rules(report: Report) -> str:
    rows = [
        [
            f"<td>{escaped(v.rule)}</td>",
            f'<td class="{v.outcome.replace(" ", "-")}">{escaped(v.outcome)}</td>',
            _number(f"{v.share:.2%}"),
            _number(f"{v.max_share:.0%}"),
            f"<td>{escaped(v.why_not or v.counted())}</td>",
        ]
        for v in report.verdicts
    ]
    return _table(["rule", "verdict", "#share", "#allowed", "what"], rows)


def _plots(facts: Json) -> Iterable[str]:
    for name, title in (
        ("output_tokens", "Answer length, tokens"),
        ("prompt_tokens", "Prompt length, tokens"),
        ("loss_percent", "Share of a sample that carries loss, %"),
        ("thinking_tokens", "Thinking length, tokens"),
    ):
        found = facts[name]
        note = ", ".join(f"{key} {found[key]:,}" for key in _NOTED if key in found)
        yield histogram(title, found["bins"], note)
    yield bars("How answers end", facts["finish_reasons"])
    yield bars("Flags", facts["flags"])
    yield bars("Turn of the answer", facts["turns"])
    yield bars("Main script of the answers", facts["main_scripts"])
    yield bars("Letters by script", facts["letters"])
    yield bars("Tools", _tools(facts))
    sources = {name: found["num_samples"] for name, found in facts["sources"].items()}
    yield bars("Samples by source", sources)
    if facts["benchmarks"]:
        found = facts["benchmarks"]
        note = f"of {found['num_prompts']:,} prompts, {found['num_too_short']:,} too short to tell"
        yield bars("Overlap with benchmarks", found["overlaps"], note)


def _tools(facts: Json) -> dict[str, int]:
    offered, called = facts["num_with_tools"], facts["num_with_calls"]
    without = facts["num_with_words"] - max(offered, called)
    return {
        "none offered": without,
        "offered, not called": max(offered - called, 0),
        "called": called,
    }


def _sources(sources: Mapping[str, Json]) -> str:
    rows = [
        [
            f"<td>{escaped(name)}</td>",
            _number(f"{found['num_samples']:,}"),
            _number(f"{found['num_loss_tokens'] / found['num_samples']:,.0f}"),
            _number(f"{found['num_loss_tokens'] / found['num_tokens']:.1%}"),
            _number(f"{found['num_empty'] / found['num_samples']:.1%}"),
            _number(f"{found['num_truncated'] / found['num_samples']:.1%}"),
        ]
        for name, found in sorted(sources.items(), key=lambda pair: -pair[1]["num_samples"])
    ]
    heads = ["source", "#samples", "#answer tokens", "#loss share", "#near-empty", "#truncated"]
    return _table(heads, rows)


def _top_answers(answers: Sequence[Json]) -> str:
    rows = [[_number(f"{a['count']:,}"), f"<td>{escaped(a['text'])}</td>"] for a in answers]
    return _table(["#times", "answer"], rows) if rows else "<p>No answer was given twice.</p>"


def _unreadable(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return ["<h2>Shards that can't be read</h2>", f"<ul>{items}</ul>"]


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A `#` before a head: its column holds numbers."""
    top = "".join(
        f'<th class="number">{escaped(h[1:])}</th>' if h[0] == "#" else f"<th>{escaped(h)}</th>"
        for h in heads
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
