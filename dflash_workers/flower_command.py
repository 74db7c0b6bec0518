"""How Flower is started: on loopback, behind a password, with bounded memory that outlives it.

Called by cli, which becomes this command. Flower shows what Celery's events say and is never the
source of a count: events are lost whenever nobody listens. Workers are named by slot, so that one
that comes back on another host is the same worker; one that stays away is dropped after an hour.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings

MAX_TASKS = 10_000  # Flower's own limit of 100,000 takes it gigabytes
FORGET_WORKERS_S = 3600
_SAVE_EVERY_MS = 60_000
_COLUMNS = "uuid,state,result,worker,received,started,runtime,name"


def flower_command(
    settings: Settings, port: int, state: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Arguments and what to add to the environment, where secrets are. Raises BadInput.

    `state`: a folder for what Flower remembers; by default this person's own.
    """
    user, _, password = settings.flower_login.partition(":")
    if not user or not password:
        raise BadInput("Flower wants a login: set DFLASH_FLOWER_LOGIN to user:password")
    folder = state or Path(typer.get_app_dir("dflash-fleet")) / "flower"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # Flower unpickles what it finds there
    except OSError as error:
        raise BadInput(f"--state {folder}: {error.strerror}") from error
    options = [
        "--address=127.0.0.1",
        f"--port={port}",
        f"--max-tasks={MAX_TASKS}",
        f"--purge-offline-workers={FORGET_WORKERS_S}",
        "--persistent=True",
        f"--db={folder / 'state'}",
        f"--state-save-interval={_SAVE_EVERY_MS}",
        f"--tasks-columns={_COLUMNS}",
        "--read-only=True",  # workers take no remote control
    ]
    command = [sys.executable, "-m", "celery", "--config=celeryconfig", "flower", *options]
    secrets = {"BROKER_URL": settings.broker_url, "FLOWER_BASIC_AUTH": settings.flower_login}
    return command, secrets
