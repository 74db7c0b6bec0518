from __future__ import annotations

from typing import Any

import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json, Turn
from producer.limits import Abilities, Gate, Limits

USER = {"role": "user", "content": "a"}
PLAIN = [Turn([USER])]
TOOLS: list[Json] = [{"type": "function", "function": {"name": "now"}}]


def reason(limits: Limits, *asked: Any) -> str:
    turns, tools, overrides = (*asked, *(PLAIN, [], {})[len(asked) :])
    with pytest.raises(PromptRejected) as rejected:
        Gate(limits).check(turns, tools, overrides)
    return rejected.value.reason


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("temperature", [0.0, 2.0], [-0.1, 2.1]),
        ("top_p", [0.01, 1.0], [0.0, 1.1]),
        ("top_k", [-1, 1, 10**6], [0, -2]),
        ("max_new_tokens", [1, 64], [0, 65]),
    ],
)
def test_a_row_may_ask_for_other_sampling_within_bounds(
    name: str, inside: list[float], outside: list[float]
) -> None:
    limits = Limits(max_new_tokens=64)

    for value in inside:
        Gate(limits).check(PLAIN, [], {name: value})
    for value in outside:
        assert reason(limits, PLAIN, [], {name: value}) == "sampling_out_of_bounds"


def test_what_the_template_leaves_out_may_not_be_asked_for() -> None:
    with_result = [Turn([USER], [{"name": "now", "content": "12:00"}])]
    with_system = [Turn([{"role": "system", "content": "Be brief."}, USER])]

    assert (
        reason(Limits(abilities=Abilities(tools=False)), PLAIN, TOOLS) == "template_ignores_tools"
    )
    no_results = Limits(abilities=Abilities(tool_results=False))
    assert reason(no_results, with_result) == "template_ignores_tool_results"
    no_system = Limits(abilities=Abilities(system=False))
    assert reason(no_system, with_system) == "template_ignores_system"
    for blind in (Limits(abilities=Abilities(False, False, False)), no_results, no_system):
        Gate(blind).check(PLAIN, [], {})


def test_a_prompt_that_leaves_no_room_is_refused_as_workers_would() -> None:
    def too_long(turns: list[Turn], tools: list[Json], overrides: Json) -> str | None:
        return "too long" if overrides.get("max_new_tokens") == 9 else None

    limits = Limits(too_long=too_long)

    Gate(limits).check(PLAIN, [], {})
    assert reason(limits, PLAIN, [], {"max_new_tokens": 9}) == "context_length"


@pytest.mark.parametrize("policy", ["escape", "keep"])
def test_control_tokens_pass_where_workers_see_to_them(policy: str) -> None:
    gate = Gate(Limits(control_tokens=("<|im_end|>",), control_policy=policy))

    gate.check_text(b'"<|im_end|>"')


def test_a_control_token_is_named_whole_where_none_is_allowed() -> None:
    tokens = ('<"x">', "<|im", "<|im_end|>", "")
    gate = Gate(Limits(control_tokens=tokens, control_policy="reject"))

    gate.check_text(b'"<|i m_end|> <x>"')
    for text, named in ((rb'"a<\"x\">b"', r"<\\\"x\\\">"), (b'"<|im_end|>"', r"<\|im_end\|>")):
        with pytest.raises(PromptRejected, match=named) as rejected:
            gate.check_text(text)
        assert rejected.value.reason == "control_token"
