from __future__ import annotations

import pytest

from producer.api import Run
from producer.enqueue import name_of
from producer.ledger import Ledger, Progress
from tests.producer.conftest import CommitBatch
from tests.producer.test_enqueue import rows


def test_batches_leave_with_their_commit_and_join_with_their_segment(
    run: Run, commit_batch: CommitBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.plan.SEGMENT_BATCHES", 1)
    ledger = Ledger(run.store, run.spec.run)
    run.enqueue(rows(6), batch_size=2)
    ledger.refresh()
    first, second, third = ledger.uncommitted()

    commit_batch(first)
    commit_batch(third)
    run.enqueue(rows(7), batch_size=2)
    run.seal()
    ledger.refresh()

    left = [name_of(message) for message in ledger.uncommitted()]
    assert left[0] == name_of(second)
    assert len(left) == 2
    assert ledger.progress() == Progress(7, 4, 4, 2, sealed=True)


def test_an_empty_run_has_nothing_open(run: Run) -> None:
    ledger = Ledger(run.store, run.spec.run)

    ledger.refresh()

    assert ledger.progress() == Progress(0, 0, 0, 0, sealed=False)
