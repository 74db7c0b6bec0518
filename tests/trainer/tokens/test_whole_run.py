"""Every commit of a run gets its shard, once, whatever happens meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from dflash_workers.contract.errors import Missing
from dflash_workers.contract.flags import (
    EMPTY,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.trainer.tokens.committed import (
    KEYS,
    RUN,
    SPEC,
    STOP,
    THREE_TURNS,
    commit_rows,
    make_answer,
    make_row,
)
from trainer.tokens.build import Builder
from trainer.tokens.reading import list_shards
from trainer.tokens.shards import read_shard
from trainer.tokens.whole_run import TokenizeReport, _begin, tokenize_run


def test_imported_conversations_wait_for_ids_and_are_counted(
    run_store: Store, run_settings: Settings
) -> None:
    commit_rows(run_store, "made", [THREE_TURNS])
    commit_rows(run_store, "imported", [replace(THREE_TURNS, answers=[])] * 2, road="text")

    report = tokenize_run(run_settings)

    assert (report.num_shards, report.skipped) == (1, {"text_road": 2})
    assert report.quarantined == []


def test_a_run_is_tokenized_once(run_store: Store, run_settings: Settings) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    commit_rows(run_store, "b2", [THREE_TURNS], segment=2)
    heard: list[tuple[int, int, str]] = []

    first = tokenize_run(run_settings, on_batch=lambda *done: heard.append(done))
    keys = list_shards(run_store, RUN)
    bodies = [run_store.get(key) for key in keys]
    second = tokenize_run(run_settings)

    assert keys == [KEYS.shard(1, "b1"), KEYS.shard(2, "b2")]
    assert heard == [(1, 2, keys[0]), (2, 2, keys[1])]
    assert first == TokenizeReport(2, 2, 6, 16, 44, {}, [])
    assert second == TokenizeReport(2, 0, 6, 16, 44, {}, [])
    assert bodies == [run_store.get(key) for key in keys]


def test_a_tokenizer_that_died_is_continued_where_it_stood(
    run_store: Store, run_settings: Settings
) -> None:
    commits = [commit_rows(run_store, b, [THREE_TURNS]) for b in ("b1", "b2", "b3")]
    run_store.put_new(KEYS.shard(1, "b2"), Builder(run_store, SPEC).shard_of(commits[1]))

    report = tokenize_run(run_settings)

    assert (report.num_shards, report.num_new) == (3, 2)


def test_a_later_commit_is_picked_up_by_the_next_call(
    run_store: Store, run_settings: Settings
) -> None:
    commit_rows(run_store, "b2", [THREE_TURNS])
    tokenize_run(run_settings)
    commit_rows(run_store, "b1", [THREE_TURNS])  # earlier in key order than the one that is done

    assert tokenize_run(run_settings).num_new == 1
    assert len(list_shards(run_store, RUN)) == 2


def test_a_batch_without_trainable_answers_gets_an_empty_shard(
    run_store: Store, run_settings: Settings
) -> None:
    commit_rows(run_store, "b1", [])
    commit_rows(run_store, "b2", [make_row(make_answer([10], [STOP]))])

    report = tokenize_run(run_settings)

    assert (report.num_shards, report.num_samples, report.skipped) == (2, 0, {EMPTY: 1})
    assert [read_shard(run_store.get(key)) for key in list_shards(run_store, RUN)] == [[], []]


def test_corrupt_data_is_quarantined_and_nothing_else_suffers(
    run_store: Store, run_settings: Settings
) -> None:
    for batch in ("b1", "b2", "b3", "b4"):
        commit_rows(run_store, batch, [THREE_TURNS])
    run_store.replace(KEYS.data(1, "b1", "att"), b"damaged")
    run_store.delete(KEYS.data(1, "b2", "att"))
    run_store.replace(KEYS.commit(1, "b3"), b"{}")

    report = tokenize_run(run_settings)

    quarantined = [line.split(":")[0] for line in report.quarantined]
    assert quarantined == [KEYS.shard(1, b) for b in ("b1", "b2", "b3")]
    assert list_shards(run_store, RUN) == [KEYS.shard(1, "b4")]
    assert (report.num_shards, report.num_new) == (1, 1)


def test_a_corrupt_shard_is_quarantined_and_left_alone(
    run_store: Store, run_settings: Settings
) -> None:
    commit_rows(run_store, "b1", [THREE_TURNS])
    run_store.put_new(KEYS.shard(1, "b1"), b"damaged")

    assert len(tokenize_run(run_settings).quarantined) == 1
    assert run_store.get(KEYS.shard(1, "b1")) == b"damaged"


def test_a_batch_mended_after_quarantine_is_tokenized(
    run_store: Store, run_settings: Settings
) -> None:
    commit = commit_rows(run_store, "b1", [THREE_TURNS])
    good = run_store.get(commit.data_key)
    run_store.replace(commit.data_key, b"damaged")
    tokenize_run(run_settings)
    run_store.replace(commit.data_key, good)

    report = tokenize_run(run_settings)

    assert (report.num_new, report.quarantined) == (1, [])


def test_two_tokenizers_at_once_agree(run_store: Store, run_settings: Settings) -> None:
    for number in range(6):
        commit_rows(run_store, f"b{number}", [THREE_TURNS])
    reports: list[TokenizeReport] = []

    def work() -> None:
        reports.append(tokenize_run(run_settings))

    threads = [threading.Thread(target=work) for _ in range(3)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [(r.num_shards, r.num_samples, r.quarantined) for r in reports] == [(6, 18, [])] * 3


def test_a_run_that_does_not_exist_is_missing(settings: Settings) -> None:
    with pytest.raises(Missing):
        tokenize_run(replace(settings, run="nowhere"))


def test_several_processes_make_what_one_makes(run_store: Store, run_settings: Settings) -> None:
    for number in range(5):
        commit_rows(run_store, f"b{number}", [THREE_TURNS])
    run_store.replace(KEYS.data(1, "b3", "att"), b"damaged")
    seen: list[int] = []

    report = tokenize_run(
        run_settings, num_workers=2, on_batch=lambda done, total, key: seen.append(total)
    )

    assert seen == [5] * 5
    assert (report.num_new, report.num_samples, len(report.quarantined)) == (4, 12, 1)
    shards = [run_store.get(KEYS.shard(1, f"b{number}")) for number in (0, 1, 2, 4)]
    assert {len(read_shard(body)) for body in shards} == {3}


def test_a_process_of_several_leaves_the_other_cores_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    context = multiprocessing.get_context("spawn")

    with ProcessPoolExecutor(1, context, initializer=_begin) as pool:
        found = pool.submit(os.getenv, "TOKENIZERS_PARALLELISM").result(60)

    assert found == "false"


def test_what_is_quarantined_is_noted_beside_the_shards(
    run_store: Store, run_settings: Settings
) -> None:
    commit = commit_rows(run_store, "b1", [THREE_TURNS])
    run_store.replace(commit.data_key, b"damaged")

    tokenize_run(run_settings)
    tokenize_run(run_settings)

    assert b"sha256 differs" in run_store.get(KEYS.quarantine(1, "b1"))
