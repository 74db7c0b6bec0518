"""Make the engine's own venv: SGLang 0.5.17 on its native PyTorch path, for machines without a GPU.

`python -m dflash_workers.engine_venv DIR [--share-torch]`; server.py starts the engine with
DIR/bin/python. It is a venv of its own since SGLang pins torch and transformers and the trainer
must not be tied to them. Invariant: a venv with the marker is whole and of the present pins; any
other venv in DIR is half made or old, and is made anew. SGLang itself comes without dependencies,
because it asks for CUDA packages: cpu_engine/requirements.txt lists what it needs here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from dflash_workers.contract.errors import BadInput, FleetError, NotEnough

CPU_ENGINE = Path(__file__).with_name("cpu_engine")
REQUIREMENTS = CPU_ENGINE / "requirements.txt"
WITHOUT_DEPENDENCIES = ("torchvision==0.28.0", "sglang==0.5.17")
MARKER = ".dflash-engine"
CUDA_PARTS = ("cuda-", "nvidia-", "triton")  # distributions that a CUDA build of torch brings


@dataclass(frozen=True, slots=True)
class VenvPlan:
    """What to make, and how."""

    folder: Path
    share_torch: bool = False  # link the running interpreter's torch where it is the pinned one
    torch_index_url: str = ""  # where to get torch from; empty: pip's own index

    @property
    def python(self) -> Path:
        """The interpreter that runs the engine."""
        return self.folder / "bin" / "python"

    @property
    def mark(self) -> str:
        """A hash of all that the venv's content follows from."""
        parts = [REQUIREMENTS.read_text(encoding="utf-8"), *WITHOUT_DEPENDENCIES, sys.version]
        torch = _shareable_torch() if self.share_torch else None
        parts.append(str(torch.locate_file("")) if torch else "")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Make the engine's own venv (SGLang on a CPU).")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--share-torch", action="store_true", help="link this venv's torch where it is the pinned"
    )
    parser.add_argument(
        "--torch-index-url", default="", metavar="URL", help="where torch comes from"
    )
    args = parser.parse_args()
    try:
        make_venv(VenvPlan(args.folder.resolve(), args.share_torch, args.torch_index_url))
    except FleetError as error:
        sys.exit(f"engine_venv: {error}")


def make_venv(plan: VenvPlan) -> None:
    """Make the venv, or find it made. Safe to call again after any interruption."""
    if is_made(plan):
        print(f"{plan.folder}: made already", flush=True)
        return
    if plan.folder.exists():
        _remove_old(plan.folder)
    started = time.monotonic()
    _step(f"making a venv in {plan.folder}")
    venv.create(plan.folder, with_pip=True)
    torch = _shareable_torch() if plan.share_torch else None
    if torch:
        _step(f"sharing torch {torch.version} of {sys.prefix}")
        _link(plan, [torch, *_cuda_parts()])
    elif plan.torch_index_url:
        _step(f"installing torch {_pinned_torch()}")
        _install(plan, f"torch=={_pinned_torch()}", "--index-url", plan.torch_index_url)
    _step(f"installing {' and '.join(WITHOUT_DEPENDENCIES)}")
    _install(plan, "--no-deps", *WITHOUT_DEPENDENCIES)
    _step(f"installing {REQUIREMENTS.name}")
    _install(plan, "-r", str(REQUIREMENTS))
    (plan.folder / MARKER).write_text(plan.mark, encoding="utf-8")
    _step(f"done in {time.monotonic() - started:.0f} s")


def is_made(plan: VenvPlan) -> bool:
    """Whether a whole venv of the present pins is there."""
    marker = plan.folder / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == plan.mark


def _remove_old(folder: Path) -> None:
    is_venv = (folder / "pyvenv.cfg").is_file()
    if not is_venv and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is no venv: name a folder that is empty or not there")
    _step(f"removing the half-made or old venv in {folder}")
    shutil.rmtree(folder)


def _link(plan: VenvPlan, distributions: list[Distribution]) -> None:
    """Symlinks to their packages, and a copy of their metadata so that pip sees them installed.

    The copy has no RECORD: without it pip refuses to uninstall, which would go through the links
    and empty the other venv.
    """
    purelib = Path(_output(plan, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    for distribution in distributions:
        source = Path(str(distribution.locate_file("")))
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = purelib / name
            if name.endswith(".dist-info"):
                shutil.copytree(source / name, link, ignore=shutil.ignore_patterns("RECORD"))
            elif not link.is_symlink():  # `nvidia` and `cuda` belong to several
                link.symlink_to(source / name)


def _cuda_parts() -> list[Distribution]:
    return [d for d in importlib.metadata.distributions() if d.name.startswith(CUDA_PARTS)]


def _shareable_torch() -> Distribution | None:
    """The running interpreter's torch, if it is the pinned one (+cpu and the like don't count)."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return torch if torch.version.partition("+")[0] == _pinned_torch() else None


def _pinned_torch() -> str:
    (version,) = re.findall(r"^torch==(\S+)$", REQUIREMENTS.read_text(encoding="utf-8"), re.M)
    return str(version)


def _install(plan: VenvPlan, *arguments: str) -> None:
    _output(
        plan,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-compile",
        *arguments,
    )


def _output(plan: VenvPlan, *arguments: str) -> str:
    done = subprocess.run([plan.python, *arguments], capture_output=True, text=True)
    if done.returncode:
        lines = "\n".join(done.stderr.strip().splitlines()[-10:])
        raise NotEnough(f"{' '.join(arguments)} failed in {plan.folder}:\n{lines}")
    return done.stdout.strip()


def _step(text: str) -> None:
    print(f"engine venv: {text}", flush=True)


if __name__ == "__main__":
    main()
