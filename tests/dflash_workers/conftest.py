"""What tests of the workers share: a planned run, a fake engine, and a worker with short leases."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_workers.claims import Timing
from dflash_workers.contract.chat import Chat, load_tokenizer, own_template, tokenizer_sha256
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import SCHEMA_VERSION, RunSpec, Sampling, Target
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.engine import Patience
from dflash_workers.opening import Options
from dflash_workers.worker import Worker
from tests.fake_engine import FakeEngine
from tests.planned import Plan
from tests.tiny_model import CONTEXT_LEN, VOCAB_SIZE, make_tiny_model

CANARY_QUESTION = "How many legs have three spiders?"

SHORT = Timing(lease_ms=1200, handover_ms=500, reap_every_s=0.1)
IMPATIENT = Patience(request_s=1.0, token_s=0.0, away_s=0.5, backoff_s=0.05, max_backoff_s=0.1)
OPTIONS = Options(wait_s=5, progress_every_s=0.2, timing=SHORT, patience=IMPATIENT)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer can be loaded."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    return load_tokenizer(str(model_dir))


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[FakeEngine]:
    """An engine that does what the prompt says; what a worker asks at its start is not counted."""
    with FakeEngine(tokenizer, unheard=CANARY_QUESTION) as engine:
        yield engine


@pytest.fixture
def spec(model_dir: Path, redis_settings: Settings, tokenizer: Any) -> RunSpec:
    """A run whose target, and so whose queue, is this test's own."""
    target = Target(
        name="tiny",
        config_sha256="c",
        tokenizer_sha256=tokenizer_sha256(str(model_dir)),
        template_sha256="t",
        weights_sha256=uuid.uuid4().hex,
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
        dtype="float32",
    )
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return RunSpec(
        schema=SCHEMA_VERSION,
        run=redis_settings.run,
        target=target,
        chat_template=own_template(tokenizer),
        template_kwargs={},
        sampling=Sampling(0.7, 0.95, 20, max_new_tokens=64, stop_token_ids=[stop]),
        multi_turn="rollout",
        control_tokens="escape",
    )


@pytest.fixture
def chat(spec: RunSpec, tokenizer: Any) -> Chat:
    return Chat(tokenizer, spec.chat_template, spec.template_kwargs, spec.control_tokens)


@pytest.fixture
def plan(store: Store, hints: Hints, spec: RunSpec) -> Plan:
    return Plan(store, hints, spec)


@pytest.fixture
def worker_settings(settings: Settings, model_dir: Path, engine: FakeEngine) -> Settings:
    return dataclasses.replace(
        settings, model=str(model_dir), engine_url=engine.url, max_in_flight=4
    )


@pytest.fixture
def make_worker(worker_settings: Settings) -> Iterator[Callable[..., Worker]]:
    """Workers in this process, with short leases; the plan must exist."""
    workers: list[Worker] = []

    def make(slot: str = "w1", options: Options = OPTIONS) -> Worker:
        worker = Worker(dataclasses.replace(worker_settings, slot=slot), options)
        workers.append(worker)
        worker.start()
        return worker

    yield make
    for worker in workers:
        worker.stop()
        worker.site.hints.app.close()
