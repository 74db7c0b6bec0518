"""One SGLang or vLLM server as a child process: how it is started, and when it is ready.

Started by node/lane.py and demo.py, kept from outliving us by launcher.py, spoken to over HTTP only
(engine.py), for its torch is not ours. Invariant: an engine that can't serve is reported with the
last lines of its own log, never by silence. The CPU profile needs the venv of engine_venv.py and
cpu_engine/, the stand-in for SGLang's CUDA-only kernels; on a GPU the flags are the engine's own.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from dflash_workers.contract.errors import BadInput, EngineFailed
from dflash_workers.contract.records import Json
from dflash_workers.engine_venv import CPU_ENGINE
from dflash_workers.launcher import Child, spawn

POLL_S = 0.5
PROBE_TIMEOUT_S = 5.0  # one answer; a server that loads weights may accept and stay silent
LOG_LINES = 25


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one server serves, and with how much of the machine."""

    python: Path  # of the engine's own venv, never ours
    model_dir: Path
    port: int
    host: str = "127.0.0.1"  # SGLang has no password unless extra_args give it one
    cpu: bool = False
    num_threads: int = 2  # CPU only; unset, torch takes every core in every process
    max_running_requests: int = 48
    max_total_tokens: int = 0  # KV cache slots; 0: what the memory holds (not on a CPU)
    dtype: str = "auto"
    extra_args: tuple[str, ...] = ()
    kind: str = "sglang"  # or vllm
    gpu: str = ""  # the UUID of its only GPU; empty: what CUDA_VISIBLE_DEVICES says

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://{self.host}:{self.port}"

    @property
    def argv(self) -> list[str]:
        """The command line."""
        where = ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        if self.kind == "vllm":
            program = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model_dir)]
            return [str(self.python), *program, *where, *self.extra_args]
        return [
            str(self.python),
            *("-m", "sglang.launch_server"),
            *("--model-path", str(self.model_dir)),
            *where,
            *("--max-running-requests", str(self.max_running_requests)),
            *(("--max-total-tokens", str(self.max_total_tokens)) if self.max_total_tokens else ()),
            *(("--device", "cpu", "--attention-backend", "torch_native") if self.cpu else ()),
            *self.extra_args,
        ]


def start_engine(config: EngineConfig, log_path: Path) -> Child:
    """Start the server; it is not ready yet. Raises BadInput where its port is taken."""
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        raise BadInput(
            f"the engine can't listen on {config.host}:{config.port}: {error.strerror}: "
            "stop what uses the port, or choose another"
        ) from error
    return spawn(config.argv, name="engine", log_path=log_path, environ=_environ(config))


def wait_until_ready(
    child: Child,
    url: str,
    timeout_s: float,
    on_wait: Callable[[float], None] = lambda waited_s: None,
) -> Json:
    """Block until the server answers /health; return its /server_info.

    `on_wait` is told the seconds waited so far, about twice a second. Raises EngineFailed with the
    log's last lines when the server dies or `timeout_s` is over; stopping it is the caller's.
    """
    started = time.monotonic()
    while (waited_s := time.monotonic() - started) < timeout_s:
        answer = ask_server_info(url)
        if child.poll() is not None:  # asked last: another server may answer on its port
            raise EngineFailed(
                f"the engine died at start (exit status {child.poll()}); its last lines:\n"
                f"{child.tail(LOG_LINES)}"
            )
        if answer is not None:
            return answer
        on_wait(waited_s)
        time.sleep(POLL_S)
    raise EngineFailed(
        f"the engine never got ready within {timeout_s:g} s; its last lines:\n"
        f"{child.tail(LOG_LINES)}"
    )


def is_healthy(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Whether /health answers 200. SGLang's has a token generated, unless answers come anyway."""
    return _get(url, "/health", timeout_s) is not None


def ask_server_info(url: str) -> Json | None:
    """What a healthy server says of itself; None while there is none.

    vLLM has no /server_info: what it serves is all that is known of it then.
    """
    if not is_healthy(url):
        return None
    body = _get(url, "/server_info", PROBE_TIMEOUT_S)
    models = _get(url, "/v1/models", PROBE_TIMEOUT_S) if body is None else None
    try:
        if body is not None:
            info: Json = orjson.loads(body)
            return info
        return {"model_path": orjson.loads(models)["data"][0]["id"]} if models else None
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None


def _get(url: str, path: str, timeout_s: float) -> bytes | None:
    """The body of a bare GET that was answered with 200: unlike urllib's it passes no proxy."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=timeout_s)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.read() if reply.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _environ(config: EngineConfig) -> dict[str, str]:
    """Ours, handed on without our own settings: the engine has no business with the S3 keys."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DFLASH_")}
    environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # the model is a local folder
    if config.gpu:
        environ["CUDA_VISIBLE_DEVICES"] = config.gpu
    if config.cpu:
        environ |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(config.num_threads),
            # Threads that spin while they wait starve each other on a shared machine: 2 tokens/s
            # instead of 11 on two busy cores.
            "OMP_WAIT_POLICY": "passive",
            "PYTHONPATH": str(CPU_ENGINE),
        }
    return environ
