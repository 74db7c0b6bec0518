"""engine_venv.py: what it makes is whole, and what isn't its own it leaves alone."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from dflash_workers import engine_venv
from dflash_workers.contract.errors import BadInput
from dflash_workers.engine_venv import MARKER, VenvPlan, is_made, make_venv


def test_a_folder_that_is_no_venv_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")

    with pytest.raises(BadInput, match="is no venv"):
        make_venv(VenvPlan(tmp_path))

    assert kept.read_text() == "kept"


def test_only_a_venv_of_the_present_pins_counts_as_made(tmp_path: Path) -> None:
    plan = VenvPlan(tmp_path)
    assert not is_made(plan)

    (tmp_path / MARKER).write_text(plan.mark)

    assert is_made(plan)
    (tmp_path / MARKER).write_text("of older pins")
    assert not is_made(plan)


@pytest.mark.slow
def test_a_shared_torch_is_seen_by_pip_and_safe_from_it(tmp_path: Path) -> None:
    torch = engine_venv._shareable_torch()
    if torch is None:
        pytest.skip("this venv's torch is not the engine's")
    plan = VenvPlan(tmp_path / "engine", share_torch=True)
    venv.create(plan.folder, with_pip=True)

    engine_venv._link(plan, [torch])

    code = "import importlib.metadata as m; print(m.version('torch'))"
    assert engine_venv._output(plan, "-c", code) == torch.version
    refused = subprocess.run(
        [plan.python, "-m", "pip", "uninstall", "-y", "torch"], capture_output=True, text=True
    )
    assert "Cannot uninstall torch" in refused.stderr
    assert (Path(str(torch.locate_file("torch"))) / "__init__.py").is_file()
