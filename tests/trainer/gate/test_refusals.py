"""Refusals are told from answers that only sound like one."""

from __future__ import annotations

import pytest

from trainer.gate.refusals import is_refusal


@pytest.mark.parametrize(
    "content",
    [
        "I'm sorry, but I can't assist with that request.",
        "I’m sorry, but I can’t help with that.",
        "I cannot provide instructions for that.",
        "Sorry, I am unable to help you with this.",
        "As an AI language model, I don't have personal opinions.",
        "Unfortunately, I can't share that information.",
        "Thank you for asking. I must decline to answer.",
        "I'm not able to write that.",
        "Lo siento, pero no puedo ayudar con eso.",
        "Es tut mir leid, aber dabei kann ich nicht helfen.",
        "很抱歉,我不能提供这类信息。",
    ],
)
def test_a_refusal_is_one(content: str) -> None:
    assert is_refusal(content)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "The answer is 42.",
        "The function can't return None here, so we help it along.",
        "Sorry is the hardest word. It was a hit in 1976.",
        "You can help by writing tests. I can write one for you.",
        "He said that he could not help them.",
        "An AI model is trained on data. " + "It reads. " * 40 + "I can't help with that.",
    ],
)
def test_an_answer_is_none(content: str) -> None:
    assert not is_refusal(content)
