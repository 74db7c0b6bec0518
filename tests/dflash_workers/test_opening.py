"""What a worker is called that nobody named."""

from __future__ import annotations

import socket

import pytest

from dflash_workers.contract.settings import Settings
from dflash_workers.opening import default_slot

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("engine_url", "slot"),
    [
        ("http://127.0.0.1:30000", f"{HOST}-30000"),
        ("http://localhost:30001/", f"{HOST}-30001"),
        ("http://gpu-1:30000", f"{HOST}-gpu-1-30000"),
        ("http://gpu-2:30000", f"{HOST}-gpu-2-30000"),
        ("https://[fd00::7]:30000", f"{HOST}-fd00--7-30000"),
        ("https://engine.example.com", f"{HOST}-engine.example.com-https"),
    ],
)
def test_two_workers_of_one_host_have_two_names_each_the_same_after_a_restart(
    engine_url: str, slot: str
) -> None:
    assert default_slot(engine_url) == slot
    assert Settings(slot=slot).slot == slot
