"""What `evaluate` is told beside its run and drafter, and what it found, as tables for people.

Used by drafter.py; with --json the same facts are one object instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.contract.terminal import out
from trainer.cli.words import late

if TYPE_CHECKING:
    from trainer.acceptance import Mean
    from trainer.evaluate import Evaluation

PROMPTS_AT_ONCE = 8  # several times as fast as one after another on a CPU
SOURCE_CHARS = 40  # the end of a long path tells more than its beginning


@dataclass(frozen=True, slots=True)
class DecodingTerms:
    """What of `evaluate` has a default."""

    temperature: float = 0.0
    at_once: int = PROMPTS_AT_ONCE
    began_with: Path | None = None


def beginning_of(provenance: Json, published: Path | None) -> Any:
    """What a drafter was before it was trained: a Start, or a published Drafter."""
    named = provenance.get("start_from")
    if named and published is None:
        raise BadInput(f"this drafter's training began with {named!r}: say where it lies, --from")
    if published:
        config, tensors = late("trainer.drafter.published").read_published(published)
        began = late("trainer.drafter.model").Drafter(config)
        began.load_state_dict(tensors)
        return began
    recipe = provenance.get("recipe", {})
    return late("trainer.drafter.start").Start(
        seed=recipe.get("seed", 0),
        copies_target=recipe.get("drafter", {}).get("copy_target_layers", False),
    )


def print_evaluation(found: Evaluation) -> None:
    """On stdout."""
    out.print(_table(found))
    for line in _sentences(found):
        out.print(line, markup=False, soft_wrap=True)


def _table(found: Evaluation) -> Table:
    table = Table(title="tokens per verify step, 95 % intervals over prompts")
    for title in ("of", "mean", "from", "to", "prompts"):
        table.add_column(title, justify="left" if title == "of" else "right")
    measured = found.acceptance
    _add(table, "all", measured.overall)
    table.add_row("untrained", f"{found.accept_length_untrained:.3f}")
    gain = (found.gain, found.gain_low, found.gain_high)
    table.add_row("gain", *(f"{value:.3f}" for value in gain))
    for name, groups in (
        ("source", measured.by_source),
        ("turn", measured.by_turn),
        ("part", measured.by_part),
    ):
        table.add_section()
        for key, mean in groups.items():
            _add(table, f"{name} {_end_of(key)}", mean)
    table.add_section()
    for place, mean in measured.by_place.items():
        _add(table, f"share of steps, {place} drafts", mean)
    return table


def _add(table: Table, name: str, mean: Mean) -> None:
    figures = (f"{value:.3f}" for value in (mean.mean, mean.low, mean.high))
    table.add_row(Text(name), *figures, str(mean.num_prompts))  # a path may look like markup


def _sentences(found: Evaluation) -> list[str]:
    lines = [
        f"{found.num_prompts} prompts judged, {found.num_loops} left out because they loop; "
        f"{found.num_ties} replies parted at a tie, {found.num_faults} elsewhere "
        f"({found.seconds:.0f} s)"
    ]
    speed = found.speed
    if speed is None:
        lines.append("no speed: this target computes each sequence anew at each step")
    else:
        lines.append(
            f"{speed.tokens_per_s:.1f} tokens/s with the drafter, {speed.plain_tokens_per_s:.1f} "
            f"without: {speed.speedup:.2f}x, {speed.prompts_at_once} prompts at once"
        )
    return lines


def _end_of(source: str) -> str:
    return source if len(source) <= SOURCE_CHARS else f"…{source[1 - SOURCE_CHARS :]}"
