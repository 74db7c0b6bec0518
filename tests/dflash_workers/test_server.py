"""server.py: an engine that can't serve says why; the real one serves.

What is tested of the process (it dies, is silent, its port is taken) is tested with stand-ins that
are real processes and real HTTP servers; the slow test at the end starts SGLang itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.errors import BadInput, EngineFailed, Missing
from dflash_workers.server import EngineConfig, start_engine, wait_until_ready

# Called as an engine is: -m sglang.launch_server --model-path M ... --port P ...
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked < 3 else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_that_gets_ready_returns_its_info(tmp_path: Path) -> None:
    config = _stand_in(tmp_path, SERVER)
    waits: list[float] = []

    with start_engine(config, tmp_path / "log") as child:
        info = wait_until_ready(child, config.url, 30, waits.append)

    assert info["argv"][:4] == ["-m", "sglang.launch_server", "--model-path", str(tmp_path)]
    assert len(waits) >= 2
    assert waits == sorted(waits)


def test_the_engine_gets_no_secrets_and_the_cpu_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_S3_SECRET_KEY", "secret")
    config = _stand_in(tmp_path, SERVER)

    with start_engine(config, tmp_path / "log") as child:
        info = wait_until_ready(child, config.url, 30)

    environ = info["environ"]
    assert not [name for name in environ if name.startswith("DFLASH_")]
    assert (environ["SGLANG_USE_CPU_ENGINE"], environ["OMP_NUM_THREADS"]) == ("1", "2")
    assert (Path(environ["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()
    assert info["argv"][-4:] == ["--device", "cpu", "--attention-backend", "torch_native"]


def test_an_engine_that_dies_at_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    config = _stand_in(tmp_path, "import sys; print('loading'); sys.exit('out of memory, alas')")

    with (
        start_engine(config, tmp_path / "log") as child,
        pytest.raises(EngineFailed, match=r"died at start \(exit status 1\)(.|\n)*memory, alas"),
    ):
        wait_until_ready(child, config.url, 30)


def test_an_engine_that_never_gets_ready_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    config = _stand_in(tmp_path, "import time; print('thinking', flush=True); time.sleep(300)")

    with (
        start_engine(config, tmp_path / "log") as child,
        pytest.raises(EngineFailed, match=r"never got ready within 1.5 s(.|\n)*thinking"),
    ):
        wait_until_ready(child, config.url, 1.5)


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = _stand_in(tmp_path, SERVER)

    with (
        socket.create_server((config.host, config.port)),
        pytest.raises(BadInput, match=f"{config.port}: Address already in use"),
    ):
        start_engine(config, tmp_path / "log")


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path) -> None:
    config = EngineConfig(tmp_path / "bin" / "python", tmp_path, _free_port())

    with pytest.raises(Missing, match="engine can't be started"):
        start_engine(config, tmp_path / "log")


@pytest.mark.slow
def test_the_real_engine_answers_in_ids_and_stops(
    tmp_path: Path, engine_python: Path, smollm2_dir: Path
) -> None:
    config = EngineConfig(engine_python, smollm2_dir, _free_port(), cpu=True, max_total_tokens=4096)
    tokenizer = load_tokenizer(str(smollm2_dir))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    input_ids = tokenizer.encode(prompt, add_special_tokens=False)

    with start_engine(config, tmp_path / "log") as child:
        info = wait_until_ready(child, config.url, 400)
        reply = _generate(config.url, input_ids, tokenizer.eos_token_id)

    assert info["model_path"] == str(smollm2_dir)
    assert reply["output_ids"][-1] == tokenizer.eos_token_id
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert reply["meta_info"]["prompt_tokens"] == len(input_ids)
    assert reply["text"] == tokenizer.decode(reply["output_ids"][:-1])


def _generate(url: str, input_ids: list[int], stop_id: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 64, "stop_token_ids": [stop_id]}
    request = urllib.request.Request(
        f"{url}/generate",
        json.dumps({"input_ids": input_ids, "sampling_params": sampling}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return dict(json.load(reply))


def _stand_in(tmp_path: Path, script: str) -> EngineConfig:
    """An engine's python that runs `script`, whatever module it is told to run."""
    (tmp_path / "engine.py").write_text(script)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/engine.py "$@"\n')
    os.chmod(python, 0o755)
    return EngineConfig(python, tmp_path, _free_port(), cpu=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
