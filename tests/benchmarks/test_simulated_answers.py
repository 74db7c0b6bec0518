"""What simulated engines answer: a function of the question, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from benchmarks.simulated.answers import Answers
from benchmarks.simulated.lengths import Lengths
from dflash_workers.contract.flags import is_garbled, is_repetitive, is_stuck
from tests.tiny_model import make_tiny_model

LENGTHS = Lengths(mean=300.0, variation=0.8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("simulated") / "model")


@pytest.fixture(scope="module")
def answers(model_dir: Path) -> Answers:
    return Answers(model_dir, LENGTHS)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def prompt(tokenizer: Any, *texts: str) -> list[int]:
    """Rendered as a worker renders it: user and assistant in turns."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_an_answer_goes_on_from_wherever_it_was_broken_off(
    answers: Answers, tokenizer: Any
) -> None:
    asked = prompt(tokenizer, "Tell me of the sea.", "It is deep.", "More!")
    whole = answers.answer_of(asked)

    for given in (0, 1, len(whole) // 2, len(whole) - 1):
        question = answers.question_of(asked + whole[:given])
        assert question.num_given == given
        text, ids = answers.json(question, len(whole) - given, whole[-1])
        assert orjson.loads(b"[%b]" % ids) == whole[given:]
        assert len(text) == len(whole) - given - 1
        assert answers.answer_of(asked + whole[:given]) == whole


def test_other_questions_have_other_answers_and_other_lengths(
    answers: Answers, tokenizer: Any
) -> None:
    asked = [prompt(tokenizer, f"Question number {number}") for number in range(200)]

    questions = [answers.question_of(ids) for ids in asked]

    assert len({question.name for question in questions}) == 200
    assert len({question.num_ids for question in questions}) > 100
    assert len({tuple(answers.answer_of(ids)[:8]) for ids in asked}) == 200


def test_ids_without_a_header_are_a_question_as_a_whole(answers: Answers) -> None:
    assert answers.question_of([70, 71, 72]).num_given == 0


def test_ids_that_hold_the_header_across_their_borders_hold_none(answers: Answers) -> None:
    # The bytes of the header's first id and of what follows stand there, shifted by two.
    shifted = [1 << 16, *range(300, 340)]

    assert answers.question_of(shifted).num_given == 0


def test_its_text_is_what_the_tokenizer_says_of_its_ids(answers: Answers, tokenizer: Any) -> None:
    asked = prompt(tokenizer, "Hello?")

    text, ids = answers.json(answers.question_of(asked), 100, None)

    assert tokenizer.decode(orjson.loads(b"[%b]" % ids)) == text.decode()


def test_answers_have_none_of_the_faults_that_are_looked_for(
    answers: Answers, tokenizer: Any
) -> None:
    for number in range(100):
        asked = prompt(tokenizer, f"Question number {number}")
        words = answers.answer_of(asked)[:-1]
        assert not is_repetitive(words)
        assert not is_stuck(words)
        text, _ = answers.json(answers.question_of(asked), len(words), None)
        assert not is_garbled(text.decode())


def test_a_tokenizer_without_chat_is_refused(model_dir: Path, tmp_path: Path) -> None:
    facts = (model_dir / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(facts.replace("<|im_end|>", "<|other|>"))

    with pytest.raises(KeyError):
        Answers(tmp_path, LENGTHS)
