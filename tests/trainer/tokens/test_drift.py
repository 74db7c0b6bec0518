"""The two roads, compared on answers of which the difference is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.chat import Chat, load_tokenizer
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import Answer, Json, Row, RunSpec
from dflash_workers.contract.store import Store
from tests.trainer.tokens.committed import KEYS, RUN, commit_rows, make_answer
from tests.trainer.tokens.targets import make_spec, make_tokenizer
from trainer.tokens.drift import NO_END, RESPELLED, RETOKENIZED, UNMATCHED, measure_drift

END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def spec(folder: Path, store: Store) -> RunSpec:
    spec = make_spec(folder, "chatml", run=RUN)
    store.put_new(KEYS.spec, dump(spec))
    return spec


@pytest.fixture
def chat(folder: Path, spec: RunSpec) -> Chat:
    return Chat(load_tokenizer(str(folder)), spec.chat_template, {}, "escape")


def encode(chat: Chat, text: str) -> list[int]:
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


def answered(chat: Chat, output_ids: list[int], content: str) -> tuple[Answer, list[Json]]:
    """An engine's answer to one question, and the conversation that was kept of it."""
    question: Json = {"role": "user", "content": "2+2?"}
    asked = chat.prompt_ids([question], [])
    answer = replace(make_answer(asked, output_ids), content=content)
    return answer, [question, {"role": "assistant", "content": content}]


def row(name: str, answer: Answer, messages: list[Json]) -> Row:
    return Row(name.ljust(32, "0"), name, 0, False, "p:1", messages, [], [answer])


def test_each_kind_of_difference_is_told_from_the_others(
    store: Store, folder: Path, chat: Chat
) -> None:
    stop = encode(chat, END)
    whole, letters = encode(chat, " the"), [i for c in " the" for i in encode(chat, c)]
    assert len(whole) < len(letters)
    rows = [
        row("same", *answered(chat, encode(chat, "4") + stop, "4")),
        row("cut off", *answered(chat, encode(chat, "4"), "4")),
        row("letters", *answered(chat, encode(chat, "in") + letters + stop, "in the")),
        row("spaces", *answered(chat, encode(chat, "4  ") + stop, "4")),
    ]
    answer, messages = answered(chat, encode(chat, "4") + stop, "4")
    rows.append(row("lost", replace(answer, content="five"), messages))
    commit_rows(store, "b", rows)

    report = measure_drift(store, RUN, str(folder))

    assert report.why == {NO_END: 1, RETOKENIZED: 1, RESPELLED: 1, UNMATCHED: 1}
    assert (report.num_answers, report.num_same, report.num_quarantined) == (5, 1, 1)
    assert (report.num_prompts_differ, report.num_answers_differ) == (0, 3)
    assert report.num_masks_differ == 3
    assert len(report.examples) == 4


def test_no_more_answers_are_looked_at_than_asked_for(
    store: Store, folder: Path, chat: Chat
) -> None:
    good = answered(chat, encode(chat, "4") + encode(chat, END), "4")
    commit_rows(store, "b", [row(f"r{n}", *good) for n in range(5)])
    commit_rows(store, "c", [row("imported", *good)], road="text")

    assert measure_drift(store, RUN, str(folder), limit=3).num_answers == 3
    assert measure_drift(store, RUN, str(folder)).num_answers == 5
