"""deploy/kubernetes: valid, and arranged so that no worker loses its engine before its work."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from dflash_workers.contract.metrics import METRICS
from dflash_workers.contract.settings import load_settings
from tests.commands import check_command

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
VERSIONS = ["1.29", "1.37"]  # the first with native sidecars, and a late one
CUSTOM = ("keda.sh/",)  # kinds that Kubernetes' own schemas don't know
ENGINE_SECONDS = 60  # what an engine takes to end


@cache
def objects() -> list[dict[str, Any]]:
    return [
        found
        for name in KUSTOMIZATION["resources"]
        for found in yaml.safe_load_all((FOLDER / name).read_text())
    ]


def the(kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects() if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def pods() -> dict[str, dict[str, Any]]:
    return {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects()
        if o["kind"] == "Deployment"
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_the_kustomization_names_every_file() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}

    assert set(KUSTOMIZATION["resources"]) == files


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_that_kubernetes_knows_to_its_last_field(version: str) -> None:
    known = [o for o in objects() if not o["apiVersion"].startswith(CUSTOM)]

    for found in known:
        kubernetes_validate.validate(found, version, strict=True)

    assert len(known) > 8


def test_every_command_is_one_that_there_is(tmp_path: Path) -> None:
    settings = the("ConfigMap", "dflash-fleet")["data"]
    load_settings({}, settings, tmp_path / "none.toml")

    verbs = {
        container["name"]: check_command(
            [re.sub(r"\$\((\w+)\)", "name", word) for word in container["args"]]
        )
        for pod in pods().values()
        for container in containers(pod)
        if container["image"].startswith("dflash-fleet/")
    }

    assert verbs == {
        "worker": "worker",
        "tokenizer": "tokenize",
        "exporter": "exporter",
        "flower": "flower",
    }


def test_the_engine_is_up_before_its_worker_and_ends_after_it() -> None:
    pod = pods()["worker"]
    (engine,) = pod["initContainers"]

    assert engine["restartPolicy"] == "Always"  # a native sidecar: started first, ended last
    assert "startupProbe" in engine  # which the worker's start waits for
    assert "lifecycle" not in engine
    assert pod["terminationGracePeriodSeconds"] > ENGINE_SECONDS


def test_engine_and_worker_agree_on_what_runs_at_once() -> None:
    pod = pods()["worker"]
    limit = re.search(r"--max-running-requests=(\d+)", str(pod["initContainers"][0]["args"]))
    in_flight = re.search(r"--max-in-flight=(\d+)", str(pod["containers"][0]["args"]))

    assert limit and in_flight
    assert limit[1] == in_flight[1]


def test_an_engine_is_told_no_secret_and_asked_by_its_own_pod_alone() -> None:
    (engine,) = pods()["worker"]["initContainers"]

    assert engine["envFrom"] == [{"configMapRef": {"name": "dflash-fleet"}}]
    assert "--host=127.0.0.1" in engine["args"]


def test_no_secret_stands_in_a_file() -> None:
    assert [o for o in objects() if o["kind"] == "Secret"] == []
    for path in FOLDER.glob("*.yaml"):
        lines = [line.partition("#")[0] for line in path.read_text().splitlines()]
        assert not re.search(r"(?i)(password|secret_key|redis_url)\s*:\s*\S", "\n".join(lines))


@pytest.mark.parametrize("name", ["worker", "tokenizer", "exporter", "flower"])
def test_a_pod_has_no_rights_that_it_has_no_use_for(name: str) -> None:
    pod = pods()[name]

    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert re.search(r":v?\d+\.\d+\.\d+$", container["image"])


def test_the_fleet_grows_with_what_waits_and_what_is_worked_on() -> None:
    scaled = the("ScaledObject", "worker")["spec"]
    (trigger,) = scaled["triggers"]
    asked = set(re.findall(r"dflash_\w+", trigger["metadata"]["query"]))
    run = the("ConfigMap", "dflash-fleet")["data"]["DFLASH_RUN"]

    assert asked <= set(METRICS)
    assert {"dflash_fleet_pending_batches", "dflash_fleet_inflight_batches"} <= asked
    assert set(re.findall(r'run="(\w+)"', trigger["metadata"]["query"])) == {run}
    assert trigger["type"] == "prometheus"
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert scaled["scaleTargetRef"]["name"] in pods()
    assert scaled["fallback"]["behavior"] == "currentReplicasIfHigher"


def test_nothing_may_speak_or_listen_that_no_policy_names() -> None:
    policies = {o["metadata"]["name"]: o["spec"] for o in objects() if o["kind"] == "NetworkPolicy"}
    closed = policies.pop("nothing")
    labels = set(pods())

    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for spec in policies.values():
        for wanted in spec["podSelector"].get("matchExpressions", []):
            assert set(wanted["values"]) <= labels
    assert [name for name, spec in policies.items() if "ingress" in spec] == ["metrics"]
    assert policies["metrics"]["ingress"][0]["from"]


def test_a_drain_leaves_most_workers_in_place() -> None:
    budget = the("PodDisruptionBudget", "worker")["spec"]
    (template,) = [
        o["spec"]["template"]
        for o in objects()
        if o["metadata"]["name"] == "worker" and o["kind"] == "Deployment"
    ]

    assert budget["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert budget["maxUnavailable"] == "25%"
