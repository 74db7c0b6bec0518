from __future__ import annotations

from dflash_workers.contract.keys import RunKeys
from producer.api import Run
from producer.audit import audit, rejections
from producer.ledger import Ledger
from tests.producer.conftest import CommitBatch
from tests.producer.test_enqueue import rows


def commit_all(run: Run, commit_batch: CommitBatch) -> None:
    ledger = Ledger(run.store, run.spec.run)
    ledger.refresh()
    for message in ledger.uncommitted():
        commit_batch(message, ("p3",))


def test_a_run_whose_every_prompt_has_one_fate_is_whole(
    run: Run, commit_batch: CommitBatch
) -> None:
    run.enqueue([*rows(10), {"id": "bad"}], batch_size=4)

    waiting = audit(run.store, run.spec.run)
    commit_all(run, commit_batch)
    whole = audit(run.store, run.spec.run)

    assert (waiting.num_planned, waiting.num_waiting, waiting.is_whole) == (10, 10, False)
    assert (whole.num_completed, whole.num_rejected, whole.num_data_objects) == (9, 1, 3)
    assert (whole.is_whole, whole.findings) == (True, [])
    assert rejections(run.store, run.spec.run) == ({"no_messages": 1}, {"context_length": 1})


def test_changed_data_is_found(run: Run, commit_batch: CommitBatch) -> None:
    run.enqueue(rows(8), batch_size=4)
    commit_all(run, commit_batch)
    key, _ = next(run.store.list(f"{run.spec.run}/data/"))
    run.store.replace(key, run.store.get(key) + b"\0")

    result = audit(run.store, run.spec.run)

    assert [key in finding and "sha256" in finding for finding in result.findings] == [True]
    assert not result.is_whole


def test_lost_prompts_and_commits_of_nothing_are_found(run: Run, commit_batch: CommitBatch) -> None:
    run.enqueue(rows(8), batch_size=4)
    commit_all(run, commit_batch)
    keys = RunKeys(run.spec.run)
    commit_key, _ = next(run.store.list(keys.commits))
    run.store.put_new(keys.commit(7, "nobody"), run.store.get(commit_key))
    prompts_key, _ = next(run.store.list(f"{run.spec.run}/plan/000000/"))
    run.store.delete(prompts_key)

    findings = "\n".join(audit(run.store, run.spec.run).findings)

    assert prompts_key in findings
    assert "7/nobody: no segment lists this batch" in findings


def test_a_commit_that_leaves_a_prompt_out_is_found(run: Run, commit_batch: CommitBatch) -> None:
    run.enqueue(rows(4), batch_size=4)
    ledger = Ledger(run.store, run.spec.run)
    ledger.refresh()
    (message,) = ledger.uncommitted()
    keys = RunKeys(run.spec.run)
    prompts_key = keys.prompts(message.segment, message.batch)
    whole = run.store.get(prompts_key)
    run.store.replace(prompts_key, b"".join(whole.splitlines(keepends=True)[:3]))
    commit_batch(message)
    run.store.replace(prompts_key, whole)

    (finding,) = audit(run.store, run.spec.run).findings

    assert "has 0 fates" in finding
