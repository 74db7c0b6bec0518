"""Overlap with benchmarks, against a comparison of all runs of words with all others."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.errors import BadInput
from trainer.gate.benchmarks import Benchmarks, read_benchmarks

QUESTION = "Janet's ducks lay 16 eggs per day. She eats three for breakfast every single morning."
word_lists = st.lists(st.sampled_from("abcde"), max_size=40)


def overlaps(benchmark: list[str], asked: list[str]) -> bool:
    length = min(len(benchmark), 13)
    if length < 8:
        return False
    return any(
        benchmark[i : i + length] == asked[j : j + length]
        for i in range(len(benchmark) - length + 1)
        for j in range(len(asked) - length + 1)
    )


@settings(deadline=None, max_examples=200)
@given(word_lists, word_lists, st.integers(0, 20), st.integers(0, 20))
def test_an_overlap_is_what_comparing_all_runs_finds(
    benchmark: list[str], asked: list[str], begin: int, length: int
) -> None:
    asked = [*asked, *benchmark[begin : begin + length]]

    found = Benchmarks([("b", " ".join(benchmark))]).find(" ".join(asked))

    assert bool(found) == overlaps(benchmark, asked)


def test_case_and_punctuation_do_not_matter() -> None:
    benchmarks = Benchmarks([("gsm8k", QUESTION)])

    assert benchmarks.find("Q: " + QUESTION.upper().replace(".", " !")) == "gsm8k"
    assert benchmarks.find(QUESTION[:50]) == ""


def test_files_give_their_prompts_whatever_these_are_called(tmp_path: Path) -> None:
    rows = [
        {"question": "a b c d e f g h one", "answer": "not a prompt at all " * 3},
        {"turns": ["a b c d e f g h two", "a b c d e f g h three"]},
        {"messages": [{"role": "user", "content": "a b c d e f g h four"}]},
        {"conversations": [{"from": "human", "value": "a b c d e f g h five"}]},
        "a b c d e f g h six",
        {"prompt": "too short"},
    ]
    path = tmp_path / "mt.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    (tmp_path / "plain.txt").write_text("a b c d e f g h seven\n\n")

    found = read_benchmarks([path, tmp_path / "plain.txt"])

    assert (found.num_prompts, found.num_too_short) == (8, 1)
    for number in ("one", "two", "three", "four", "five", "six"):
        assert found.find(f"A b c d e f g h {number}") == "mt.jsonl"
    assert found.find("a b c d e f g h seven") == "plain.txt"
    assert found.find("not a prompt at all " * 3) == ""


@pytest.mark.parametrize("line", ['{"answer": "no prompt"}', "{broken", "[1]", "7"])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)

    with pytest.raises(BadInput, match=r"b\.jsonl:2"):
        read_benchmarks([path])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.jsonl"):
        read_benchmarks([tmp_path / "none.jsonl"])
