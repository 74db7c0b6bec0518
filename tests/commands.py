"""Whether a command line of a document, an image or a unit is one that `dflash-fleet` takes.

The judge is the command itself: words are parsed by the very commands that fleet.py mounts, and
nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from fleet import app


def check_command(words: Sequence[str]) -> str:
    """Parse what follows `dflash-fleet`; the verb's name, of two words where it has two.

    AssertionError for a verb that there isn't, a click error for a flag or a value that it refuses.
    """
    group: Any = get_command(app)
    name, *rest = words
    command = group.get_command(None, name)
    assert command is not None, f"there is no verb {name!r}"
    if hasattr(command, "commands"):  # flags without a second word are those of `start`
        second = "start" if not rest or rest[0].startswith("-") else rest.pop(0)
        command = command.commands.get(second)
        name = f"{name} {second}"
        assert command is not None, f"there is no verb {name!r}"
    if rest and "--help" not in rest:  # a verb alone is spoken of, not called
        command.make_context(name, list(rest))
    return name
