"""The `dflash-fleet` command: finds the verb in one of the three packages, nothing else.

Each package's cli owns its verbs; this file owns what they share: `--debug`, and the turn of an
error into one clear line and an exit code. It is the outermost frame of every verb. Owners are
loaded one after the other until one has the verb, so that a worker, which a supervisor may start
often, waits for no other package's libraries.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import sys
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
    from typer.main import get_group

    from dflash_workers.contract.errors import BadUsage, FleetError
    from dflash_workers.contract.terminal import ExitCode, err
except KeyboardInterrupt:  # they take a moment, in which people change their minds
    sys.exit(130)

# Whose verbs they are, in the order in which they are tried.
OWNERS = (
    "dflash_workers.cli_watch",
    "dflash_workers.cli_exporter",
    "dflash_workers.cli",
    "dflash_workers.cli_bench",
    "dflash_workers.cli_node",
    "dflash_workers.cli_promote",
    "producer.cli.enqueue",
    "producer.cli.runs",
    "producer.cli.fates",
    "trainer.cli.tokens",
    "trainer.cli.gate",
    "trainer.cli.report",
    "trainer.cli.drafter",
    "trainer.cli.parity",
    "demo",
)
GROUPS = {"dflash_workers.cli_node": "node"}  # verbs of two words, and the first one


class Verbs(TyperGroup):
    """All owners' verbs."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = (verbs_of(owner).get_command(ctx, cmd_name) for owner in OWNERS)
        return next(filter(None, found), None)

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for owner in OWNERS for name in verbs_of(owner).list_commands(ctx)]


@functools.cache
def verbs_of(owner: str) -> TyperGroup:
    """Loads the owner."""
    verbs, mounted = typer.Typer(rich_markup_mode=None), importlib.import_module(owner).app
    if owner in GROUPS:
        verbs.add_typer(mounted, name=GROUPS[owner])
    else:
        verbs.registered_commands += mounted.registered_commands
    return get_group(verbs)


app = typer.Typer(
    cls=Verbs,
    name="dflash-fleet",
    help="Make training data for speculative-decoding drafters with a fleet, and train them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(importlib.metadata.version("dflash-fleet"))
        raise typer.Exit


@app.callback()
def settings_of_all_verbs(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Make training data for speculative-decoding drafters with a fleet, and train them."""
    if debug:
        os.environ["DFLASH_DEBUG"] = "1"


def main() -> None:
    """Run one verb; exit 0, 1, 2, 3 or 130."""
    # Read when torch is loaded. Threads that spin while they wait starve each other as soon as a
    # machine's cores are shared: one other busy process made decoding five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except BadUsage as error:
        err.print(f"dflash-fleet: {error}", markup=False, soft_wrap=True)
        sys.exit(ExitCode.WRONG_USAGE)
    except FleetError as error:
        if os.environ.get("DFLASH_DEBUG", "0") != "0":
            raise
        err.print(f"dflash-fleet: {error}", markup=False, soft_wrap=True)
        sys.exit(ExitCode.COULD_NOT)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
