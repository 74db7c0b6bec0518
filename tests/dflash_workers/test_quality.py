"""What is said of an answer at the source, and what a run's policies make of it."""

from __future__ import annotations

import pytest

from dflash_workers.contract.answers import ParsedAnswer, parse_answer
from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.flags import MAX_CALLS, STUCK_IDS
from dflash_workers.quality import Reading, check_kept, flags_of, is_retry_due, loop_in

CALL_ID = 50


def read(text: str) -> Reading:
    parsed = parse_answer(text)
    return Reading(parsed, text, parsed.content)


@pytest.mark.parametrize(
    ("text", "finish_reason", "flags"),
    [
        ("fine", "stop", []),
        ("fine", "stop_string", []),
        ("cut", "length", ["truncated"]),
        ("", "stop", ["empty"]),
        ("<think>only</think>", "stop", ["empty"]),
        ("<think>well", "length", ["truncated", "empty", "unfinished_thinking"]),
        ('<tool_call>{"name": "f"}</tool_call>', "stop", []),
        ("<tool_call>{</tool_call>", "stop", ["stray_marker"]),
        ("<think>a <tool_call> comes</think>fine", "stop", []),
        ("fine</think>", "stop", ["stray_marker"]),
        ("a\x00b", "stop", ["garbled"]),
        ("<think>\ufffd\ufffd a</think>fine", "stop", ["garbled"]),
    ],
)
def test_what_is_wrong_has_a_name(text: str, finish_reason: str, flags: list[str]) -> None:
    assert flags_of([1, 2, 3], finish_reason, read(text), CALL_ID) == flags


def test_special_tokens_inside_content_are_stray_though_no_text_shows_them() -> None:
    reading = Reading(ParsedAnswer("fine", "", []), "fine", "fine<|im_start|>user")

    assert flags_of([1, 2, 3], "stop", reading, CALL_ID) == ["stray_marker"]


def test_loops_are_told_by_ids() -> None:
    assert flags_of([7] * 10, "stop", read("fine"), CALL_ID) == ["repetition"]
    calls = [i for n in range(MAX_CALLS + 1) for i in (CALL_ID, 100 + n)]
    assert flags_of(calls, "stop", read("fine"), CALL_ID) == ["tool_call_loop"]


def test_an_answer_is_stopped_only_for_a_loop_that_will_not_end() -> None:
    assert loop_in(list(range(3000)), CALL_ID) == ""
    assert loop_in([7] * (STUCK_IDS - 1), CALL_ID) == ""
    assert loop_in([7] * STUCK_IDS, CALL_ID) == "repetition"
    calls = [i for n in range(MAX_CALLS + 1) for i in (CALL_ID, 100 + n)]
    assert loop_in(calls, CALL_ID) == "tool_call_loop"


@pytest.mark.parametrize(
    ("flags", "policies", "is_due", "reason"),
    [
        (["truncated"], {}, False, None),
        (["truncated"], {"truncated": "keep"}, False, None),
        (["truncated"], {"repetition": "reject"}, False, None),
        (["truncated", "repetition"], {"repetition": "reject"}, False, "repetition"),
        (["repetition"], {"repetition": "retry-once"}, True, None),
        (
            ["truncated", "repetition"],
            {"repetition": "retry-once", "truncated": "reject"},
            False,
            "truncated",
        ),
        ([], {"repetition": "reject"}, False, None),
    ],
)
def test_a_policy_decides_what_becomes_of_a_flagged_answer(
    flags: list[str], policies: dict[str, str], is_due: bool, reason: str | None
) -> None:
    assert is_retry_due(flags, policies) is is_due
    if reason is None:
        check_kept(flags, policies)
    else:
        with pytest.raises(PromptRejected) as refused:
            check_kept(flags, policies)
        assert refused.value.reason == reason
