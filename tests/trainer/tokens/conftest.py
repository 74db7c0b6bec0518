"""A run in S3 whose rows are of no particular model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_workers.contract.lines import dump
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from tests.trainer.tokens.committed import KEYS, RUN, SPEC


@pytest.fixture
def run_store(store: Store) -> Store:
    store.put_new(KEYS.spec, dump(SPEC))
    return store


@pytest.fixture
def run_settings(settings: Settings) -> Settings:
    return replace(settings, run=RUN)
