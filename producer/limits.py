"""What the run's target can be asked: a prompt beyond it is refused before it costs a GPU anything.

Called by candidates.py for each normal form. The values come from the run (sampling, control-token
policy) and from what its template was seen to render; a refusal names the flag that would help.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import orjson

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json, Turn

MAX_TEMPERATURE = 2.0

# (turns, tools, overrides) -> why the prompt and its answer don't fit the context; None: they do.
TooLong = Callable[[list[Turn], list[Json], Json], str | None]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the run's template renders of a conversation."""

    tools: bool = True
    tool_results: bool = True
    system: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt may ask for."""

    max_new_tokens: int = 0  # the run's, which a row may lower; 0: any
    control_tokens: tuple[str, ...] = ()  # of the target
    control_policy: str = "escape"  # only "reject" refuses; else workers see to them
    abilities: Abilities = Abilities()
    too_long: TooLong | None = None  # None: not looked at


class Gate:
    """Limits, made ready to look at a million prompts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._too_long = limits.too_long
        self._renders_all = limits.abilities == Abilities()
        self._control = None
        if limits.control_policy == "reject":
            self._control = _control_pattern(limits.control_tokens)

    def check(self, turns: list[Turn], tools: list[Json], overrides: Json) -> None:
        """Raise PromptRejected for the first thing that the target can't be asked."""
        if overrides:
            _check_overrides(overrides, self._limits.max_new_tokens)
        if not self._renders_all:
            _check_rendered(turns, tools, self._limits.abilities)
        if self._too_long and (detail := self._too_long(turns, tools, overrides)):
            raise PromptRejected("context_length", detail)

    def check_text(self, content: bytes) -> None:
        """Raise PromptRejected where a prompt's JSON holds a control token that isn't allowed."""
        if self._control and (match := self._control.search(content)):
            raise PromptRejected("control_token", f"the text holds {match[0].decode()}")


def _check_overrides(overrides: Json, max_new_tokens: int) -> None:
    temperature, top_p = overrides.get("temperature", 0), overrides.get("top_p", 1)
    top_k, new_tokens = overrides.get("top_k", -1), overrides.get("max_new_tokens", 1)
    bounds = {
        f"temperature {temperature} (0 to {MAX_TEMPERATURE:g})": (
            0 <= temperature <= MAX_TEMPERATURE
        ),
        f"top_p {top_p} (over 0, up to 1)": 0 < top_p <= 1,
        f"top_k {top_k} (1 or more, or -1)": top_k == -1 or top_k >= 1,
        f"max_new_tokens {new_tokens} (1 to the run's {max_new_tokens or 'any'})": (
            new_tokens >= 1 and (not max_new_tokens or new_tokens <= max_new_tokens)
        ),
    }
    for name, holds in bounds.items():
        if not holds:
            raise PromptRejected("sampling_out_of_bounds", name)


def _check_rendered(turns: list[Turn], tools: list[Json], abilities: Abilities) -> None:
    has_system = any(m["role"] == "system" for turn in turns for m in turn.messages)
    for name, is_needed, is_rendered in (
        ("tools", bool(tools), abilities.tools),
        ("tool_results", any(turn.tool_results for turn in turns), abilities.tool_results),
        ("system", has_system, abilities.system),
    ):
        if is_needed and not is_rendered:
            raise PromptRejected(
                f"template_ignores_{name}",
                f"the chat template leaves out {name.replace('_', ' ')}: pass --chat-template FILE",
            )


def _control_pattern(tokens: Iterable[str]) -> re.Pattern[bytes] | None:
    """Finds any of the tokens within a string of a JSON text."""
    # Escaped like the text itself; the longest first, so that the message names it whole.
    inside = {orjson.dumps(token)[1:-1] for token in tokens if token}
    pattern = b"|".join(re.escape(token) for token in sorted(inside, key=len, reverse=True))
    return re.compile(pattern) if pattern else None
