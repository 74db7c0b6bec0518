"""Questions to a fake engine, asked in a loop of their own; with little patience."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.records import RunSpec
from dflash_workers.engine import Engine, Generation, Patience, Question
from tests.fake_engine import FakeEngine
from tests.tiny_model import VOCAB_SIZE

PATIENCE = Patience(
    request_s=0.5,
    token_s=0.0,
    stall_s=0.3,
    lost_s=2.0,
    away_s=0.6,
    backoff_s=0.05,
    max_backoff_s=0.1,
    abort_s=0.5,
    health_s=0.5,
)
Work = Callable[[Engine], Any]


@asynccontextmanager
async def opened(url: str, patience: Patience = PATIENCE, **how: Any) -> AsyncIterator[Engine]:
    engine = Engine(url, 4, patience, **how)
    try:
        yield engine
    finally:
        await engine.close()


class Asking:
    """Asks a fake engine in a loop of its own."""

    def __init__(self, fake: FakeEngine, chat: Chat, spec: RunSpec) -> None:
        self.fake, self.chat, self.spec = fake, chat, spec
        self.patience = PATIENCE

    def question(self, message: str, num_tokens: int = 64) -> Question:
        return Question(
            input_ids=self.chat.prompt_ids([{"role": "user", "content": message}], []),
            seed=11,
            sampling=dataclasses.replace(self.spec.sampling, max_new_tokens=num_tokens),
            vocab_size=VOCAB_SIZE,
        )

    def run(self, work: Work) -> Any:
        async def once() -> Any:
            how = {"tokenizer": self.chat}
            async with opened(self.fake.url, self.patience, **how) as engine:
                return await work(engine)

        return asyncio.run(once())

    def ask(self, message: str, num_tokens: int = 64, **how: Any) -> Generation:
        generation = self.run(lambda e: e.generate(self.question(message, num_tokens), **how))
        assert isinstance(generation, Generation)
        return generation
