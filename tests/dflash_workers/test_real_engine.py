"""The engine client and the canary beside SGLang itself, on a CPU, in float32.

Two engines are started in all: the second one is the same model with one of 210 matrices disturbed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dflash_workers.canary import check_engine
from dflash_workers.contract.chat import Chat, load_tokenizer, own_template
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.store import Store
from dflash_workers.engine import Engine, Generation, Leaving, Patience, Question
from dflash_workers.server import EngineConfig, start_engine, wait_until_ready

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
NUM_IDS = 96
READY_S = 500
Work = Callable[[Engine], Coroutine[Any, Any, Any]]


@contextmanager
def serving(python: Path, model_dir: Path, scratch: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    config = EngineConfig(python, model_dir, port, cpu=True, max_total_tokens=4096, dtype="float32")
    with start_engine(config, scratch / "log") as child:
        wait_until_ready(child, config.url, READY_S)
        yield config.url


@pytest.fixture(scope="module")
def url(
    engine_python: Path, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with serving(engine_python, smollm2_dir, tmp_path_factory.mktemp("engine")) as url:
        yield url


@pytest.fixture
def real_chat(smollm2_dir: Path) -> Chat:
    tokenizer = load_tokenizer(str(smollm2_dir))
    return Chat(tokenizer, own_template(tokenizer), {}, "escape")


@pytest.fixture
def real_spec(spec: RunSpec, real_chat: Chat) -> RunSpec:
    target = dataclasses.replace(spec.target, name="SmolLM2", vocab_size=49152, context_len=4096)
    stop_id = real_chat.tokenizer.eos_token_id
    sampling = dataclasses.replace(spec.sampling, temperature=0.0, stop_token_ids=[stop_id])
    return dataclasses.replace(spec, target=target, sampling=sampling)


def run(url: str, chat: Chat, work: Work, **how: Any) -> Any:
    async def once() -> Any:
        engine = Engine(url, 4, Patience(), tokenizer=chat.tokenizer, **how)
        try:
            await engine.look()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(once())


def question_of(spec: RunSpec, chat: Chat, so_far: list[int]) -> Question:
    return Question(
        input_ids=chat.prompt_ids(MESSAGES, []) + so_far,
        seed=1,
        sampling=dataclasses.replace(spec.sampling, max_new_tokens=NUM_IDS - len(so_far)),
        vocab_size=spec.target.vocab_size,
        messages=MESSAGES,
    )


def test_an_aborted_answer_is_gone_on_with_as_if_nothing_had_happened(
    url: str, real_spec: RunSpec, real_chat: Chat
) -> None:
    def ask(so_far: list[int]) -> Work:
        return lambda engine: engine.generate(question_of(real_spec, real_chat, so_far))

    async def leave(engine: Engine) -> Generation:
        leaving = Leaving()

        def hear(ids: list[int]) -> bool:
            leaving.set()
            return True

        question = question_of(real_spec, real_chat, [])
        return await engine.generate(question, leaving=leaving, heard=hear, hear_every=24)

    unbroken = run(url, real_chat, ask([]))
    begun = run(url, real_chat, leave)
    rest = run(url, real_chat, ask(begun.output_ids))

    assert (begun.finish_reason, unbroken.notes) == ("abort", ())
    assert 24 <= len(begun.output_ids) < NUM_IDS
    assert begun.output_ids + rest.output_ids == unbroken.output_ids
    assert rest.finish_reason == unbroken.finish_reason


def test_both_dialects_give_the_same_ids(url: str, real_spec: RunSpec, real_chat: Chat) -> None:
    async def ask(engine: Engine) -> Generation:
        question = question_of(real_spec, real_chat, [])
        sampling = dataclasses.replace(question.sampling, max_new_tokens=16)
        return await engine.generate(dataclasses.replace(question, sampling=sampling))

    ours = run(url, real_chat, ask)
    theirs = run(url, real_chat, ask, dialect="openai")

    assert ours.output_ids == theirs.output_ids
    assert (ours.notes, theirs.notes) == ((), ())


def test_the_canary_knows_its_own_engine_and_no_other(
    url: str,
    real_spec: RunSpec,
    real_chat: Chat,
    store: Store,
    engine_python: Path,
    smollm2_dir: Path,
    tmp_path: Path,
) -> None:
    other_dir = shutil.copytree(smollm2_dir, tmp_path / "other")
    weights = load_file(other_dir / "model.safetensors")
    disturbed = weights["model.layers.15.mlp.down_proj.weight"]
    disturbed += 0.1 * disturbed.std() * disturbed.flip(0) / disturbed.flip(0).std()
    save_file(weights, other_dir / "model.safetensors", {"format": "pt"})

    def check(engine: Engine) -> Any:
        return check_engine(engine, real_spec, real_chat, store)

    first, again = run(url, real_chat, check), run(url, real_chat, check)
    with (
        serving(engine_python, other_dir, tmp_path) as other_url,
        pytest.raises(BadInput, match="is not SmolLM2 as run") as caught,
    ):
        run(other_url, real_chat, check)

    assert (first.is_first, again.is_first) == (True, False)
    assert again.largest_difference < 0.001
    assert (first.stop_id, first.warnings) == ("included", [])
    assert "model_path" in str(caught.value)
