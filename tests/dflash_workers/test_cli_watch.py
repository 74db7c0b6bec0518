"""The verbs of who watches, as a person calls them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from dflash_workers.claims import Timing
from dflash_workers.cli_watch import app
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.settings import Settings
from dflash_workers.worker import Worker
from tests.dflash_workers.conftest import OPTIONS
from tests.planned import Plan, prompt

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("verb", ["status", "flower"])
def test_every_verb_explains_itself_with_an_example(verb: str) -> None:
    shown = CliRunner().invoke(app, [verb, "--help"])

    assert shown.exit_code == 0
    assert "dflash-fleet " + verb in shown.output


def test_a_look_loads_nothing_of_what_sends_works_or_exports() -> None:
    unwanted = ["celery.app", "kombu", "boto3", "numpy", "prometheus_client", "transformers"]
    program = "import sys, fleet; fleet.verbs_of('dflash_workers.cli_watch'); "
    program += f"print([name for name in {unwanted} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.strip() == "[]", done.stderr


def test_status_says_what_s3_and_redis_know(
    plan: Plan, hints: Hints, settings: Settings, make_worker: Callable[..., Worker]
) -> None:
    messages = plan.add([prompt("say:a"), prompt("say:b")], [prompt("say:c")])
    hints.offer(messages, plan.queue)
    worker = make_worker("here", dataclasses.replace(OPTIONS, timing=Timing()))
    claim = worker.site.claims.claim(messages[0])
    assert claim is not None
    environ = {k: v for k, v in settings.environment().items() if v}

    shown = CliRunner().invoke(app, ["status", "--json"], env=environ)

    assert shown.exit_code == 0, shown.output
    facts = orjson.loads(shown.stdout)
    assert (facts["total"], facts["completed"], facts["failed"]) == (3, 0, 0)
    assert (facts["num_queued"], facts["num_pending"], facts["num_inflight"]) == (2, 1, 1)
    assert facts["status"] == "running"


def test_flower_never_starts_without_a_login(settings: Settings) -> None:
    environ = {k: v for k, v in settings.environment().items() if v}

    for login in ({}, {"DFLASH_FLOWER_LOGIN": "admin"}, {"DFLASH_FLOWER_LOGIN": "admin:"}):
        shown = CliRunner().invoke(app, ["flower"], env=environ | login)

        assert isinstance(shown.exception, BadInput)
        assert "DFLASH_FLOWER_LOGIN" in str(shown.exception)


def test_a_person_gets_a_screen_and_no_object(plan: Plan, settings: Settings) -> None:
    plan.add([prompt("say:a")])
    environ = {k: v for k, v in settings.environment().items() if v}

    shown = CliRunner().invoke(app, ["status"], env=environ)

    assert shown.exit_code == 0, shown.output
    assert "0 completed, 0 rejected of 1" in shown.output

    both = CliRunner().invoke(app, ["status", "--watch", "--json"], env=environ)
    assert isinstance(both.exception, BadInput)
