"""What is believed of a reply, what is mended, and what no engine in order can have said."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash_workers.contract.errors import EngineUnavailable
from dflash_workers.contract.records import Sampling
from dflash_workers.questions import Question, Shown
from dflash_workers.replies import Checked, Reply, check
from tests.tiny_model import VOCAB_SIZE

STOP_ID, OTHER_STOP_ID = 2, 0
PROMPT = list(range(10, 30))


@pytest.fixture
def words(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode("The weather is fine.", add_special_tokens=False))


@pytest.fixture
def good(words: list[int]) -> Reply:
    return Reply(
        output_ids=[*words, STOP_ID],
        text="The weather is fine.",
        finish="stop",
        num_input=len(PROMPT),
        num_output=len(words) + 1,
        matched=STOP_ID,
    )


def checked(reply: Reply, tokenizer: Any, *stop_ids: int) -> Checked:
    sampling = Sampling(1.0, 1.0, -1, 64, list(stop_ids or (STOP_ID, OTHER_STOP_ID)))
    return check(reply, Question(PROMPT, 0, sampling, VOCAB_SIZE), tokenizer)


def test_a_reply_in_order_is_kept_as_it_is(good: Reply, tokenizer: Any) -> None:
    found = checked(good, tokenizer)

    shown = Shown(len(good.output_ids or []) - 1, good.text or "")
    assert found == Checked(good.output_ids or [], "stop", (), {}, shown)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "finish_reason is 'paused'": {"finish": "paused"},
    "finish_reason is None": {"finish": None},
    "counts 4 ids in an output": {"num_output": 4},
    "counts 21 ids in a prompt of 20": {"num_input": 21},
    "renders another prompt": {"input_ids": [*PROMPT[:7], 5, *PROMPT[8:]]},
    "for 20: ": {"input_ids": PROMPT[:-1]},
    "not that of its ids": {"text": "The weather is bad."},
    "not below 512": {"output_ids": [5, 512, STOP_ID], "num_output": 3, "text": None},
    "not below": {"output_ids": ["5", STOP_ID], "num_output": 2, "text": None},
    "not below 512 ": {"output_ids": [-1, STOP_ID], "num_output": 2, "text": None},
    "is not below 512": {"output_ids": [True, STOP_ID], "num_output": 2, "text": None},
    "begins with the prompt": {"output_ids": [*PROMPT, STOP_ID], "num_output": 21, "text": None},
    "output is empty": {"output_ids": [], "num_output": 0, "text": "", "finish": "length"},
    "neither ids nor their text": {"output_ids": None, "text": None},
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_reply_that_contradicts_itself_is_never_believed(
    contradiction: str, good: Reply, tokenizer: Any
) -> None:
    reply = dataclasses.replace(good, **CONTRADICTIONS[contradiction])

    with pytest.raises(EngineUnavailable, match=contradiction.strip()):
        checked(reply, tokenizer)


def test_another_template_is_shown_where_it_differs(
    good: Reply, words: list[int], tokenizer: Any
) -> None:
    sampling = Sampling(1.0, 1.0, -1, 64, [STOP_ID])
    theirs = [*words[:3], *words]
    reply = dataclasses.replace(good, input_ids=theirs, num_input=len(theirs))

    with pytest.raises(EngineUnavailable) as caught:
        check(reply, Question(words, 0, sampling, VOCAB_SIZE), tokenizer)

    assert "chat template" in str(caught.value)
    assert "The weather" in str(caught.value)


@pytest.mark.parametrize("num_counted", [0, 1])
@pytest.mark.parametrize(("matched", "stop_ids"), [(STOP_ID, (STOP_ID, 7)), (None, (STOP_ID,))])
def test_a_stop_id_that_was_left_out_is_appended(
    good: Reply,
    words: list[int],
    tokenizer: Any,
    matched: int | None,
    stop_ids: tuple[int, ...],
    num_counted: int,
) -> None:
    reply = dataclasses.replace(
        good, output_ids=words, num_output=len(words) + num_counted, matched=matched
    )

    found = checked(reply, tokenizer, *stop_ids)

    assert found.output_ids == [*words, STOP_ID]
    assert found.notes == ("stop_id_appended",)


def test_an_answer_that_is_nothing_but_the_stop_id_is_one(good: Reply, tokenizer: Any) -> None:
    reply = dataclasses.replace(good, output_ids=[], text="", num_output=1)

    assert checked(reply, tokenizer).output_ids == [STOP_ID]


def test_a_stop_id_that_nobody_names_is_not_guessed(
    good: Reply, words: list[int], tokenizer: Any
) -> None:
    reply = dataclasses.replace(good, output_ids=words, num_output=len(words), matched=None)

    found = checked(reply, tokenizer, STOP_ID, OTHER_STOP_ID)

    assert found.output_ids == words
    assert found.notes == ("stop_id_unknown",)


def test_a_stop_string_is_an_end_of_its_own(good: Reply, words: list[int], tokenizer: Any) -> None:
    reply = dataclasses.replace(
        good, output_ids=words, num_output=len(words), text="The weather", matched=" is fine."
    )

    found = checked(reply, tokenizer)

    assert (found.output_ids, found.finish_reason, found.notes) == (words, "stop_string", ())


@pytest.mark.parametrize(
    ("finish", "expected"), [("length", "length"), ("tool_calls", "stop"), ("abort", "abort")]
)
def test_each_end_has_a_name(
    good: Reply, words: list[int], tokenizer: Any, finish: str, expected: str
) -> None:
    ids = [*words, STOP_ID] if expected == "stop" else words
    reply = dataclasses.replace(
        good, finish=finish, matched=None, output_ids=ids, num_output=len(ids)
    )

    assert checked(reply, tokenizer).finish_reason == expected


@pytest.mark.parametrize(
    "text", ["The weather is fine", "Theweatherisfine. ", "\ufffdThe  weather\nis fine.\ufffd"]
)
def test_detokenizers_may_differ_in_whitespace_and_broken_characters_only(
    good: Reply, words: list[int], tokenizer: Any, text: str
) -> None:
    reply = dataclasses.replace(good, text=text)
    is_alike = text.rstrip("\ufffd ").endswith(".")

    if is_alike:
        assert checked(reply, tokenizer).output_ids == good.output_ids
    else:
        with pytest.raises(EngineUnavailable):
            checked(reply, tokenizer)


def test_the_text_of_an_aborted_answer_may_lag_behind_its_ids(
    good: Reply, words: list[int], tokenizer: Any
) -> None:
    reply = dataclasses.replace(
        good, finish="abort", output_ids=words, num_output=len(words), text="The wea"
    )

    assert checked(reply, tokenizer).output_ids == words


def test_a_limit_may_cut_a_character_in_two(good: Reply, tokenizer: Any) -> None:
    ids = list(tokenizer.encode("fine €", add_special_tokens=False))[:-1]
    reply = dataclasses.replace(
        good, finish="length", matched=None, output_ids=ids, num_output=len(ids), text="fine "
    )

    assert checked(reply, tokenizer).output_ids == ids


def test_text_alone_is_tokenised_again_and_says_so(
    good: Reply, words: list[int], tokenizer: Any
) -> None:
    reply = dataclasses.replace(good, output_ids=None, matched=None, num_output=3)

    found = checked(reply, tokenizer, STOP_ID)

    assert found.output_ids == [*words, STOP_ID]
    assert found.notes == ("text_road", "stop_id_appended")
    assert found.spec == {"drift_ids": len(words) + 1 - 3}


def test_without_a_tokenizer_texts_are_trusted(good: Reply) -> None:
    assert checked(dataclasses.replace(good, text="Other."), None).finish_reason == "stop"
