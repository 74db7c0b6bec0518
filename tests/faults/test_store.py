"""S3 refuses, loses replies, resets, races and lies: each batch has one commit, and it is right."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from dflash_workers.contract.commit import committed_batches, publish, seal_rows
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import BatchMessage, Commit
from dflash_workers.contract.store import open_store
from tests.faults.fleet import Fleet
from tests.faults.http_proxy import Rule
from tests.faults.processes import until
from tests.faults.proxy import Mode
from tests.faults.runs import KEPT_SLOT, FaultRun, prompts
from tests.faults.starts import run_worker

pytestmark = pytest.mark.slow


@pytest.fixture
def busy(fleet: Fleet, shared_run: FaultRun) -> Iterator[tuple[FaultRun, BatchMessage]]:
    """A batch at work, a second or two from its end; the worker lives on for the next test."""
    shared_run.keep_worker()
    (message,) = shared_run.add(prompts(shared_run, 4, "tokens=150"))
    until(lambda: len(fleet.engine().running()) == 4)
    yield shared_run, message
    fleet.s3_proxy.set(Mode.PASS)


Busy = tuple[FaultRun, BatchMessage]


def test_eight_commits_at_the_same_moment_leave_one_and_seven_losers_take_their_data_away(
    fleet: Fleet, run: FaultRun
) -> None:
    message = BatchMessage(run.name, 0, "0123456789abcdef")
    standing: list[Commit] = []
    start = threading.Barrier(8)

    def commit_as(attempt: str) -> None:
        body, sha256 = seal_rows([])
        key = RunKeys(run.name).data(message.segment, message.batch, attempt)
        mine = Commit(
            schema=2,
            run=run.name,
            segment=0,
            batch=message.batch,
            attempt=attempt,
            data_key=key,
            sha256=sha256,
            data_bytes=len(body),
            num_rows=0,
            rejected=[],
            input_tokens=0,
            output_tokens=0,
            started_at=0.0,
            finished_at=0.0,
            worker=attempt,
            engine={},
        )
        store = open_store(fleet.settings(run.name))
        start.wait()
        standing.append(publish(store, mine, body))
        store.client.close()

    threads = [threading.Thread(target=commit_as, args=(f"attempt{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({commit.attempt for commit in standing}) == 1
    data = [key for key, _ in run.store.list(RunKeys(run.name).all_data)]
    assert data == [standing[0].data_key]


@pytest.mark.parametrize("where", ["data", "commits"])
def test_a_write_whose_reply_was_lost_is_known_as_ones_own(
    fleet: Fleet, busy: Busy, where: str
) -> None:
    run, message = busy
    rule = Rule("PUT", f"/{run.name}/{where}/", lose_reply=True)
    fleet.s3_proxy.rules.append(rule)

    run.wait(message)

    assert rule.num_met == 1
    run.prove()
    data = [key for key, _ in run.store.list(RunKeys(run.name).all_data)]
    assert data == [run.commit(message).data_key]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (503, "SlowDown"),
        (500, "InternalError"),
        (429, "TooManyRequests"),
    ],
)
@pytest.mark.parametrize("where", ["data", "commits"])
def test_a_write_that_s3_puts_off_is_made_later(
    fleet: Fleet, busy: Busy, where: str, status: int, code: str
) -> None:
    run, message = busy
    rule = Rule("PUT", f"/{run.name}/{where}/", status=status, code=code, num_left=2)
    fleet.s3_proxy.rules.append(rule)

    run.wait(message)

    assert rule.num_met == 2
    run.prove()


@pytest.mark.parametrize("status", [412, 304])
def test_a_store_that_refuses_a_key_that_is_ours_already_is_understood(
    fleet: Fleet, busy: Busy, status: int
) -> None:
    run, message = busy
    lost = Rule("PUT", f"/{run.name}/commits/", lose_reply=True)
    refused = Rule("PUT", f"/{run.name}/commits/", status=status, code="PreconditionFailed")
    fleet.s3_proxy.rules += [lost, refused]

    run.wait(message)
    until(lambda: run.keys_of_batches() == [])

    assert (lost.num_met, refused.num_met) == (1, 1)
    run.prove()


def test_credentials_that_run_out_cost_no_prompt(fleet: Fleet, busy: Busy) -> None:
    run, message = busy
    rule = Rule("", f"/{run.name}/(data|commits)/", status=403, code="ExpiredToken", num_left=3)
    fleet.s3_proxy.rules.append(rule)

    run.wait_with_supervisor(KEPT_SLOT, message, timeout_s=90)

    assert rule.num_met == 3
    run.prove()
    assert run.commit(message).rejected == []
    assert run.num_made_twice() == 0


@pytest.mark.parametrize("mode", [Mode.REFUSE, Mode.RESET, Mode.LOSE_REPLY, Mode.FREEZE])
def test_a_batch_that_ends_while_s3_is_away_is_committed_when_it_is_back(
    fleet: Fleet, busy: Busy, mode: Mode
) -> None:
    run, message = busy
    num_asked = len(run.asked())

    fleet.s3_proxy.set(mode)
    until(lambda: fleet.engine().running() == {})
    threading.Event().wait(3)
    fleet.s3_proxy.set(Mode.PASS)
    run.wait_with_supervisor(KEPT_SLOT, message, timeout_s=120)

    run.prove()
    assert len(run.asked()) == num_asked


def test_a_worker_killed_between_data_and_commit_leaves_rows_that_nobody_sees(
    fleet: Fleet, run: FaultRun
) -> None:
    worker = run.worker("w1")
    rule = Rule("PUT", f"/{run.name}/commits/", status=503, code="SlowDown", num_left=-1)
    fleet.s3_proxy.rules.append(rule)
    (message,) = run.add(prompts(run, 4, "tokens=20"))
    until(lambda: rule.num_met > 0)

    worker.kill()
    (orphan,) = [key for key, _ in run.store.list(RunKeys(run.name).all_data)]
    assert not run.is_done([message])
    fleet.s3_proxy.rules.clear()
    run.worker("w2")
    run.wait(message)

    run.prove()
    assert run.commit(message).data_key != orphan
    assert run.num_made_twice() == 0


def test_only_one_condition_is_ever_sent_and_no_body_in_chunks(fleet: Fleet, busy: Busy) -> None:
    run, message = busy

    run.wait(message)

    puts = [r for r in fleet.s3_proxy.requests if r.method == "PUT" and run.name in r.path]
    conditions = {put.headers.get("if-none-match") for put in puts if "progress" not in put.path}
    assert conditions == {"*"}
    assert not [put for put in puts if "if-match" in put.headers]
    assert not [put for put in puts if "x-amz-sdk-checksum-algorithm" in put.headers]
    assert not [put for put in puts if "chunked" in put.headers.get("content-encoding", "")]


def test_a_store_that_ignores_the_condition_is_refused_at_the_start(
    fleet: Fleet, run: FaultRun
) -> None:
    run.plan.add(prompts(run, 1, "never"))
    fleet.s3_proxy.rules.append(
        Rule("PUT", f"/{run.name}/probe/", status=200, code="", num_left=-1)
    )

    code, said = run_worker(run.settings(fleet.engine()))

    assert code == 1
    assert "If-None-Match" in said
    assert "Traceback" not in said


def test_a_store_that_may_not_be_written_is_told_at_the_start(fleet: Fleet, run: FaultRun) -> None:
    run.plan.add(prompts(run, 1, "never"))
    fleet.s3_proxy.rules.append(Rule("PUT", ".", status=403, code="AccessDenied", num_left=-1))

    code, said = run_worker(run.settings(fleet.engine()))

    assert code == 1
    assert "AccessDenied" in said
    assert "Traceback" not in said


def test_a_wrong_secret_is_told_at_the_start(fleet: Fleet, run: FaultRun) -> None:
    run.plan.add(prompts(run, 1, "never"))
    settings = dataclasses.replace(run.settings(fleet.engine()), s3_secret_key="wrong")

    code, said = run_worker(settings)

    assert code == 1
    assert "check DFLASH_S3_ACCESS_KEY" in said


def test_commits_on_several_pages_are_read_once_each_and_in_order(
    fleet: Fleet, run: FaultRun
) -> None:
    batches = [f"{number:016x}" for number in range(1100)]
    for batch in batches:
        run.store.put_new(RunKeys(run.name).commit(0, batch), b"{}")

    found = [batch for _, batch in committed_batches(run.store, run.name)]
    later = [
        batch
        for _, batch in committed_batches(
            run.store, run.name, after=RunKeys(run.name).commit(0, batches[499])
        )
    ]

    assert found == batches
    assert later == batches[500:]
