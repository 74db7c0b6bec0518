"""The verbs bench and estimate, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.fleet_run import simulated_engine
from dflash_workers.bench_result import BenchResult
from dflash_workers.canary import Canary, canary_ids
from dflash_workers.cli_bench import app
from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, Corrupt, FleetError
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import SCHEMA_VERSION, Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.dflash_workers.test_bench_result import result
from tests.fake_engine import FakeEngine
from tests.planned import Plan, prompt


def call(*arguments: str) -> Json:
    """The verb's JSON. Raises what the verb does."""
    outcome = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return dict(json.loads(outcome.stdout.splitlines()[-1]))


def written(folder: Path, name: str, found: BenchResult) -> str:
    path = folder / name
    path.write_bytes(dump(found))
    return str(path)


@pytest.mark.slow
def test_what_bench_writes_is_what_estimate_reads(
    plan: Plan,
    settings: Settings,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan.add([prompt(f"say {n}") for n in range(30)])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    with simulated_engine(model_dir, tmp_path / "engine.log", max_running=64, step_ms=10) as url:
        flags = ["--max-in-flight=8", "--window-s=0.6", "--settle-s=0.2", f"--out={tmp_path}"]
        found = call("bench", f"--model={model_dir}", f"--engine-url={url}", *flags)

    told = call(
        "estimate", f"--bench={found['json']}", "--output-tokens=100", "--run", plan.spec.run
    )

    assert found["max_in_flight"] == 8
    assert found["tokens_per_s"] == pytest.approx(800, rel=0.25)
    assert told["prompts"] == 30
    assert told["prompts_per_s_per_gpu"] == pytest.approx(found["tokens_per_s"] / 100, rel=0.01)
    assert told["s3_bytes"] is None


@pytest.fixture
def bench_flags(
    plan: Plan,
    settings: Settings,
    engine: FakeEngine,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """Of a bench of an engine and a run, as short as can be."""
    plan.add([prompt("say")])
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    flags = ["--max-in-flight=1", "--window-s=0.1", "--settle-s=0", f"--out={tmp_path}"]
    return [f"--model={model_dir}", f"--engine-url={engine.url}", *flags]


def test_an_engine_known_to_be_of_another_model_is_not_measured(
    bench_flags: list[str], plan: Plan, store: Store, chat: Chat
) -> None:
    ids = canary_ids(chat)
    other = Canary(SCHEMA_VERSION, ids, [-90.0] * (len(ids) - 1), "included", {}, 0.0)
    store.put_new(RunKeys(plan.spec.run).canary, dump(other))

    with pytest.raises(BadInput, match="this engine is not tiny as run"):
        call("bench", *bench_flags)


def test_a_bench_before_any_worker_says_so_and_is_nothing_that_others_are_held_against(
    bench_flags: list[str], plan: Plan, store: Store
) -> None:
    found = call("bench", *bench_flags)

    assert "no worker has begun the run" in Path(found["json"]).read_text()
    assert not store.exists(RunKeys(plan.spec.run).canary)


def test_hours_money_and_break_even_come_from_two_sweeps(tmp_path: Path) -> None:
    plain = written(tmp_path, "plain.json", result((1, 447.0), (48, 17_720.0)))
    drafted = written(tmp_path, "drafted.json", result((1, 208.0), (48, 7_844.0), (64, 9_000.0)))

    told = call(
        "estimate",
        *(f"--bench={plain}", "--prompts=913786", "--output-tokens=1772", "--input-tokens=228"),
        *("--nodes=2", "--gpus-per-node=4", "--gpu=h200=3.2,b200=6", "--spot=0.35"),
        *(f"--drafted={drafted}", "--accept-length=4.52", "--hidden-size=5120"),
    )

    assert told["prompts_per_s_per_gpu"] == 10.0
    assert told["gpu_hours"] == pytest.approx(25.38, abs=0.01)
    assert [row["hours"] for row in told["durations"]] == pytest.approx([6.346, 3.173], abs=0.001)
    assert told["costs"][0]["usd"] == pytest.approx(81.2, abs=0.1)
    assert told["costs"][1]["spot_usd"] == pytest.approx(53.3, abs=0.1)
    assert told["hidden_state_bytes"] == 913_786 * 2000 * 5 * 5120 * 2
    by_flight = {row["in_flight"]: row for row in told["drafter"]}
    assert by_flight.keys() == {1, 48}
    assert by_flight[48]["break_even_accept_length"] == pytest.approx(2.259, abs=0.001)
    assert by_flight[48]["speedup"] == pytest.approx(2.0, abs=0.01)


def test_people_see_one_line_per_row(tmp_path: Path) -> None:
    plain = written(tmp_path, "plain.json", result((48, 17_720.0)))
    flags = ["--prompts=1000", "--output-tokens=100", "--gpu=h200=3.2", "--nodes=2"]

    outcome = CliRunner().invoke(app, ["estimate", f"--bench={plain}", *flags])

    assert outcome.exit_code == 0
    lines = outcome.stdout.splitlines()
    assert sum(line.startswith("duration num nodes") for line in lines) == 2
    assert any(line.startswith("cost gpu h200") for line in lines)


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        (["--bench=nowhere.json", "--prompts=1", "--output-tokens=1"], BadInput, "nowhere.json"),
        (["--bench={garbled}", "--prompts=1", "--output-tokens=1"], Corrupt, "BenchResult"),
        (["--bench={plain}", "--prompts=1"], BadInput, "--output-tokens"),
        (["--bench={plain}", "--output-tokens=1"], BadInput, "--prompts"),
        ([], BadInput, "no run given"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, flags: list[str], error: type[FleetError], said: str
) -> None:
    (tmp_path / "garbled.json").write_text("{}")
    names = {
        "plain": written(tmp_path, "plain.json", result((48, 17_720.0))),
        "garbled": str(tmp_path / "garbled.json"),
    }

    with pytest.raises(error, match=said):
        call("estimate", *(flag.format(**names) for flag in flags))
