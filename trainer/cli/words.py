"""What the trainer's verbs have in common: the flags that recur, and modules loaded late.

The verbs' modules are imported by every verb of the command and its --help. What they work with
imports torch, transformers or pyarrow, which take seconds: so it is loaded by `late`, when a verb
runs, and by nothing else.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

RunName = Annotated[str, typer.Option("--run", help="Name of the run; else DFLASH_RUN.")]
ModelDir = Annotated[str, typer.Option("--model", help="Folder of the target; else DFLASH_MODEL.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def late(module: str) -> Any:
    """A module of ours that is slow to import."""
    return importlib.import_module(module)
