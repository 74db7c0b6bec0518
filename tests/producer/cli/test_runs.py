from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dflash_workers.contract.control import Control, RunState
from dflash_workers.contract.errors import Conflict
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import BatchMessage, Json
from dflash_workers.contract.settings import Settings
from producer.cli.runs import app
from tests.producer.campaign import Campaign, prompts

ROOT = Path(__file__).parents[3]


@pytest.fixture
def batches(
    campaign: Campaign, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> list[BatchMessage]:
    """Three planned batches of a run that the environment names."""
    for variable, value in settings.environment().items():
        monkeypatch.setenv(variable, value)
    return campaign.plan(*[prompts(f"p{n}") for n in range(3)])


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def verb(*arguments: str) -> Json:
    """A verb's report."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_paused_run_goes_on_where_it_was_when_it_is_resumed(
    campaign: Campaign, batches: list[BatchMessage]
) -> None:
    campaign.commit(batches[0])
    campaign.hints.redis.zadd(
        campaign.hints.keys.inflight(campaign.run), {f"0/{batches[1].batch}": 1}
    )

    paused = verb("pause")
    resumed = verb("resume")

    assert paused == {"run": campaign.run, "state": "paused"}
    assert resumed == {"run": campaign.run, "state": "active", "num_sent": 1}
    assert campaign.hints.queued_names(campaign.queue) == {f"{campaign.run}/0/{batches[2].batch}"}


@pytest.mark.usefixtures("batches")
def test_a_cancelled_run_stays_cancelled(campaign: Campaign) -> None:
    cancelled = verb("cancel", "--yes")

    assert cancelled == {"run": campaign.run, "state": "cancelled", "num_prompts_left": 3}
    assert verb("cancel", "--yes")["state"] == "cancelled"
    with pytest.raises(Conflict, match="is cancelled"):
        verb("resume")


@pytest.mark.usefixtures("batches")
def test_nobody_is_there_to_confirm_a_cancel(campaign: Campaign) -> None:
    result = invoke("cancel")

    assert result.exit_code == 2
    assert "--yes" in result.output
    assert Control(campaign.store, campaign.run).state() is RunState.ACTIVE


@pytest.mark.slow
@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize(
    ("answer", "state"), [(b"n\n", RunState.ACTIVE), (b"y\n", RunState.CANCELLED)]
)
def test_on_a_terminal_a_cancel_asks_first(
    campaign: Campaign, answer: bytes, state: RunState
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, answer)

    subprocess.run(
        [sys.executable, "-m", "fleet", "cancel"],
        cwd=ROOT,
        stdin=theirs,
        capture_output=True,
        timeout=120,
    )
    os.close(ours)
    os.close(theirs)

    assert Control(campaign.store, campaign.run).state() is state


@pytest.mark.usefixtures("batches")
def test_sealing_ends_the_plan(campaign: Campaign) -> None:
    assert verb("seal") == {
        "run": campaign.run,
        "num_prompts": 3,
        "num_prompts_done": 0,
        "num_batches": 3,
        "num_batches_done": 0,
        "sealed": True,
    }


@pytest.mark.usefixtures("batches")
def test_reconcile_sends_after_two_looks(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.cli.runs.LEASE_S", 0.05)
    monkeypatch.setattr("producer.reconcile.LEASE_S", 0.05)

    found = verb("reconcile")

    assert found == {"run": campaign.run, "state": "active", "num_sent": 3}


def test_gc_counts_first_and_deletes_when_told(
    campaign: Campaign, batches: list[BatchMessage]
) -> None:
    campaign.commit(batches[0])
    campaign.store.put_new(RunKeys(campaign.run).data(0, batches[0].batch, "lost"), b"12345")

    counted, deleted, left = verb("gc"), verb("gc", "--delete"), verb("gc")

    assert counted == {
        "run": campaign.run,
        "num_objects": 1,
        "num_bytes": 5,
        "kinds": {"lost_data": 1},
        "deleted": False,
    }
    assert deleted == counted | {"deleted": True}
    assert (left["num_objects"], left["kinds"]) == (0, {})


@pytest.mark.usefixtures("batches")
def test_all_runs_are_listed_even_beside_a_broken_one(campaign: Campaign) -> None:
    campaign.store.replace(RunKeys("broken").spec, b"{}")

    listed = verb("runs")["runs"]
    shown = invoke("runs").stdout

    assert (listed[campaign.run]["state"], listed[campaign.run]["num_prompts"]) == ("active", 3)
    assert "missing field" in listed["broken"]["error"]
    assert "state active" in shown
    assert "broken" in shown


@pytest.mark.parametrize("name", ["seal", "pause", "resume", "cancel", "reconcile", "gc", "runs"])
def test_every_verb_shows_an_example(name: str) -> None:
    result = invoke(name, "--help")

    assert result.exit_code == 0
    assert f"Example: dflash-fleet {name}" in result.stdout
