"""Programs that come with the project's own development packages, or with Debian's."""

from __future__ import annotations

import shutil
import sysconfig

import pytest


def program(name: str, *, install: str = "pip install -r requirements.lock") -> str:
    """Its path; a test that can't have it fails, and says where it comes from."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if not found:
        pytest.fail(f"no {name}: {install}")
    return found
