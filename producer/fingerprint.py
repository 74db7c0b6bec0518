"""A model folder -> the run's fingerprint: what may not change while the run lives.

Reads the folder's small files and the headers of its weights, never the weights themselves; writes
`run.json` once. Every value is explicit in there, so that no server's or library's default can
alter the data unnoticed, and another fingerprint under the same run's name is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from dflash_workers.contract.chat import (
    CONTROL_POLICIES,
    Chat,
    load_tokenizer,
    own_template,
    tokenizer_sha256,
)
from dflash_workers.contract.errors import BadInput, Conflict, Missing, PromptRejected
from dflash_workers.contract.flags import check_policies
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import SCHEMA_VERSION, Json, RunSpec, Sampling, Target, encode
from dflash_workers.contract.store import Store
from dflash_workers.contract.weights import weights_sha256
from producer.abilities import check_thinking
from producer.conversations import POLICIES

DEFAULT_MAX_NEW_TOKENS = 2048
DEFAULT_POLICIES = {"multi_turn": "rollout", "control_tokens": "escape"}
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a person may choose; None takes the run's value, or for a new run the model's."""

    chat_template: str | None = None  # Jinja text
    template_kwargs: Json | None = None  # e.g. {"enable_thinking": false}
    max_new_tokens: int | None = None  # per turn
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None  # -1: no limit
    multi_turn: str | None = None  # what becomes of recorded answers: see conversations.py
    control_tokens: str | None = None  # what becomes of the target's inside a text: see chat.py
    quality: Json | None = None  # flag -> keep | reject | retry-once: see contract/flags.py


def make_spec(run: str, model_dir: str, options: RunOptions, standing: RunSpec | None) -> RunSpec:
    """The spec that a call with these options means. Raises Missing, BadInput."""
    folder = Path(model_dir)
    if not model_dir or not folder.is_dir():
        raise Missing(f"no model folder {model_dir or '(none given)'}: pass --model FOLDER")
    template, template_kwargs = options.chat_template, options.template_kwargs
    tokenizer = load_tokenizer(model_dir)
    if template is None:
        template = standing.chat_template if standing else own_template(tokenizer)
    if template_kwargs is None:
        template_kwargs = standing.template_kwargs if standing else {}
    policies = _policies(options, standing)
    quality = options.quality
    if quality is None:
        quality = standing.quality if standing else {}
    check_policies(quality)
    target = _target(folder, template)
    chat = Chat(tokenizer, template, template_kwargs, policies["control_tokens"])
    _check_template(chat)
    generation = _generation_config(folder)
    wanted = _wanted(generation, options, standing.sampling if standing else None)
    sampling = _sampling(wanted, _stop_token_ids(chat, generation), target.context_len)
    check_sampling(sampling, target.context_len)
    return RunSpec(
        schema=SCHEMA_VERSION,
        run=run,
        target=target,
        chat_template=template,
        template_kwargs=template_kwargs,
        sampling=sampling,
        multi_turn=policies["multi_turn"],
        control_tokens=policies["control_tokens"],
        thinking_end_id=chat.thinking_end_id(),
        quality=quality,
    )


def check_sampling(sampling: Sampling, context_len: int) -> None:
    """Raise BadInput, naming the first value that is out of range."""
    for name, holds in {
        "temperature (0 or more)": 0 <= sampling.temperature < math.inf,
        "top_p (over 0, up to 1)": 0 < sampling.top_p <= 1,
        "top_k (1 or more, or -1)": sampling.top_k == -1 or sampling.top_k >= 1,
        f"max tokens (1 to {context_len - 1}, the target's context less one)": (
            1 <= sampling.max_new_tokens < context_len
        ),
    }.items():
        if not holds:
            raise BadInput(f"out of range: {name}")


def _check_template(chat: Chat) -> None:
    """A template can't be changed once the run has it: try it on the plainest question."""
    question = "Is this question in the prompt?"
    try:
        ids = chat.prompt_ids([{"role": "user", "content": question}], [])
    except PromptRejected as error:
        raise BadInput(f"the chat template can't be used: {error.detail}") from error
    if question not in chat.text(ids):
        raise BadInput("the chat template leaves the user's question out")
    if "enable_thinking" in chat.template_kwargs:
        check_thinking(chat)


def find_spec(store: Store, run: str) -> RunSpec | None:
    """The run's spec; None where the run does not exist."""
    try:
        return read_spec(store, run)
    except Missing:
        return None


