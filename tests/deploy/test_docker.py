"""docker/: what can be said of images and compose files without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import redis

from dflash_workers.contract.settings import load_settings
from dflash_workers.embedded import free_ports
from tests.commands import check_command
from tests.faults.processes import Process, until
from tests.programs import program

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
STEPS = sorted((DOCKER / "steps").glob("*.sh"))
FILES = {"gpu": ["compose.yaml"], "cpu": ["compose.yaml", "compose.cpu.yaml"]}
PASSWORD = "CanaryOfRedis"


@cache
def composed(kind: str) -> dict[str, Any]:
    """The compose files as Docker Compose itself reads them, merged and filled in."""
    lines = (DOCKER / "example.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if line and line[0] != "#")
    values |= {name: "Canary" for name, value in values.items() if not value}
    values |= {"REDIS_PASSWORD": PASSWORD, "FLOWER_LOGIN": "admin:Canary"}
    argv = [program("docker-compose"), "--env-file", "/dev/null", "--profile", "*"]
    argv += [word for name in FILES[kind] for word in ("-f", str(DOCKER / name))]
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere"} | values
    done = subprocess.run(
        [*argv, "config", "--format", "json"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def services(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from composed(kind)["services"].items()


def test_the_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    done = subprocess.run(
        [program("hadolint"), str(DOCKER / "Dockerfile")], capture_output=True, text=True
    )

    assert done.stdout + done.stderr == ""


def test_nobody_is_root_in_an_image_and_no_base_moves() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    own = {re.search(r" AS ([\w-]+)", stage)[1]: stage for stage in stages}  # type: ignore[index]
    bases = re.findall(r"_IMAGE=(\S+)", DOCKERFILE)

    for name in ("runtime", "node"):
        assert re.findall(r"^USER (\S+)", own[name], re.MULTILINE)[-1] == "10001"
    for stage in own.values():
        parent = stage.split()[0]
        assert parent in own or parent in ("${PYTHON_IMAGE}", "${ENGINE_IMAGE}")
    assert all(re.search(r":v?\d+\.\d+\.\d+", base) for base in bases)
    assert len(bases) == 2


def test_every_command_of_an_image_is_one_that_there_is() -> None:
    commands = [json.loads(found) for found in re.findall(r"^CMD (\[.+\])$", DOCKERFILE, re.M)]

    for words in commands:
        if words != ["--help"]:
            check_command(words)

    assert len(commands) == 8


@pytest.mark.parametrize("kind", FILES)
def test_every_command_of_a_service_is_one_that_there_is(kind: str) -> None:
    found = {
        name: check_command(service["command"])
        for name, service in services(kind)
        if service["image"].startswith("dflash-fleet/") and service.get("command")
    }

    assert found == {
        "node": "node start",
        "tokenizer": "tokenize",
        "trainer": "train",
    }


@pytest.mark.parametrize("kind", FILES)
def test_every_service_of_ours_gets_settings_that_there_are(kind: str, tmp_path: Path) -> None:
    ours = {n: s for n, s in services(kind) if s["image"].startswith("dflash-fleet/")}

    for service in ours.values():
        settings = load_settings({}, service["environment"], tmp_path / "none.toml")
        assert PASSWORD in settings.redis_url

    assert set(ours) == {
        *("bucket", "exporter", "flower", "node", "producer", "tokenizer", "trainer"),
    }


@pytest.mark.parametrize("kind", FILES)
def test_services_are_built_from_targets_that_there_are_or_pinned(kind: str) -> None:
    targets = set(re.findall(r"^FROM \S+ AS ([\w-]+)", DOCKERFILE, re.MULTILINE))

    for name, service in services(kind):
        if "build" in service:
            assert service["build"]["target"] in targets, name
        else:
            assert re.search(r":v?\d+\.\d+", service["image"]), name


@pytest.mark.parametrize("kind", FILES)
def test_nothing_listens_but_on_this_machines_loopback(kind: str) -> None:
    published = [port for _, service in services(kind) for port in service.get("ports", [])]

    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    assert [name for name, s in services(kind) if s.get("network_mode") == "host"] == ["flower"]


@pytest.mark.parametrize("kind", FILES)
def test_no_secret_is_on_a_command_line(kind: str) -> None:
    for name, service in services(kind):
        assert "Canary" not in json.dumps([service.get("command"), service.get("entrypoint")]), name


def test_a_laptop_asks_for_no_gpu_and_a_gpu_box_for_all() -> None:
    gpu, cpu = composed("gpu")["services"]["node"], composed("cpu")["services"]["node"]

    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["count"] == -1
    assert not cpu.get("deploy")
    assert "--cpu" in cpu["command"]


def test_redis_of_the_compose_file_wants_a_password_and_keeps_what_it_is_told(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    config = tmp_path / "redis.conf"
    content = composed("gpu")["configs"]["redis_conf"]["content"]
    config.write_text(content.replace("dir /data", f"dir {tmp_path}"))
    argv = [program("redis-server", install="apt-get install redis-server"), str(config)]
    argv += ["--port", str(port), "--bind", "127.0.0.1"]
    server = Process("redis", argv, tmp_path, {})

    def answers() -> bool:
        try:
            return bool(redis.Redis(port=port, password=PASSWORD).ping())
        except redis.ConnectionError:
            return False

    server.start()
    try:
        until(answers, 30, "Redis' start")
        with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with redis.Redis(port=port, password=PASSWORD) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    finally:
        server.close()


def test_every_flag_of_the_s3_server_is_one_of_its_own() -> None:
    words = composed("gpu")["services"]["s3"]["command"]
    helped = subprocess.run([program("weed"), "help", words[0]], capture_output=True, text=True)
    known = set(re.findall(r"^\s+-([\w.]+)", helped.stdout + helped.stderr, re.MULTILINE))

    assert len(known) > 50
    assert {word.lstrip("-").split("=")[0] for word in words[1:]} - known == set()


def test_the_s3_servers_identities_are_what_it_reads() -> None:
    (identity,) = json.loads(composed("gpu")["configs"]["s3_identities"]["content"])["identities"]

    assert identity["credentials"] == [{"accessKey": "Canary", "secretKey": "Canary"}]


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.name)
def test_a_step_is_a_clean_script(path: Path) -> None:
    done = subprocess.run([program("shellcheck"), str(path)], capture_output=True, text=True)

    assert done.stdout == ""
    assert os.access(path, os.X_OK)
    assert f"steps/{path.name}" in DOCKERFILE


@pytest.mark.slow
def test_the_step_of_all_images_makes_a_venv_with_the_whole_project(tmp_path: Path) -> None:
    _copy_as_the_dockerfile_does(tmp_path)
    # Its dependencies are those of this very venv.
    environ = os.environ | {"PIP_NO_DEPS": "1", "PIP_NO_COMPILE": "1"}
    step = tmp_path / "docker" / "steps" / "install-fleet.sh"

    subprocess.run([str(step), str(tmp_path / "venv")], env=environ, check=True)

    listing = "import importlib.metadata as m; print(*m.files('dflash-fleet'), sep='\\n')"
    python = tmp_path / "venv" / "bin" / "python"
    files = subprocess.run([str(python), "-c", listing], capture_output=True, text=True).stdout
    assert (tmp_path / "venv" / "bin" / "dflash-fleet").exists()
    for name in ("fleet.py", "celeryconfig.py", "dflash_workers/claims.lua", "producer/api.py"):
        assert name in files.splitlines()


def _copy_as_the_dockerfile_does(folder: Path) -> None:
    stage = DOCKERFILE.partition(" AS source")[2].partition("\nFROM ")[0]
    for words in re.findall(r"^COPY (.+)$", stage, re.MULTILINE):
        *names, target = words.split()
        for name in names:
            there = folder / target / name if target == "./" else folder / target
            there.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, there)
            else:
                shutil.copy(ROOT / name, there)


class Answers(BaseHTTPRequestHandler):
    """With the status that the path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("status", "code"), [(200, 0), (401, 0), (503, 1), (None, 1)])
def test_the_health_check_says_whether_somebody_answers(status: int | None, code: int) -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if status else free_ports(1)[0]
        url = f"http://127.0.0.1:{port}/{status}"

        done = subprocess.run([sys.executable, str(DOCKER / "healthy.py"), url])

        server.shutdown()
    assert done.returncode == code
