"""What Prometheus is told of a fleet: by names of the table, true, and bounded."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from dflash_workers.contract.errors import StoreUnavailable
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.metrics import FLEET, METRICS
from dflash_workers.contract.prices import Price, Prices, store_prices
from dflash_workers.contract.store import Store
from dflash_workers.exporter import Exporter
from dflash_workers.exposition import Numbers, serve
from tests.dflash_workers.test_progress import batches, commit
from tests.planned import Plan

Scraped = dict[str, dict[tuple[str, ...], float]]


def scrape(port: int) -> Scraped:
    """By name, then the labels' values in the table's order."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in METRICS[sample.name].labels)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_every_number_of_the_fleet_can_be_scraped_and_is_true(
    plan: Plan, store: Store, hints: Hints, redis_client: redis.Redis, tmp_path: Path
) -> None:
    run, messages = plan.spec.run, plan.add(*batches(2, 2, 2))
    commit(store, messages[0], 1, 1)
    store_prices(store, run, Prices([Price("h200", 100.0)]))
    store.put_new(f"{RunKeys(run).train('t')}order/000000.json", b'{"num_shards": 0}')
    redis_client.lpush(hints.keys.dead("plan"), b'{"error": "e", "at": 1}')
    hints.offer(messages[1:], plan.queue)
    facts = {"state": "paused: engine", "process": "p", "kv_use": "0.25", "accept_length": "3.5"}
    redis_client.hset(hints.keys.worker("w"), mapping=facts)
    redis_client.expire(hints.keys.worker("w"), 60)
    exporter = Exporter(store, hints, [run], tmp_path / "progress.json")

    exporter.measure()
    seen = scrape(serve(exporter.read, "127.0.0.1", 0))

    assert set(seen) == {metric.name for metric in FLEET}
    assert seen["dflash_fleet_planned_prompts"] == {(run,): 6}
    assert seen["dflash_fleet_completed_prompts"] == {(run,): 1}
    assert seen["dflash_fleet_rejections"] == {(run, "why"): 1}
    assert seen["dflash_fleet_pending_batches"] == {(run,): 2}
    assert seen["dflash_fleet_queued_messages"] == {(run,): 2}
    assert seen["dflash_fleet_state"][(run, "running")] == 1
    assert sum(seen["dflash_fleet_state"].values()) == 1
    assert seen["dflash_fleet_workers"][(run, "paused")] == 1
    assert seen["dflash_fleet_kv_use_ratio"] == {(run,): 0.25}
    assert seen["dflash_fleet_cost_usd"][(run, "h200")] == pytest.approx(1.0, rel=0.01)
    assert seen["dflash_fleet_up"] == {(run, "redis"): 1, (run, "store"): 1}
    assert (tmp_path / "progress.json").read_bytes() == store.get(RunKeys(run).progress)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_while_s3_is_away_the_last_numbers_stand_and_it_is_said(
    plan: Plan, store: Store, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan.add(*batches(2))
    exporter = Exporter(store, hints, [plan.spec.run])
    exporter.measure()

    def away(_exporter: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr("dflash_workers.status.Overview.read", away)
    with pytest.raises(StoreUnavailable):
        exporter.measure()

    values = exporter.read().values
    assert values["dflash_fleet_up"][(plan.spec.run, "store")] == 0
    assert values["dflash_fleet_up"][(plan.spec.run, "redis")] == 1
    assert values["dflash_fleet_planned_prompts"] == {(plan.spec.run,): 2}


def test_only_what_stands_in_the_table_can_be_exposed() -> None:
    unknown, mislabelled = Numbers(), Numbers()
    unknown.put("dflash_fleet_prompt_ids", 1, "run")
    mislabelled.put("dflash_fleet_planned_prompts", 1, "run", "and the prompt")

    for numbers, error in ((unknown, KeyError), (mislabelled, AssertionError)):
        with pytest.raises(error):
            list(numbers.families())


def test_a_thousand_reasons_are_twenty_and_the_others(
    plan: Plan, store: Store, hints: Hints
) -> None:
    (first,) = plan.add(*batches(2))
    commit(store, first, 2)
    exporter = Exporter(store, hints, [plan.spec.run])
    exporter.measure()
    counts = {f"reason {number}": 1 for number in range(1000)}
    exporter._runs[0].overview._meter.counted.rejections = counts

    exporter.measure()

    found = exporter.read().values["dflash_fleet_rejections"]
    assert len(found) == 21
    assert sum(found.values()) == 1000
