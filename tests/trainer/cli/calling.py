"""A verb, called as the command calls it."""

from __future__ import annotations

import orjson
from typer.testing import CliRunner

from dflash_workers.contract.records import Json
from fleet import app


def call(*arguments: str, exit_code: int = 0) -> Json:
    """The facts of a verb that reports in JSON."""
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    facts: Json = orjson.loads(result.stdout)
    return facts
