"""The tokens' verbs on a run of the tiny tokenizer's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.chat import Chat, load_tokenizer
from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import Json, Row
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.trainer.cli.calling import call
from tests.trainer.tokens.committed import KEYS, RUN, commit_rows, make_answer
from tests.trainer.tokens.targets import make_spec, make_tokenizer

MESSAGES: list[Json] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def model(tmp_path: Path, store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> str:
    """The target of a run with a batch of each road, and the environment that finds it."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    folder = make_tokenizer(tmp_path / "tiny")
    spec = make_spec(folder, "chatml", run=RUN)
    store.put_new(KEYS.spec, dump(spec))
    chat = Chat(load_tokenizer(str(folder)), spec.chat_template, {}, "escape")
    sampled = [*chat.tokenizer.encode("4", add_special_tokens=False), *spec.sampling.stop_token_ids]
    answer = replace(make_answer(chat.prompt_ids(MESSAGES[:1], []), sampled[:2]), content="4")
    answer = replace(answer, finish_reason="stop")
    row = Row("a" * 32, "math-1", 0, False, "p:1", MESSAGES, [], [answer])
    commit_rows(store, "made", [row])
    commit_rows(store, "imported", [replace(row, key="b" * 32, answers=[])], road="text")
    return str(folder)


def test_both_roads_of_a_run_are_tokenized_compared_and_compacted(model: str) -> None:
    waiting = call("tokenize", "--run", RUN)
    made = call("tokenize", "--run", RUN, "--model", model)
    drift = call("drift", "--run", RUN, "--model", model)
    compacted = call("compact", "--run", RUN, "--rest")

    assert (waiting["num_shards"], waiting["skipped"]) == (1, {"text_road": 1})
    assert (made["num_shards"], made["num_new"], made["num_samples"]) == (2, 1, 2)
    assert (drift["num_answers"], drift["num_same"]) == (1, 1)
    assert (compacted["num_compacted"], compacted["num_large"]) == (2, 2)


def test_a_quarantined_batch_is_said_by_the_exit_code(model: str, store: Store) -> None:
    store.replace(KEYS.data(1, "made", "att"), b"damaged")

    made = call("tokenize", "--run", RUN, exit_code=3)

    assert len(made["quarantined"]) == 1


def test_a_folder_without_the_runs_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path / "other")
    (other / "tokenizer_config.json").write_text("{}", encoding="utf-8")

    with pytest.raises(BadInput, match="pass the folder of tiny"):
        call("tokenize", "--run", RUN, "--model", str(other))
    with pytest.raises(Missing, match=r"no tokenizer\.json"):
        call("drift", "--run", RUN)


def test_who_follows_has_a_process_per_core_and_no_more_threads(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(os, "execve", lambda path, argv, environ: become.append((argv, environ)))

    call("tokenize", "--run", RUN, "--follow", "--workers", "7")

    ((argv, environ),) = become
    assert "--concurrency=7" in argv
    assert environ["TOKENIZERS_PARALLELISM"] == "false"


@pytest.mark.slow
def test_following_without_redis_is_said_in_one_line(model: str, settings: Settings) -> None:
    environ = settings.environment() | {"DFLASH_REDIS_URL": "redis://127.0.0.1:1/0"}
    command = [sys.executable, "-m", "fleet", "tokenize", "--follow", "--run", RUN]

    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1
    assert "can't be reached" in done.stderr
    assert "Traceback" not in done.stderr
