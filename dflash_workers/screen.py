"""A run on one screen: what `dflash-fleet status` shows to people.

Drawn from what status.py read, and from nothing else. Colour says only what words say as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_workers.contract.records import Json

_STATE_STYLES = {"up": "green", "draining": "yellow", "paused": "bold red"}
_NUM_REASONS = 6
_NUM_WORKERS = 40  # that a screen has room for
_LINE_CHARS = 160


def screen_of(status: Json) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_headline(status), _bar(status), _facts(status)]
    if status["workers"]:
        parts.append(_workers(status["workers"]))
    parts += [Text(line, style="red") for line in _errors(status["errors"])]
    return Group(*parts)


def _headline(status: Json) -> Text:
    plan = "sealed" if status["sealed"] else "open"
    text = Text.assemble((status["run"], "bold"), f"  {status['status']}, plan {plan}")
    return text.append(f"  {time.strftime('%H:%M:%S')}", style="dim")


def _bar(status: Json) -> RenderableType:
    ended, total = status["completed"] + status["failed"], status["total"]
    share = f"{ended / total:.1%}" if total else "nothing planned"
    line = Table.grid(padding=(0, 2))
    line.add_row(
        ProgressBar(total=max(total, 1), completed=ended, width=40),
        f"{status['completed']:,} completed, {status['failed']:,} rejected of {total:,}",
        share,
    )
    return line


def _facts(status: Json) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    table.add_column()
    for name, value in (
        ("rate", _rate(status)),
        ("left", _left(status)),
        ("cost", _cost(status)),
        ("tokens", _tokens(status)),
        ("rejected", _reasons(status["rejections"])),
        ("queue", _queue(status)),
        ("shards", _shards(status)),
        ("trainers", _trainers(status["trainers"])),
    ):
        if value:
            table.add_row(name, Text(value, overflow="fold"))
    return table


def _rate(status: Json) -> str:
    now, mean = status["rate_per_sec"], status["mean_rate_per_sec"]
    return f"{now:.2f} prompts/s now, {mean:.2f} over the run"


def _left(status: Json) -> str:
    if status["status"] in ("done", "waiting", "cancelled"):
        took = _duration(status["elapsed_hours"])
        return f"{status['status']}, {took} from the first claim on"
    low, likely, high = (status[f"eta{end}_hours"] for end in ("_low", "", "_high"))
    if likely is None:
        return "no end in sight: nothing has ended lately, or the run is paused"
    most = "open" if high is None else _duration(high)
    so_far = _duration(status["elapsed_hours"])
    return f"{_duration(likely)} ({_duration(low)} to {most}), {so_far} so far"


def _cost(status: Json) -> str:
    hours = f"{status['gpu_hours']:,.2f} GPU-hours at work"
    costs = [f"{usd:,.2f} USD as {gpu}" for gpu, usd in status["cost_usd"].items()]
    return ", ".join([hours, *costs]) if costs else f"{hours} (no prices: `estimate --gpu`)"


def _tokens(status: Json) -> str:
    made = f"{status['total_output_tokens']:,} out, {status['total_input_tokens']:,} in"
    again = status["made_again_tokens"]
    mean = f"{status['avg_output_tokens']:,.0f} out a prompt"
    return f"{made}, {mean}" + (f", {again:,} made again" if again else "")


def _reasons(rejections: dict[str, int]) -> str:
    shown = [f"{count:,} {reason}" for reason, count in rejections.items()]
    more = len(shown) - _NUM_REASONS
    return ", ".join(shown[:_NUM_REASONS]) + (f", {more} reasons more" if more > 0 else "")


def _queue(status: Json) -> str:
    return (
        f"{status['num_queued']:,} hints, {status['num_pending']:,} batches wait, "
        f"{status['num_inflight']:,} held, {status['num_noted']:,} prompts of these noted"
    )


def _shards(status: Json) -> str:
    behind, quarantined = status["num_untokenized"], status["num_quarantined"]
    made = status["s3_uploaded"] - behind - quarantined
    up = "" if status["tokenizer_up"] else ", no tokenizer is up"
    return f"{made:,} made, {behind:,} commits behind, {quarantined:,} in quarantine{up}"


def _trainers(trainers: Sequence[Json]) -> str:
    return ", ".join(f"{lag['name']}: {_place(lag)}" for lag in trainers)


def _place(lag: Json) -> str:
    steps = f"step {lag['step']:,} of {lag['num_steps']:,}"
    if lag["is_finished"]:
        return f"finished, {steps}"
    behind = f"{lag['num_behind']:,} shards behind"
    return f"{behind}, {steps} kept" if lag["num_steps"] else behind


def _workers(workers: Sequence[Json]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker")
    table.add_column("state", overflow="fold")
    for head in ("batches", "in flight", "tokens/s", "KV", "accepted"):
        table.add_column(head, justify="right")
    for worker in workers[:_NUM_WORKERS]:
        state = str(worker.get("state", "?"))
        style = _STATE_STYLES.get(state.partition(":")[0], "")
        table.add_row(
            worker["slot"],
            Text(state[:_LINE_CHARS], style=style),
            _number(worker.get("batches")),
            _number(worker.get("in_flight")),
            _number(worker.get("tokens_per_s")),
            _number(worker.get("kv_use"), ".0%"),
            _number(worker.get("accept_length"), ".2f"),
        )
    if len(workers) > _NUM_WORKERS:
        table.add_row(f"{len(workers) - _NUM_WORKERS} more", "")
    return table


def _errors(errors: Sequence[Json]) -> list[str]:
    return [
        f"{time.strftime('%H:%M:%S', time.localtime(error['at']))} {_one_line(error['what'])}"
        for error in errors
    ]


def _one_line(text: str) -> str:
    """Of text that anybody may have written: no control characters, no second line."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return shown[:_LINE_CHARS]


def _number(value: Any, form: str = ",.0f") -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _duration(hours: float) -> str:
    minutes = round(hours * 60)
    if minutes < 1:
        return f"{hours * 3600:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"
