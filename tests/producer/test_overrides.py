from __future__ import annotations

import math

import pytest

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import OVERRIDABLE, Json
from producer.overrides import NAMES, read_overrides


def test_values_get_the_names_and_types_of_the_run() -> None:
    asked = {"temperature": 1, "top_p": 0.9, "top_k": 20.0, "max_tokens": 100}

    overrides = read_overrides(asked)

    assert overrides == {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "max_new_tokens": 100}
    assert isinstance(overrides["temperature"], float)
    assert isinstance(overrides["top_k"], int)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
def test_the_limit_has_three_names(name: str) -> None:
    assert read_overrides({name: 5}) == {"max_new_tokens": 5}


def test_whatever_can_be_asked_for_can_be_overridden() -> None:
    assert set(NAMES.values()) == set(OVERRIDABLE)


@pytest.mark.parametrize("value", [None, "", " ", {}, "{}", "null", {"top_p": None}])
def test_nothing_asks_for_nothing(value: object) -> None:
    assert read_overrides(value) == {}


def test_json_text_is_read() -> None:
    assert read_overrides('{"temperature": 0.2}') == {"temperature": 0.2}


def test_two_names_may_say_the_same() -> None:
    assert read_overrides({"max_tokens": 5, "max_new_tokens": 5}) == {"max_new_tokens": 5}


@pytest.mark.parametrize(
    "value",
    [
        7,
        ["temperature"],
        "random",
        {"temperatur": 1},
        {"n": 2},
        {"temperature": "0.2"},
        {"temperature": True},
        {"temperature": [1]},
        {"top_p": math.nan},
        {"temperature": math.inf},
        {"top_k": 1.5},
        {"max_tokens": "100"},
        {"max_tokens": 5, "max_new_tokens": 6},
    ],
)
def test_what_is_no_sampling_value_is_refused(value: object) -> None:
    with pytest.raises(PromptRejected) as refused:
        read_overrides(value)

    assert refused.value.reason == "bad_sampling"


def test_which_of_two_faults_is_named_does_not_depend_on_their_order() -> None:
    faulty: Json = {"top_p": "x", "temperature": "y"}

    details = set()
    for value in (faulty, dict(reversed(faulty.items()))):
        with pytest.raises(PromptRejected) as refused:
            read_overrides(value)
        details.add(refused.value.detail)

    assert len(details) == 1
