"""SGLang's own `/generate`: ids in, ids out, and the whole output so far in every event.

Spoken by engine unless the settings say otherwise. It knows no chat and no defaults of a chat:
temperature, top_p, top_k and stop ids are always said. Seen on 0.5.17: the stop id is in the
output, an aborted request still answers with its ids so far, a key that it doesn't know is a 500.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_workers.contract.records import Json
from dflash_workers.questions import Question
from dflash_workers.replies import Reply

# What of /server_info decides how it generates.
FACTS = (
    "version",
    "model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "context_length",
    "attention_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)


@dataclass(frozen=True, slots=True)
class Sglang:
    """Methods that read raise KeyError, TypeError or ValueError on what is no such reply."""

    name: str = "SGLang"
    path: str = "/generate"
    health_path: str = "/health"
    abort_path: str = "/abort_request"
    facts_path: str = "/server_info"
    can_stream: bool = True
    takes_ids: bool = True

    def ask(self, question: Question, rid: str, stream_every: int, facts: Json) -> Json:
        """`stream_every`: ids between two events; 0: one reply."""
        sampling = question.sampling
        wanted: Json = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "sampling_seed": question.seed,
        }
        asked: Json = {"rid": rid, "input_ids": question.input_ids, "sampling_params": wanted}
        if stream_every:
            wanted["stream_interval"] = stream_every
            asked["stream"] = True
        return asked

    def read(self, body: Json) -> Reply:
        """A whole reply, or an event's."""
        meta = body["meta_info"]
        finish = meta["finish_reason"] or {}
        return Reply(
            output_ids=list(body["output_ids"]),
            text=None if body.get("text") is None else str(body["text"]),
            finish=finish.get("type"),
            num_input=int(meta["prompt_tokens"]),
            num_output=int(meta["completion_tokens"]),
            matched=finish.get("matched"),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            spec={name: value for name, value in meta.items() if name.startswith("spec_")},
            status=finish.get("status_code"),
            detail=str(finish.get("message") or ""),
        )

    def read_facts(self, body: Json) -> Json:
        """What it is and how it generates."""
        return {name: body[name] for name in FACTS if body.get(name) is not None}

    def ask_log_probs(self, input_ids: list[int]) -> Json | None:
        """The question after the log-probabilities of a text."""
        return {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }

    def read_log_probs(self, body: Json) -> list[float]:
        """Of each id but the first, which has none."""
        return [float(entry[0]) for entry in body["meta_info"]["input_token_logprobs"][1:]]
