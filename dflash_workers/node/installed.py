"""What the engine's interpreter has installed: asked once, without importing any of it.

Hands Versions to -> presets, which names flags by SGLang's version, and checks, which knows the
driver that a CUDA build of torch wants.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import orjson

from dflash_workers.contract.errors import BadInput, Missing

NAMES = ("sglang", "vllm", "torch", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
TIMEOUT_S = 120.0  # a cold start from a network disk
_PROGRAM = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Versions:
    """Of one interpreter, by distribution; what isn't installed is absent."""

    python: Path
    found: dict[str, str]

    def require(self, engine: str) -> str:
        """The engine's version. Raises Missing."""
        if engine not in self.found:
            raise Missing(f"{self.python} has no {engine}: name its venv with --engine-python")
        return self.found[engine]

    @property
    def cuda_major(self) -> int | None:
        """Of torch's CUDA; None for a CPU build, or where nothing tells."""
        if local := re.search(r"\+cu(\d+)\d$", self.found.get("torch", "")):
            return int(local[1])
        for name in NAMES[3:]:
            if name in self.found:
                return int(self.found[name].partition(".")[0])
        return None


def read_versions(python: Path) -> Versions:
    """Raises Missing where there is no such interpreter, BadInput where it fails."""
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM, *NAMES], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except OSError as error:
        raise Missing(
            f"no engine at {python}: {error.strerror}: name its interpreter with --engine-python"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"{python} said nothing for {TIMEOUT_S:g} s: is its disk alive?") from error
    if done.returncode:
        raise BadInput(f"{python} fails: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return Versions(python, orjson.loads(done.stdout))


def version_key(version: str) -> tuple[int, ...]:
    """`0.5.13.post1` -> (0, 5, 13): all that flags depend on."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition(".post")[0])[:3])
