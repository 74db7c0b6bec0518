from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import Conflict, StoreUnavailable
from dflash_workers.contract.records import Json, Row
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.audit import audit
from producer.finished import ImportReport, commit_imported, import_finished
from producer.ledger import Ledger
from tests.producer.campaign import Campaign, prompts

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {}}}
        ],
    },
    {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "rain"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "The tool says so."},
]


def finished(num_rows: int) -> list[Json]:
    return [
        {
            "id": f"c{n}",
            "messages": [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": f"answer {n}"},
            ],
        }
        for n in range(num_rows)
    ]


@pytest.fixture
def run_import(campaign: Campaign, settings: Settings) -> Callable[..., ImportReport]:
    """Imports rows into the campaign's run, in small batches."""

    def run(rows: list[Json], **facts: Any) -> ImportReport:
        facts = {"batch_size": 2, "heldout": 0.0} | facts
        return import_finished(campaign.store, settings, rows, **facts)

    return run


Import = Callable[..., ImportReport]


def rows_of(campaign: Campaign) -> list[Row]:
    return [
        row
        for at in committed_batches(campaign.store, campaign.run)
        for row in read_rows(campaign.store, read_commit(campaign.store, campaign.run, *at))
    ]


def test_conversations_become_commits_of_the_text_road_word_for_word(
    campaign: Campaign, run_import: Import
) -> None:
    row = {"id": "c", "messages": CONVERSATION, "topic": "weather"}

    report = run_import([row, *finished(4)])

    first, *_ = rows_of(campaign)
    by_id = {row.id: row for row in rows_of(campaign)}
    assert by_id["c"].messages == CONVERSATION
    assert by_id["c"].metadata == {"topic": "weather"}
    assert [first.answers, first.generation] == [[], 0]
    assert len(by_id) == 5
    roads = {
        read_commit(campaign.store, campaign.run, *at).road
        for at in committed_batches(campaign.store, campaign.run)
    }
    assert roads == {"text"}
    assert (report.num_planned, report.num_batches, report.num_committed) == (5, 3, 3)
    result = audit(campaign.store, campaign.run)
    assert (result.findings, result.num_completed, result.num_rows) == ([], 5, 5)


def test_the_same_import_again_adds_nothing(campaign: Campaign, run_import: Import) -> None:
    run_import(finished(5))
    before = list(campaign.store.list(f"{campaign.run}/"))

    again = run_import(finished(5))

    assert (again.num_planned, again.num_duplicates, again.num_committed) == (0, 5, 0)
    assert list(campaign.store.list(f"{campaign.run}/")) == before


def test_rows_without_a_recorded_answer_are_refused(run_import: Import) -> None:
    questions: list[Json] = [
        {"id": "open", "messages": [{"role": "user", "content": "and?"}]},
        {"id": "prompt", "prompt": "and?"},
        {"id": "nothing"},
    ]

    report = run_import([*finished(1), *questions])

    assert report.refused == {"unfinished": 2, "no_messages": 1}
    assert (report.num_rows, report.num_planned) == (4, 1)


def test_no_imported_batch_is_ever_sent(campaign: Campaign, run_import: Import) -> None:
    run_import(finished(5))
    ledger = Ledger(campaign.store, campaign.run)

    ledger.refresh()

    assert ledger.uncommitted() == []
    assert campaign.hints.num_queued(campaign.queue) == 0


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("num_writes", range(9))
def test_an_import_killed_at_any_write_is_finished_by_the_next(
    campaign: Campaign, run_import: Import, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    put_new = Store.put_new
    writes: list[str] = []

    def put_until_killed(store: Store, key: str, body: bytes) -> None:
        if len(writes) >= num_writes:
            raise Killed
        writes.append(key)
        put_new(store, key, body)

    with monkeypatch.context() as dying:
        dying.setattr(Store, "put_new", put_until_killed)
        if num_writes < 8:
            with pytest.raises(Killed):
                run_import(finished(5))
    run_import(finished(5))

    assert sorted(row.id for row in rows_of(campaign)) == [f"c{n}" for n in range(5)]
    assert len(list(campaign.store.list(f"{campaign.run}/data/"))) == 3
    result = audit(campaign.store, campaign.run)
    assert (result.findings, result.num_waiting) == ([], 0)


def test_whoever_imports_next_commits_what_another_left_planned(
    campaign: Campaign, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("S3 is away")

    with monkeypatch.context() as broken:
        broken.setattr("producer.finished.publish", away)
        with pytest.raises(StoreUnavailable):
            run_import(finished(3))

    report = run_import(finished(1))

    assert (report.num_planned, report.num_committed) == (0, 2)
    assert len(rows_of(campaign)) == 3


def test_a_share_is_held_out_and_rows_may_say_so_themselves(
    campaign: Campaign, run_import: Import
) -> None:
    own = [{**finished(1)[0], "id": "mine", "heldout": True}]

    report = run_import([*finished(200), *own], heldout=0.1, batch_size=64)

    heldout = {row.id for row in rows_of(campaign) if row.heldout}
    assert "mine" in heldout
    assert 5 < len(heldout) < 45
    assert report.num_heldout == len(heldout)


def test_a_prompt_of_another_road_is_not_imported_over(
    campaign: Campaign, run_import: Import
) -> None:
    campaign.plan(prompts("c0"))

    report = run_import(finished(1))

    assert (report.num_planned, commit_imported(campaign.store, campaign.run)) == (0, 0)


def test_a_cancelled_run_takes_no_import(campaign: Campaign, run_import: Import) -> None:
    Control(campaign.store, campaign.run).order(Action.CANCEL)

    with pytest.raises(Conflict, match="cancelled"):
        run_import(finished(1))


def test_files_are_read_as_enqueue_reads_them(
    campaign: Campaign, settings: Settings, tmp_path: Path
) -> None:
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "question"},
            {"from": "gpt", "value": "answer"},
        ]
    }
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(sharegpt) + b"\n")

    import_finished(campaign.store, settings, [tmp_path])

    (row,) = rows_of(campaign)
    assert row.source == f"{tmp_path}/rows.jsonl:1"
    assert row.messages == [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
    ]
