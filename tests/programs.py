"""Programs that come with the project's own development packages, or with Debian's.

Where one can't be had: a test is skipped at home, and fails with CI=true.
"""

from __future__ import annotations

import os
import shutil
import sysconfig

import pytest


def program(*names: str, install: str = "pip install -r requirements.lock") -> str:
    """The path of the first of these that there is."""
    own = sysconfig.get_path("scripts")
    found = filter(None, (shutil.which(n, path=own) or shutil.which(n) for n in names))
    path = next(found, None)
    if path is None:
        missing = f"no {names[0]}: {install}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return path
