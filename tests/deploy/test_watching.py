"""What Prometheus and Grafana are given: right by their own tools, and asking for what exists."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_workers.contract.metrics import COUNTER, METRICS
from tests.programs import program

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
NAME = re.compile(r"\b(?:run:)?dflash_[a-z0-9_:]+")
COUNTED = re.compile(r"\b(?:rate|increase)\(\s*(dflash_[a-z0-9_]+)")


def promtool(*arguments: str) -> str:
    checker = program("promtool", install="apt-get install prometheus")
    done = subprocess.run(
        [checker, *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def names_in(query: str) -> set[str]:
    """Metric names: what braces and quotes hold are labels."""
    return set(NAME.findall(re.sub(r"\{[^}]*\}", "", query)))


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
)
def test_promtool_finds_no_fault(arguments: tuple[str, ...]) -> None:
    assert "SUCCESS" in promtool(*arguments)


def test_every_query_names_numbers_that_somebody_exposes() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = [*dashboard_queries(), *(rule["expr"] for rule in rules())]

    unknown = {name for query in asked for name in names_in(query)} - METRICS.keys() - recorded

    assert unknown == set()


def test_every_number_that_is_exposed_is_looked_at() -> None:
    asked = [*dashboard_queries(), *(rule["expr"] for rule in rules())]

    unseen = METRICS.keys() - {name for query in asked for name in names_in(query)}

    assert unseen <= {"dflash_fleet_gpu_hours", "dflash_fleet_committed_bytes"}


def test_counters_are_asked_for_their_growth() -> None:
    for query in dashboard_queries():
        for name in names_in(query) & METRICS.keys():
            if METRICS[name].kind == COUNTER:
                assert name in COUNTED.findall(query), query


def test_labels_are_those_of_the_table() -> None:
    for query in [*dashboard_queries(), *(rule["expr"] for rule in rules())]:
        for name, selector in re.findall(r"\b(dflash_[a-z0-9_]+)\{([^}]*)\}", query):
            labels = set(re.findall(r"([a-z_]+)\s*(?:=~|=|!=)", selector))
            assert labels <= set(METRICS[name].labels), query


def test_every_alert_says_what_it_saw_and_is_shown_to_fire() -> None:
    tests = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
    tested = json.dumps(tests)

    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["alert"] in tested, rule["alert"]


def test_panels_lie_beside_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()

    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
