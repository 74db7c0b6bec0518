"""Simulated engines over real HTTP, in this process and as one of their own."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from benchmarks.fleet_run import get_json, is_up
from benchmarks.simulated.answers import Answers
from benchmarks.simulated.engine import Engine, Limits
from benchmarks.simulated.lengths import Lengths
from benchmarks.simulated.pace import Drafter, Pace, linear_steps
from benchmarks.simulated.replies import Replies, Target
from benchmarks.simulated.server import EngineServer
from benchmarks.simulated.token_log import TokenLog
from dflash_workers.contract.records import Sampling
from dflash_workers.embedded import free_ports
from dflash_workers.engine import Engine as Client
from dflash_workers.engine import Patience, Question
from dflash_workers.launcher import Child, spawn
from tests.tiny_model import VOCAB_SIZE, make_tiny_model

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
LENGTHS = Lengths(mean=100.0, variation=0.0)
PROMPT = [70, 71, 72]


@dataclass(frozen=True, slots=True)
class Served:
    """One engine, and what asks it."""

    url: str
    session: aiohttp.ClientSession
    answers: Answers
    log: Path

    async def post(self, path: str, body: Json) -> Json:
        async with self.session.post(self.url + path, json=body) as reply:
            said = await reply.read()
            return {"status": reply.status} | (orjson.loads(said) if said else {})

    async def get(self, path: str) -> Json:
        async with self.session.get(self.url + path) as reply:
            return dict(orjson.loads(await reply.read()))

    async def generate(self, prompt: list[int], most: int = 1000, **more: Any) -> Json:
        sampling = {"max_new_tokens": most} | more.pop("sampling", {})
        body = {"input_ids": prompt, "sampling_params": sampling} | more
        return await self.post("/generate", body)

    async def until(self, holds: Callable[[Json], bool]) -> Json:
        """What /running says once it is so."""
        async with asyncio.timeout(20):
            while not holds(said := await self.get("/running")):
                await asyncio.sleep(0.02)
        return said

    def ends(self) -> list[Json]:
        """Of requests, from the log."""
        lines = [orjson.loads(line) for line in self.log.read_bytes().splitlines()]
        return [line for line in lines if "outcome" in line]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("simulated") / "model")


@asynccontextmanager
async def serving(
    model_dir: Path, log: Path, step_s: float, drafter: Drafter | None = None
) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    answers = Answers(model_dir, LENGTHS)
    pace = Pace(linear_steps(step_s), drafter=drafter)
    engine = Engine(str(port), answers, pace, Limits(max_running=4), TokenLog(log))
    server = EngineServer(engine, Replies(answers, Target("m", "m", ""), drafter), port)
    await server.listen()
    async with aiohttp.ClientSession() as session:
        yield Served(f"http://127.0.0.1:{port}", session, answers, log)
    await server.close()


def with_engine(
    model_dir: Path,
    tmp_path: Path,
    ask: Callable[[Served], Coroutine[Any, Any, None]],
    step_s: float = 1e-4,
    drafter: Drafter | None = None,
) -> None:
    async def whole() -> None:
        async with serving(model_dir, tmp_path / "tokens", step_s, drafter) as served:
            await ask(served)

    asyncio.run(whole())


def test_a_reply_holds_the_whole_answer_and_one_that_is_cut_its_beginning(
    model_dir: Path, tmp_path: Path
) -> None:
    async def ask(served: Served) -> None:
        whole = served.answers.answer_of(PROMPT)
        reply, cut = await asyncio.gather(served.generate(PROMPT), served.generate(PROMPT, 30))

        assert reply["output_ids"] == whole
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[-1]}
        assert reply["meta_info"]["completion_tokens"] == len(whole) == 100
        assert (cut["output_ids"], len(cut["text"])) == (whole[:30], 30)
        assert cut["meta_info"]["finish_reason"] == {"type": "length"}

    with_engine(model_dir, tmp_path, ask)


def test_other_stop_ids_end_an_answer_and_none_may_be_asked_to(
    model_dir: Path, tmp_path: Path
) -> None:
    async def ask(served: Served) -> None:
        whole = served.answers.answer_of(PROMPT)
        stopped = await served.generate(PROMPT, sampling={"stop_token_ids": [whole[5]]})
        endless = await served.generate(PROMPT, 150, sampling={"ignore_eos": True})

        assert stopped["output_ids"] == whole[: whole.index(whole[5]) + 1]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[5]}
        assert len(endless["output_ids"]) == 150

    with_engine(model_dir, tmp_path, ask)


def test_the_workers_own_client_believes_streams_and_aborts(
    model_dir: Path, tmp_path: Path
) -> None:
    async def ask(served: Served) -> None:
        sampling = Sampling(0.8, 0.95, 20, 1000, [served.answers.stop_id])
        question = Question(PROMPT, 0, sampling, VOCAB_SIZE)
        client = Client(served.url, 4, Patience())
        await client.look()
        heard: list[int] = []

        def hear(ids: list[int]) -> bool:
            heard.append(len(ids))
            return len(heard) < 3

        whole = await client.generate(question)
        left = await client.generate(question, heard=hear, hear_every=20)
        await client.close()

        assert whole.output_ids == served.answers.answer_of(PROMPT)
        assert left.finish_reason == "abort"
        assert left.output_ids == whole.output_ids[: len(left.output_ids)]
        assert 40 <= len(left.output_ids) < 100

    with_engine(model_dir, tmp_path, ask, step_s=0.005)


def test_the_log_tells_how_far_each_request_came_and_how_it_ended(
    model_dir: Path, tmp_path: Path
) -> None:
    async def ask(served: Served) -> None:
        began_s = time.time()
        await served.generate(PROMPT, 10, rid="cut")
        slow = [asyncio.create_task(served.generate(PROMPT, rid=rid)) for rid in ("a", "b")]
        await served.until(lambda said: said["running"].get("b", 0) > 20)
        await served.post("/abort_request", {"rid": "a"})
        slow[1].cancel()
        await served.until(lambda said: not said["running"])

        cut, aborted, left = served.ends()
        assert (cut["rid"], cut["outcome"], cut["end"]) == ("cut", "length", 10)
        assert began_s <= cut["started_s"] <= cut["first_s"] <= cut["moved_s"] <= time.time()
        assert cut["moved_s"] - cut["started_s"] == pytest.approx(0.1, rel=0.2)
        assert (aborted["rid"], aborted["outcome"]) == ("a", "abort")
        assert (left["rid"], left["outcome"]) == ("b", "left")
        assert 20 < left["end"] < 100
        assert cut["question"] == served.answers.question_of(PROMPT).name

    with_engine(model_dir, tmp_path, ask, step_s=0.01)


def test_a_dead_engine_cuts_refuses_and_comes_back_empty_as_another(
    model_dir: Path, tmp_path: Path
) -> None:
    async def ask(served: Served) -> None:
        before = await served.get("/server_info")
        asked = asyncio.create_task(served.generate(PROMPT, rid="lost"))
        await served.until(lambda said: said["running"].get("lost", 0) > 5)

        await served.post("/simulate", {"mode": "dead", "for_s": 0.5})
        with pytest.raises(aiohttp.ClientError):
            await asked
        with pytest.raises(aiohttp.ClientConnectorError):
            await served.get("/running")
        await asyncio.sleep(0.8)
        after = await served.get("/server_info")

        assert (await served.get("/running")) == {"running": {}, "num_asked": 0}
        assert before["startup_time"] != after["startup_time"]
        (lost,) = served.ends()
        assert (lost["rid"], lost["outcome"]) == ("lost", "died")
        assert 5 < lost["end"] < 100

    with_engine(model_dir, tmp_path, ask, step_s=0.02)


def test_it_fails_hangs_and_is_unhealthy_when_told_to(model_dir: Path, tmp_path: Path) -> None:
    async def ask(served: Served) -> None:
        async def status_in(mode: str, path: str) -> int:
            await served.post("/simulate", {"mode": mode})
            async with served.session.get(served.url + path) as reply:
                return reply.status

        assert await status_in("unhealthy", "/health") == 503
        assert await status_in("500", "/health") == 200
        assert (await served.generate(PROMPT))["status"] == 500
        assert await status_in("hang", "/health_generate") == 200
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await served.generate(PROMPT)
                pytest.fail("it doesn't hang")
        assert await status_in("ok", "/health") == 200
        assert (await served.generate(PROMPT))["status"] == 200
        assert (await served.post("/simulate", {"mode": "odd"}))["status"] == 400
        assert (await served.generate(PROMPT, sampling={"max_new_tokens": "x"}))["status"] == 400
        assert (await served.post("/nowhere", {}))["status"] == 404

    with_engine(model_dir, tmp_path, ask)


def test_it_counts_what_ran_and_tells_of_its_drafter(model_dir: Path, tmp_path: Path) -> None:
    async def ask(served: Served) -> None:
        replies = await asyncio.gather(*(served.generate([70, n]) for n in range(12)))
        occupancy = await served.get("/occupancy")
        (load,) = (await served.get("/v1/loads?include=core,spec"))["loads"]
        async with served.session.get(served.url + "/metrics") as reply:
            text = await reply.text()

        assert occupancy["num_finished"] == 12
        assert occupancy["num_tokens"] == pytest.approx(1200, rel=0.01)
        assert occupancy["num_input"] == 24
        assert occupancy["slot_seconds"] == pytest.approx(1200 * 1e-3 * 1.2 / 2.4, rel=0.05)
        assert load["speculative"] == {"accept_length": 2.4}
        assert {reply["meta_info"]["spec_accept_length"] for reply in replies} == {2.4}
        assert 'sglang:realtime_tokens_total{mode="decode"} 1' in text

    with_engine(model_dir, tmp_path, ask, step_s=1e-3, drafter=Drafter(2.4, 1.2))


def test_log_probs_are_a_function_of_ids_and_weights(model_dir: Path) -> None:
    answers = Answers(model_dir, LENGTHS)
    one, same, other = (
        Replies(answers, Target("m", "m", weights), None).log_probs(PROMPT) for weights in "aab"
    )

    assert one == same != other
    assert [entry[1] for entry in one["meta_info"]["input_token_logprobs"]] == PROMPT


def ask_for(port: int, prompt: list[int]) -> HTTPConnection:
    """Who asks, and doesn't wait for the answer."""
    body = orjson.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1000}})
    client = HTTPConnection("127.0.0.1", port)
    client.request("POST", "/generate", body)
    return client


