"""Which recorded result answers which call."""

from __future__ import annotations

from typing import Any

from dflash_workers.tool_results import splice_results


def calling(*names_and_arguments: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(names_and_arguments)
    ]


def recorded(name: str, content: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "content": content, **more}


ROME = recorded("weather", "rain", arguments={"city": "Rome"})
PARIS = recorded("weather", "sun", arguments={"city": "Paris"})


def test_each_call_gets_the_result_of_its_tool_in_the_order_of_the_calls() -> None:
    calls = calling(("now", {}), ("weather", {"city": "Rome"}))

    spliced = splice_results(calls, [ROME, recorded("now", "noon")])

    assert spliced is not None
    assert spliced.messages == [
        {"role": "tool", "tool_call_id": "call0", "name": "now", "content": "noon"},
        {"role": "tool", "tool_call_id": "call1", "name": "weather", "content": "rain"},
    ]
    assert (spliced.left, spliced.args_differ) == ([], False)


def test_the_result_for_the_same_arguments_is_preferred() -> None:
    spliced = splice_results(calling(("weather", {"city": "Paris"})), [ROME, PARIS])

    assert spliced is not None
    assert [m["content"] for m in spliced.messages] == ["sun"]
    assert (spliced.left, spliced.args_differ) == ([ROME], False)


def test_a_result_for_other_arguments_is_used_and_told() -> None:
    spliced = splice_results(calling(("weather", {"city": "Oslo"})), [ROME, PARIS])

    assert spliced is not None
    assert [m["content"] for m in spliced.messages] == ["rain"]
    assert spliced.args_differ


def test_arguments_that_were_not_recorded_do_not_differ() -> None:
    spliced = splice_results(calling(("now", {"zone": "UTC"})), [recorded("now", "noon")])

    assert spliced is not None and not spliced.args_differ


def test_arguments_in_another_order_are_the_same() -> None:
    result = recorded("f", "x", arguments={"a": 1, "b": [2]})

    spliced = splice_results(calling(("f", {"b": [2], "a": 1})), [result])

    assert spliced is not None and not spliced.args_differ


def test_a_result_answers_one_call_only() -> None:
    twice = calling(("weather", {"city": "Rome"}), ("weather", {"city": "Rome"}))

    assert splice_results(twice, [ROME]) is None
    assert splice_results(twice, [ROME, ROME]) is not None


def test_a_result_that_nobody_called_for_is_left() -> None:
    spliced = splice_results(calling(("now", {})), [PARIS, recorded("now", "noon"), ROME])

    assert spliced is not None
    assert spliced.left == [PARIS, ROME]


def test_one_call_without_a_result_leaves_the_whole_round_unanswered() -> None:
    calls = calling(("weather", {"city": "Rome"}), ("nobody", {}))

    assert splice_results(calls, [ROME]) is None
