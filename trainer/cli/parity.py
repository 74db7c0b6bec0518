"""The verb parity, and the same check as `export` makes it.

fleet.py mounts `app`; drafter.py has its exports checked here. The work is done by parity.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.terminal import ExitCode, err, report
from trainer.cli.words import AsJson, ModelDir, RunName, late

if TYPE_CHECKING:
    from trainer.parity import Parity

app = typer.Typer()

NUM_REPLAYS = 4
MAX_NEW_TOKENS = 24  # of each: a dozen verify steps, seconds on two cores


@app.command()
def parity(
    drafter: Annotated[Path, typer.Argument(help="Folder that `export` wrote.")],
    run: RunName = "",
    model: ModelDir = "",
    num_replays: Annotated[int, typer.Option(min=1, help="Held-out samples.")] = NUM_REPLAYS,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Decoded each.")] = MAX_NEW_TOKENS,
    as_json: AsJson = False,
) -> None:
    """Replay held-out samples through training's forward, decoding's and z-lab's class.

    Exit code 3 where they are apart. Example: dflash-fleet parity ./export --run maths --model
    ./smollm2
    """
    settings = load_settings({"run": run, "model": model})
    found = measure_parity(settings, drafter, num_replays, max_new_tokens)
    report(dataclasses.asdict(found) | {"faults": found.faults}, as_json=as_json)
    if found.faults:
        raise typer.Exit(ExitCode.SOME_REFUSED)


def parity_check(settings: Settings) -> Callable[[Path], Json]:
    """For an export that is about to appear: raises BadInput where parity finds a fault."""

    def check(export: Path) -> Json:
        err.print("parity: replaying held-out samples", markup=False)
        found = measure_parity(settings, export, NUM_REPLAYS, MAX_NEW_TOKENS)
        if found.faults:
            raise BadInput(
                f"this drafter would not draft as it was trained: {'; '.join(found.faults)}; "
                "--unchecked exports it all the same"
            )
        return dataclasses.asdict(found)

    return check


def measure_parity(
    settings: Settings, export: Path, num_replays: int, max_new_tokens: int
) -> Parity:
    """On some of a run's held-out samples, with the whole target in fp32."""
    torch, module = late("torch"), late("trainer.parity")
    heldout = late("trainer.heldout").read_heldout(settings, num_replays)
    exports, targets = late("trainer.drafter.export"), late("trainer.online.target")
    config = exports.lint(export)
    exports.check_target(config, targets.target_config(settings.model).get_text_config())
    target = targets.load_target(
        settings.model,
        config.target_layer_ids,
        dtype=torch.float32,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )
    found: Parity = module.check_parity(
        export,
        target,
        [module.Replay(s.ids.tolist(), s.prompt_len) for s in heldout.samples],
        late("trainer.drafter.speculate").Limits(max_new_tokens, heldout.stop_ids),
    )
    return found
