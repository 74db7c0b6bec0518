"""What a simulated engine says: replies and events as bytes, and what it tells of itself.

Used by server.py. A reply is pieced together from parts of the answers' text that are JSON
already; the rest has the names and the forms of SGLang 0.5.17.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import orjson

from benchmarks.simulated.answers import Answers
from benchmarks.simulated.engine import Engine, Request
from benchmarks.simulated.pace import Drafter
from benchmarks.simulated.schedule import ABORT, STOP
from dflash_workers.contract.records import Json

VERSION = "simulated"


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is pretended to be served."""

    path: str
    served_name: str
    weights: str  # others have other log-probabilities


class Replies:
    """Of engines with the same answers."""

    def __init__(self, answers: Answers, target: Target, drafter: Drafter | None) -> None:
        self._answers, self._target, self._drafter = answers, target, drafter

    def body(self, request: Request, num_made: int) -> bytes:
        """The output so far; of a request that is over, its reply."""
        job = request.job
        is_stopped = job.outcome == STOP
        stop_id = request.stops_with if is_stopped else None
        text, ids = self._answers.json(request.question, num_made, stop_id)
        finish: Json | None = {"type": job.outcome} if job.outcome else None
        if finish and is_stopped:
            finish["matched"] = stop_id
        elif finish and job.outcome == ABORT:
            finish["message"] = "Aborted"
        meta = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": job.num_input,
            "completion_tokens": num_made,
            "cached_tokens": 0,
        }
        if self._drafter:
            meta |= speculation(self._drafter, num_made)
        return b'{"text":"%b","output_ids":[%b],"meta_info":%b}' % (text, ids, orjson.dumps(meta))

    def log_probs(self, input_ids: list[int]) -> Json:
        """Of a text, a function of its ids and of the weights."""
        dice = random.Random(f"{self._target.weights} {input_ids}")
        told = [[-dice.random() if at else None, i, None] for at, i in enumerate(input_ids)]
        meta = {"input_token_logprobs": told, "finish_reason": {"type": "length"}}
        return {"text": "", "output_ids": [self._answers.stop_id], "meta_info": meta}

    def server_info(self, engine: Engine) -> Json:
        """`startup_time` is another one in every life."""
        state: Json = {"effective_max_running_requests_per_dp": engine.limits.max_running}
        if self._drafter:
            state["avg_spec_accept_length"] = self._drafter.accept_length
        return {
            "version": VERSION,
            "dtype": "float32",
            "model_path": self._target.path,
            "served_model_name": self._target.served_name,
            "max_running_requests": engine.limits.max_running,
            "startup_time": engine.life,
            "internal_states": [state],
        }

    def model_info(self) -> Json:
        path = self._target.path
        return {"model_path": path, "tokenizer_path": path, "is_generation": True}

    def models(self) -> Json:
        """OpenAI's list of one."""
        return {"object": "list", "data": [{"id": self._target.served_name, "object": "model"}]}

    def loads(self, engine: Engine) -> Json:
        """Where there is no limit of tokens, the share of requests stands for theirs."""
        schedule, limits = engine.schedule, engine.limits
        load: Json = {
            "num_running_reqs": schedule.num_running,
            "num_waiting_reqs": len(schedule.waiting),
            "token_usage": schedule.kv_used / limits.kv_tokens
            if limits.kv_tokens
            else schedule.num_running / limits.max_running,
        }
        if self._drafter:
            load["speculative"] = {"accept_length": self._drafter.accept_length}
        return {"loads": [load]}


def speculation(drafter: Drafter, num_tokens: int) -> Json:
    """Of one request, as SGLang tells it."""
    return {
        "spec_accept_length": drafter.accept_length,
        "spec_verify_ct": math.ceil(num_tokens / drafter.accept_length),
    }


def metrics(engine: Engine) -> str:
    """Prometheus' text, of the two counters that are read."""
    return (
        f'sglang:realtime_tokens_total{{mode="decode"}} {engine.schedule.num_tokens}\n'
        f"sglang:num_requests_total {engine.num_finished}\n"
    )


def occupancy(engine: Engine) -> Json:
    """What ran, summed over time."""
    schedule = engine.schedule
    return {
        "at_s": schedule.at_s,
        "first_s": engine.first_s,
        "num_running": schedule.num_running,
        "num_waiting": len(schedule.waiting),
        "kv_tokens": schedule.kv_used,
        "slot_seconds": schedule.slot_seconds,
        "num_tokens": schedule.num_tokens,
        "num_finished": engine.num_finished,
        "num_input": engine.num_input,
        "num_retracted": schedule.num_retracted,
    }
