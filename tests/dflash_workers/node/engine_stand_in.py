"""An engine's interpreter that runs a small HTTP server in SGLang's place; `make` makes one.

Called as the real one is: `-c PROGRAM` for the versions, `-m sglang.launch_server --port P ...` to
serve. The file `mode` beside it says what it does: `ok`, `oom` (dies with CUDA's words), `silent`
(never ready), `other` (serves another model), `fewer` (requests at once than asked), `answers` (all
that a real worker asks, as tests/faults/engine_process.py). `hung` beside it: a server that is up
stops answering.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
VERSIONS = {"sglang": "0.5.17", "vllm": "0.33.0", "torch": "2.13.0+cpu"}
SCRIPT = """\
#!/bin/sh
if [ "$1" = -m ] && [ "$(cat {folder}/mode)" = silent ]; then
    echo capturing graphs
    exec sleep 600
fi
exec {python} {program} {folder} "$@"
"""
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def make(folder: Path, mode: str = "ok") -> Path:
    """The interpreter's path; its folder holds `mode`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mode").write_text(mode)
    python = folder / "python"
    python.write_text(SCRIPT.format(python=sys.executable, program=__file__, folder=folder))
    os.chmod(python, 0o755)
    return python


def settings_of(argv: list[str]) -> dict[str, Any]:
    """Flags as SGLang tells them: those of this test only."""
    told: dict[str, Any] = {}
    for word in argv:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            told[name] = True
        elif told:
            told[name] = word
    return told


def serve(folder: Path, mode: str, told: dict[str, Any]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while (folder / "hung").exists():
                time.sleep(0.05)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *_: object) -> None:
            pass

    if mode == "other":
        told["model_path"] = "/models/another"
    if mode == "fewer":
        told["internal_states"] = [{"effective_max_running_requests_per_dp": 3}]
    print("loading weights", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(told["port"])), Handler).serve_forever()


def answer(folder: Path, told: dict[str, Any]) -> None:
    """In place of this process."""
    log = folder / f"tokens-{told['port']}.log"
    argv = [sys.executable, "-m", "tests.faults.engine_process", "--port", told["port"]]
    argv += ["--model-dir", told["model_path"], "--token-log", str(log), "--token-s", "0.002"]
    os.execve(sys.executable, argv, os.environ | {"PYTHONPATH": str(ROOT)})


def main(folder: Path, argv: list[str]) -> None:
    if argv[0] == "-c":
        print(json.dumps(VERSIONS))
        return
    mode = (folder / "mode").read_text()
    with (folder / "starts").open("a") as starts:
        starts.write(json.dumps({"argv": argv, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}))
        starts.write("\n")
    if mode == "oom":
        sys.exit(OUT_OF_MEMORY)
    if mode == "answers":
        answer(folder, settings_of(argv))
    serve(folder, mode, settings_of(argv))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
