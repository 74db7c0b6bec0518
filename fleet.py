"""The `dflash-fleet` command: mounts the verbs of the three packages, nothing else.

Each package's cli.py owns its verbs; this file owns what they share: `--debug`, and the turn of
an error into one clear line and an exit code. It is the outermost frame of every verb.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated

try:
    import typer

    import demo
    import dflash_workers.cli
    import producer.cli.enqueue
    import producer.cli.fates
    import producer.cli.runs
    import trainer.cli
    from dflash_workers.contract.errors import FleetError
    from dflash_workers.contract.terminal import ExitCode, err
except KeyboardInterrupt:  # they take a second or two, in which people change their minds
    sys.exit(130)

app = typer.Typer(
    name="dflash-fleet",
    help="Make training data for speculative-decoding drafters with a fleet, and train them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verbs in (
    producer.cli.enqueue,
    producer.cli.runs,
    producer.cli.fates,
    dflash_workers.cli,
    trainer.cli,
    demo,
):
    app.registered_commands += verbs.app.registered_commands


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
    except FleetError as error:
        if os.environ.get("DFLASH_DEBUG", "0") != "0":
            raise
        err.print(f"dflash-fleet: {error}", markup=False, soft_wrap=True)
        sys.exit(ExitCode.COULD_NOT)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
