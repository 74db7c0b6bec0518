"""What an engine was told against what it says it does: no setting is overridden in silence.

Reads /server_info of a ready engine, told by -> lane; each Difference names both values. Only
flags that were asked for are compared, because defaults are the engine's own business, and `auto`
asks for nothing. Invariant: a server on our port that serves another model is never taken for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_workers.contract.errors import EngineFailed
from dflash_workers.contract.records import Json

# Flags whose setting has another name than the flag; the first that /server_info knows counts.
_SETTINGS_OF = {
    "cuda_graph_max_bs": ("cuda_graph_max_bs", "cuda_graph_max_bs_decode"),
    "mamba_scheduler_strategy": ("mamba_scheduler_strategy", "mamba_radix_cache_strategy"),
    "tp": ("tp_size",),
    "tensor_parallel_size": ("tp_size",),
    "dp": ("dp_size",),
}
_LIMIT = "max_running_requests"
_LIMIT_IN_FORCE = "effective_max_running_requests_per_dp"  # what memory left of it


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not what was asked for."""

    flag: str
    asked: str
    found: str

    def __str__(self) -> str:
        return f"{self.flag} was asked to be {self.asked} and is {self.found}"


def check_model(info: Json, model_dir: Path) -> None:
    """Raise EngineFailed where the server that answers serves another model."""
    served = str(info.get("model_path", ""))
    if served and Path(served).resolve() != model_dir.resolve():
        raise EngineFailed(
            f"another server answers on the engine's port: it serves {served}, not {model_dir}"
        )


def find_differences(argv: Sequence[str], info: Json) -> list[Difference]:
    """Of everything that was asked for in the command line, what /server_info tells otherwise."""
    settings = _settings_in_force(info)
    differences = []
    for flag, asked in _asked(argv).items():
        name = flag.removeprefix("--").replace("-", "_")
        known = [n for n in _SETTINGS_OF.get(name, (name,)) if n in settings]
        found = settings[known[0]] if known else None
        if known and not _is_same(asked, found):
            differences.append(Difference(flag, _shown(asked), _shown(found)))
        elif not known:
            differences.append(Difference(flag, _shown(asked), "not told by /server_info"))
        limit = settings.get(_LIMIT_IN_FORCE) if name == _LIMIT else None
        if limit is not None and int(limit) < int(asked[-1]):
            differences.append(Difference(flag, _shown(asked), f"{limit}, for want of memory"))
    return differences


def _settings_in_force(info: Json) -> Json:
    """As of now: the schedulers' own come last and win."""
    settings = dict(info)
    for state in info.get("internal_states") or []:
        if isinstance(state, dict):
            settings |= {k: v for k, v in state.items() if v is not None}
    return settings


def _asked(argv: Sequence[str]) -> dict[str, list[str]]:
    """Values by flag; a flag that comes again replaces what it said before."""
    asked: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            asked[flag] = [value] if has_value else []
        elif flag:
            asked[flag].append(word)
    return asked


def _is_same(asked: list[str], found: Any) -> bool:
    if asked == ["auto"]:
        return True
    if not asked:
        return found is True
    if isinstance(found, list):
        return asked == [str(value) for value in found]
    return len(asked) == 1 and _plain(asked[0]) == _plain(found)


def _plain(value: Any) -> str | float:
    """10, 10.0 and "10" are one; so are names in any case."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value).lower()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "set"
    return str(value)
