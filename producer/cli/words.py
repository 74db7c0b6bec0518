"""What the producer's verbs have in common: the flags that recur, counts in words, a late bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from dflash_workers.contract.records import Refusal
from dflash_workers.contract.terminal import err, progress_bar

BAR_AFTER_S = 2.0
MAX_LINE_CHARS = 300

RunName = Annotated[str, typer.Option("--run", help="Name of the run; or DFLASH_RUN.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def share(given: str | float) -> float:
    """'2%' or '0.02' as 0.02."""
    text = str(given)  # typer hands the default over as it is
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is no share: write 2% or 0.02")
    return value


def facts(found: Mapping[str, Any], as_json: bool) -> Mapping[str, Any]:
    """Facts as `report` takes them: for people, counts by name become words."""
    if as_json:
        return found
    return {k: in_words(v) if isinstance(v, dict) else v for k, v in found.items()}


def show_refusals(refusals: Sequence[Refusal]) -> None:
    """Some refused rows on stderr, so that a person sees what to mend."""
    for refusal in refusals:
        text = f"{refusal.source}: {refusal.reason}: {refusal.detail}"
        err.print(text[:MAX_LINE_CHARS], markup=False, soft_wrap=True)


def in_words(found: Mapping[str, Any]) -> str:
    """Counts by name, on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items()) or "none"


@contextmanager
def late_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that hears (done, total) and shows up only where it takes over 2 s."""
    bar = progress_bar()
    task = bar.add_task(title, note="")
    started_s = time.monotonic()
    shown = False

    def hear(num_done: int, num_total: int) -> None:
        nonlocal shown
        if not shown and time.monotonic() - started_s > BAR_AFTER_S:
            shown = True
            bar.start()
        bar.update(task, completed=num_done, total=num_total)

    try:
        yield hear
    finally:
        if shown:
            bar.stop()
