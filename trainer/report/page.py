"""The report of a run as one HTML file that loads nothing: figures, curves, verdicts.

Called by the `report` verb with what gathering.py read. Ids and reasons come from data that nobody
has looked at, so each text goes through document.escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from dflash_workers.contract.events import ENDS as ENDS_OF_A_WORKER
from dflash_workers.contract.events import JOINED, Event
from dflash_workers.contract.records import Json
from trainer.gate.document import document, escaped
from trainer.gate.plots import bars, histogram
from trainer.report.drawing import STYLE, curves, spans
from trainer.report.gathering import Facts
from trainer.report.series import (
    accept_lengths,
    binned,
    curve,
    mean_in_flight,
    rates,
    sampled,
)

HOURS = "h"
_MARKED = (JOINED, *ENDS_OF_A_WORKER)


def page_of(facts: Facts) -> str:
    """The whole document."""
    title = f"Run {facts.run}"
    body = [
        f"<h1>{escaped(title)}</h1>",
        _table(_summary(facts)),
        "<h2>Over time</h2>",
        f'<div class="plots">{"".join(_over_time(facts))}</div>',
        "<h2>Answers</h2>",
        f'<div class="plots">{"".join(_answers(facts))}</div>',
        "<h2>What was lost, and what was made twice</h2>",
        _table(_losses(facts)),
        "<h2>Data gate</h2>",
        _gate(facts.gate),
        "<h2>Training</h2>",
        f'<div class="plots">{"".join(_training(facts))}</div>',
    ]
    return document(title, "\n".join(body), STYLE)


def _summary(facts: Facts) -> Iterable[tuple[str, str]]:
    hours = (facts.to_s - facts.from_s) / 3600
    ended = facts.completed + facts.rejections.total()
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(facts.from_s))
    yield "target", facts.target
    yield "time", f"{began}, {hours:,.2f} hours from the first claim to the last commit"
    state = "sealed" if facts.plan.is_sealed else "open"
    yield "plan", f"{facts.plan.num_prompts:,} prompts, {state}"
    yield "prompts", f"{facts.completed:,} completed, {facts.rejections.total():,} rejected"
    yield "rate", f"{ended / max(hours * 3600, 1e-9):,.3f} prompts/s over the run"
    yield "tokens", f"{facts.output_tokens:,} out, {facts.input_tokens:,} in"
    yield "data", f"{facts.data_bytes:,} bytes in {len(facts.done):,} objects"
    at_work = f"{facts.busy.gpu_hours():,.2f} GPU-hours at work of {len(facts.busy.spans)} workers"
    costs = [f"{usd:,.2f} USD as {gpu}" for gpu, usd in facts.cost_usd.items()]
    yield "cost", ", ".join([at_work, *(costs or ["no prices are kept with the run"])])
    if (running := mean_in_flight(facts)) is not None:
        sampled_from = f"from {facts.answers.num_objects:,} data objects"
        yield "in flight", f"{running:,.1f} requests a worker at work on average, {sampled_from}"


def _over_time(facts: Facts) -> Iterable[str]:
    prompts, tokens, workers = rates(facts)
    yield curves("Prompts a minute", {"prompts": prompts}, HOURS)
    yield curves("Output tokens a second", {"tokens": tokens}, HOURS)
    yield curves("Workers that had work", {"workers": workers}, HOURS)
    start_s = facts.from_s
    fill = sampled(facts.events, start_s, "in_flight", over="max_in_flight")
    kv_use = sampled(facts.events, start_s, "kv_use")
    note = f"{fmean(y for _, y in fill):.1%} on average, once a minute" if fill else _no(facts)
    yield curves("Fill of the engines", {"running of the limit": fill, "KV": kv_use}, HOURS, note)
    yield _timeline(facts)


def _timeline(facts: Facts) -> str:
    start_s, to = facts.from_s, max((facts.to_s - facts.from_s) / 3600, 1e-6)
    rows = {
        name: [((a - start_s) / 3600, (b - start_s) / 3600) for a, b in worked]
        for name, worked in facts.busy.spans.items()
    }
    marks: dict[str, list[tuple[float, str]]] = {}
    seen = [event for event in facts.events if event.kind in _MARKED and event.slot]
    for event in seen:
        marks.setdefault(event.slot, []).append(((event.at_s - start_s) / 3600, event.kind))
    counted = ", ".join(f"{_count(seen, kind)} {kind}" for kind in _MARKED)
    note = f"Bars: a batch was held. Dots: {counted}." if facts.has_events else _no(facts)
    return spans("Workers", rows, marks, to, note)


def _count(events: Sequence[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def _no(facts: Facts) -> str:
    return "" if facts.has_events else "Redis could not be asked, which keeps what happened."


def _answers(facts: Facts) -> Iterable[str]:
    answers, note = facts.answers, f"from {facts.answers.num_objects:,} data objects"
    for title, values, unit in (
        ("Answer length, up to so many tokens", answers.output_tokens, ""),
        ("Latency, up to so many seconds", answers.latencies_s, " s"),
        ("Tokens a second of one answer, up to", _paces(facts), ""),
    ):
        told = f"median {median(values):,.1f}, mean {fmean(values):,.1f}, {note}" if values else ""
        yield histogram(title, binned(values, unit), told)
    yield bars("How answers end", answers.finish_reasons, note)
    yield bars("Rejected by reason", facts.rejections, "in all commits")
    lengths = accept_lengths(answers.drafted, facts.from_s)
    told = f"{fmean(y for _, y in lengths):.2f} on average, {note}" if lengths else ""
    yield curves(
        "Accept length in the fleet, tokens a verify step",
        {"accept length": lengths},
        HOURS,
        told or "the engines did not draft",
    )


def _paces(facts: Facts) -> list[float]:
    pairs = zip(facts.answers.output_tokens, facts.answers.latencies_s, strict=True)
    return [tokens / seconds for tokens, seconds in pairs if tokens and seconds > 0]


def _losses(facts: Facts) -> Iterable[tuple[str, str]]:
    again = facts.notes["made_again_tokens"]
    share = again / max(facts.output_tokens + again, 1)
    yield "made again", f"{again:,} tokens ({share:.3%} of all) were generated and thrown away"
    continued = f"{facts.notes['continued']:,} answers, {facts.notes['continued_tokens']:,} tokens"
    yield "gone on with", f"{continued} were taken over from a worker that left or died"
    yield "asked again", f"{facts.notes['asked_again']:,} answers, by the run's policy"
    yield "retried", f"{facts.plan.num_retried:,} prompts were planned again after a rejection"
    unused = f"{facts.num_unused:,} data objects, {facts.unused_bytes:,} bytes"
    yield "unused", f"{unused}, are named by no commit (`gc` removes those that may go)"
    yield "engine deaths", f"{facts.notes['engine_deaths']:,} within batches that were committed"
    refused = f"{facts.plan.num_refused:,} rows, and {facts.plan.num_duplicates:,} duplicates"
    yield "refused", f"{refused}, when they were planned"


def _gate(gate: Json | None) -> str:
    if gate is None:
        return "<p>Not judged.</p>"
    verdict = "may be trained on" if gate["passed"] else "may NOT be trained on"
    head = f'<p class="{"pass" if gate["passed"] else "fail"}">The data {verdict}.</p>'
    rows = "".join(
        f'<tr><td>{escaped(v["rule"])}</td><td class="{escaped(v["outcome"].replace(" ", "-"))}">'
        f"{escaped(v['outcome'])}</td><td>{escaped(v['sentence'])}</td></tr>"
        for v in gate["verdicts"]
    )
    return f"{head}<table><tbody>{rows}</tbody></table>"


def _training(facts: Facts) -> Iterable[str]:
    if not facts.training:
        yield "<p>No trainer has written anything.</p>"
    for name, steps in facts.training.items():
        by_step = {key: curve(steps, key) for key in _STEP_FIGURES}
        note = f"{len(steps):,} steps are told"
        yield curves(f"{name}: loss", {"loss": by_step["loss"]}, "steps", note)
        lengths = {
            "expected": by_step["accept_length"],
            "measured on held-out": by_step["measured_accept_length"],
        }
        yield curves(f"{name}: accept length", lengths, "steps")
        yield curves(f"{name}: tokens a second", {"": by_step["tokens_per_s"]}, "steps")
        yield curves(f"{name}: share of the chips' peak", {"": by_step["mfu"]}, "steps")


_STEP_FIGURES = ("loss", "accept_length", "measured_accept_length", "tokens_per_s", "mfu")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(
        f"<tr><th>{escaped(name)}</th><td>{escaped(text)}</td></tr>" for name, text in rows
    )
    return f"<table><tbody>{lines}</tbody></table>"