def check_same(standing: RunSpec, spec: RunSpec) -> None:
    """Raise Conflict, naming the first field that differs, where the two don't mean the same."""
    ours = dict(_leaves(encode(spec)))
    theirs = dict(_leaves(encode(standing)))
    for name in [*theirs, *(ours.keys() - theirs.keys())]:
        if name != "target.name" and ours.get(name) != theirs.get(name):
            raise Conflict(
                f"run {spec.run!r} has another fingerprint: {name} is "
                f"{_shown(theirs.get(name))} there and {_shown(ours.get(name))} here: "
                "start another run, or give the same model and options"
            )


def open_or_create_run(store: Store, spec: RunSpec) -> RunSpec:
    """Write run.json once; return the spec that stands. Raises Conflict. Safe to call twice."""
    standing = find_spec(store, spec.run)
    if standing is None:
        try:
            store.put_new(RunKeys(spec.run).spec, dump(spec))
            return spec
        except Conflict:  # another producer was first
            standing = read_spec(store, spec.run)
    check_same(standing, spec)
    return standing


def _policies(options: RunOptions, standing: RunSpec | None) -> dict[str, str]:
    """The call's over the run's over the default. Raises BadInput."""
    layers = [DEFAULT_POLICIES, encode(standing) if standing else {}, encode(options)]
    known = {"multi_turn": POLICIES, "control_tokens": CONTROL_POLICIES}
    policies = {n: next(v for x in reversed(layers) if (v := x.get(n)) is not None) for n in known}
    for name, chosen in policies.items():
        if chosen not in known[name]:
            raise BadInput(f"{name} is {chosen!r}: use one of {', '.join(known[name])}")
    return policies


def _target(folder: Path, template: str) -> Target:
    config_bytes = _read(folder / "config.json")
    config = _object(config_bytes, folder / "config.json")
    text_config = config.get("text_config", config)  # of models with more than a text side
    try:
        return Target(
            name=folder.resolve().name,
            config_sha256=hashlib.sha256(config_bytes).hexdigest(),
            tokenizer_sha256=tokenizer_sha256(str(folder)),
            template_sha256=hashlib.sha256(template.encode()).hexdigest(),
            weights_sha256=weights_sha256(folder),
            vocab_size=int(text_config["vocab_size"]),
            context_len=int(text_config["max_position_embeddings"]),
            dtype=_dtype(config) or _dtype(text_config) or "float32",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{folder / 'config.json'}: not a model's: {error!r}") from error


def _dtype(config: Json) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _wanted(generation: Json, options: RunOptions, standing: Sampling | None) -> Json:
    """Sampling by name: the call's options over the run's values over the model's."""
    layers = [generation, encode(standing) if standing else {}, encode(options)]
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    return {name: layer[name] for layer in layers for name in names if layer.get(name) is not None}


def _sampling(wanted: Json, stop_token_ids: list[int], context_len: int) -> Sampling:
    """Every value explicit. Raises BadInput."""
    try:
        return Sampling(
            temperature=float(wanted.get("temperature", 1.0)),
            top_p=float(wanted.get("top_p", 1.0)),
            top_k=int(wanted.get("top_k", -1)) or -1,  # some models write "no limit" as 0
            max_new_tokens=int(
                wanted.get("max_new_tokens", min(DEFAULT_MAX_NEW_TOKENS, context_len // 2))
            ),
            stop_token_ids=stop_token_ids,
        )
    except (TypeError, ValueError) as error:
        raise BadInput(f"sampling: {error}") from error


def _stop_token_ids(chat: Chat, generation: Json) -> list[int]:
    """What ends an answer: the ids of generation_config.json and the tokenizer's own."""
    listed = generation.get("eos_token_id") or []
    own = chat.tokenizer.eos_token_id
    ids = {*(listed if isinstance(listed, list) else [listed]), *([] if own is None else [own])}
    if not ids or not all(isinstance(i, int) for i in ids):
        raise BadInput("the model names no end-of-sequence id: an answer would never end")
    return sorted(ids)


def _generation_config(folder: Path) -> Json:
    path = folder / "generation_config.json"
    return _object(_read(path), path) if path.is_file() else {}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Missing(f"{path}: {error.strerror}: is this a model folder?") from error


def _object(body: bytes, path: Path) -> Json:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must hold an object")
    return value


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested objects that is no object itself."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
