"""A sample as people see it: every token once, its part and its loss, and nothing that acts."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from dflash_workers.contract.chat import load_tokenizer
from tests.browser import render
from tests.tiny_model import make_tiny_model
from tests.trainer.gate.pages import assert_harmless, parsed
from trainer.tokens.shards import Sample
from trainer.tokens.show import Piece, page_of, painted, pieces_of

ASKED = "<|im_start|>user\nWhat is 2+2? \U0001f914<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nTwo and two.\n</think>"
SAID = '\n\n4 é\u202e <tool_call>\n{"name": "f"}\n</tool_call> done<|im_end|>'
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=go()>\x1b[2J\x07"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(make_tiny_model(tmp_path_factory.mktemp("tiny"))))


def sample_of(tokenizer: PreTrainedTokenizerBase, asked: str, thought: str, said: str) -> Sample:
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in (asked, thought, said)]
    ids = np.array([i for part in parts for i in part], dtype=np.int32)
    thinking_end = len(parts[0]) + len(parts[1]) - 1 if thought else -1
    return Sample("a" * 32, "q", 0, ids, len(parts[0]), thinking_end, False, "stop", [])


def text_of(pieces: list[Piece], part: str) -> str:
    return "".join(piece.text for piece in pieces if piece.part == part)


def test_every_token_is_shown_once_in_the_part_it_belongs_to(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    sample = sample_of(tokenizer, ASKED, THOUGHT, SAID)

    pieces = pieces_of(sample, tokenizer)

    assert [i for piece in pieces for i in piece.ids] == sample.ids.tolist()
    assert text_of(pieces, "prompt") == ASKED
    assert text_of(pieces, "thinking") == THOUGHT
    assert text_of(pieces, "tool") == '<tool_call>\n{"name": "f"}\n</tool_call>'
    assert text_of(pieces, "answer") == "\n\n4 é\u202e  done<|im_end|>"


def test_the_loss_is_shown_as_the_mask_has_it(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = sample_of(tokenizer, ASKED, THOUGHT, SAID)

    pieces = pieces_of(sample, tokenizer)

    assert [p.has_loss for p in pieces for _ in p.ids] == sample.loss_mask().tolist()


def test_bytes_that_are_no_character_are_shown_one_by_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    broken = tokenizer.encode("é", add_special_tokens=False)[:1]
    sample = sample_of(tokenizer, ASKED, "", "a")
    sample = replace(sample, ids=np.array([*sample.ids, *broken * 20, 5], dtype=np.int32))

    pieces = pieces_of(sample, tokenizer)

    assert [i for piece in pieces for i in piece.ids] == sample.ids.tolist()
    assert sum(piece.ids == broken for piece in pieces) >= 19


@pytest.mark.parametrize("flags", [[], ["unfinished_thinking"]])
def test_thinking_that_never_ended_is_thinking(
    tokenizer: PreTrainedTokenizerBase, flags: list[str]
) -> None:
    said = "so I think" if flags else "<think>so I think"
    sample = replace(sample_of(tokenizer, ASKED, "", said), flags=flags)

    pieces = pieces_of(sample, tokenizer)

    assert text_of(pieces, "thinking") == said
    assert text_of(pieces, "answer") == ""


def test_a_page_shows_all_of_a_hostile_sample_and_does_nothing(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    sample = replace(sample_of(tokenizer, HOSTILE, THOUGHT, HOSTILE), id=HOSTILE, flags=[HOSTILE])

    page = page_of([(sample, pieces_of(sample, tokenizer))])

    assert_harmless(page)
    assert parsed(page).text.count("<script>alert(1)</script>") >= 4
    shown = re.findall(r'title="([\d ]+)"', page)
    assert [int(i) for ids in shown for i in ids.split()] == sample.ids.tolist()


def test_a_terminal_gets_no_order_from_a_sample(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = sample_of(tokenizer, HOSTILE, "", HOSTILE + "\n[bold]x[/bold]")
    console = Console(file=io.StringIO(), force_terminal=True, width=300)

    console.print(painted(pieces_of(sample, tokenizer)), soft_wrap=True)

    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    orders = re.findall(r"\x1b\[[^m]*m|\x1b.|\x07", shown)
    assert set(orders) == {o for o in orders if re.fullmatch(r"\x1b\[[\d;]*m", o)}
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "[bold]x[/bold]" in plain
    assert plain.count("␛[2J␇") == 2


def test_a_browser_shows_a_hostile_sample_and_runs_nothing(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    sample = replace(sample_of(tokenizer, HOSTILE, THOUGHT, HOSTILE), id=HOSTILE)
    pieces = pieces_of(sample, tokenizer)
    path = tmp_path / "sample.html"
    path.write_text(page_of([(sample, pieces)]), encoding="utf-8")
    shown = "getComputedStyle(document.querySelector('pre .{}')).{}"
    questions = {
        "pieces": "[...document.querySelectorAll('pre span')].map(e => e.title)",
        "height": "document.querySelector('pre').getBoundingClientRect().height",
        "line": shown.format("loss", "borderBottomStyle"),
        "none": shown.format("prompt:not(.loss)", "borderBottomStyle"),
        "colours": f"[{shown.format('prompt', 'color')}, {shown.format('answer', 'color')}]",
        "acting": "document.querySelectorAll('script, img, iframe, link, a').length",
        "text": "document.querySelector('pre').innerText",
    }

    page = render(path.as_uri(), questions=questions)

    seen = page.answers
    assert page.console == []
    assert seen["pieces"] == [" ".join(map(str, piece.ids)) for piece in pieces]
    assert seen["height"] > 20
    assert (seen["line"], seen["none"]) == ("solid", "none")
    assert len(set(seen["colours"])) == 2
    assert (seen["acting"], seen["text"].count("<script>alert(1)</script>")) == (0, 2)