@pytest.mark.slow
def test_what_was_begun_stands_in_the_log_of_a_process_that_was_killed(
    model_dir: Path, tmp_path: Path
) -> None:
    ports, log = free_ports(2), tmp_path / "tokens"
    argv = [sys.executable, "-m", "benchmarks.simulated", f"--model={model_dir}"]
    argv += [f"--ports={ports[0]},{ports[1]}", "--preset=h200_smollm2", "--time-factor=0.5"]
    argv += [f"--token-log={log}", "--mean-tokens=1000"]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with spawn(argv, name="engines", log_path=tmp_path / "log", cwd=ROOT) as child:
        _wait(lambda: all(map(is_up, urls)), child)
        clients = [ask_for(port, PROMPT) for port in ports]
        _wait(lambda: all(_is_decoding(url) for url in urls), child)
        child.signal(signal.SIGKILL)
        _wait(lambda: not any(map(is_up, urls)), child)
    for client in clients:
        client.close()

    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert sorted(line["engine"] for line in lines) == sorted(map(str, ports))
    assert not any("outcome" in line for line in lines)


def _is_decoding(url: str) -> bool:
    return any(place > 0 for place in get_json(f"{url}/running")["running"].values())


def _wait(holds: Callable[[], bool], child: Child) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, child.tail()
        time.sleep(0.05)
