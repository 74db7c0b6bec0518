from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import producer


def test_the_prompts_are_the_same_at_every_call_and_about_1_kb(tmp_path: Path) -> None:
    once = producer.write_prompts(tmp_path / "a", 200).read_bytes()

    assert once == producer.write_prompts(tmp_path / "b", 200).read_bytes()
    assert 900 < len(once) / 200 < 1200
    rows = [json.loads(line) for line in once.splitlines()]
    assert len({row["id"] for row in rows} & {f"prompt-{n}" for n in range(200)}) == 200
    assert len({row["messages"][0]["content"] for row in rows}) == 200


@pytest.mark.slow
def test_every_figure_is_measured_from_one_real_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert producer.main(["--rows", "500"]) == 0

    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    values = {figure["figure"]: figure["value"] for figure in figures}
    assert values.keys() == {
        *("producer.plan_rate", "producer.limit_rate", "producer.ratio_to_limit"),
        *("producer.rss_mb", "producer.replan_rate", "producer.replan_rss_mb"),
        *("producer.cpu_us", "producer.replan_cpu_us"),
    }
    rate, limit = values["producer.plan_rate"], values["producer.limit_rate"]
    assert values["producer.ratio_to_limit"] == pytest.approx(rate / limit)
    assert 0 < rate < limit
    assert values["producer.rss_mb"] > 30  # a Python with boto3 and Celery
