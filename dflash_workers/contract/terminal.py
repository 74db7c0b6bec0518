"""How every verb speaks: reports on stdout, people's text and progress on stderr, exit codes.

With --json a verb prints one object with stable keys on stdout and nothing else there. Colour and
bars appear only on a terminal (rich sees to that).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.printable import printable


class PlainConsole(Console):
    """Escapes control characters in the texts that it is given: names and ids are others'."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does."""
        super().print(*(printable(o) if isinstance(o, str) else o for o in objects), **options)


out = PlainConsole(highlight=False)
err = PlainConsole(stderr=True, highlight=False)


class ExitCode(IntEnum):
    """What a verb's exit status means."""

    DONE = 0
    COULD_NOT = 1
    WRONG_USAGE = 2
    SOME_REFUSED = 3
    INTERRUPTED = 130


def report(facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a verb's result: one JSON object, or one line per fact."""
    try:
        if as_json:
            sys.stdout.write(orjson.dumps(dict(facts)).decode() + "\n")
        else:
            _print_lines(facts)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # typer ends quietly where nobody reads on
    except OSError as error:
        raise NotEnough(f"the result could not be written to stdout: {error.strerror}") from error


def _print_lines(facts: Mapping[str, Any]) -> None:
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        out.print(f"{name.replace('_', ' '):<{width}}  {value}", markup=False, soft_wrap=True)


def progress_bar() -> Progress:
    """A bar on stderr for anything that takes over two seconds. Where the line is short, its note
    is cut: how far it is stays to be read."""
    whole = partial(Column, no_wrap=True)
    note = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        TextColumn("{task.description}", table_column=whole()),
        BarColumn(bar_width=20, table_column=whole()),
        MofNCompleteColumn(table_column=whole()),
        TimeElapsedColumn(table_column=whole()),
        TextColumn("{task.fields[note]}", table_column=note),
        console=err,
        expand=True,
    )
