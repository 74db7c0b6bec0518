"""What a run's chat template shows of a conversation, found out by rendering one.

Called once per run by fingerprint.py (thinking) and api.py (the rest, for -> limits.py). Many
templates leave out what they don't know without a word, so that a target would be asked about tools
it never saw: rows that need it are refused instead. A template that raises shows nothing.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_workers.contract.chat import Chat
from dflash_workers.contract.errors import BadInput, PromptRejected
from dflash_workers.contract.records import Json
from producer.limits import Abilities

_WORD = "quokka"  # that no template says of itself
_USER: Json = {"role": "user", "content": "Hello"}
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": "Look it up",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
_CALL: Json = {"type": "function", "function": {"name": "lookup", "arguments": {"name": "x"}}}
# As the workers' rollout.py makes them.
_CALLING: Json = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Json = {"role": "tool", "name": "lookup", "content": _WORD}
_SYSTEM: Json = {"role": "system", "content": _WORD}
_THOUGHT: Json = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"}


def probe_abilities(chat: Chat) -> Abilities:
    """What the template shows; a few renders, no ids."""
    return Abilities(
        tools=_WORD in _render(chat, [_USER], _TOOL),
        tool_results=_WORD in _render(chat, [_USER, _CALLING, _RESULT]),
        system=_WORD in _render(chat, [_SYSTEM, _USER]),
    )


def check_thinking(chat: Chat) -> None:
    """Raise BadInput where the template writes the same with thinking and without."""
    renders = []
    for is_on in (True, False):
        kwargs = {**chat.template_kwargs, "enable_thinking": is_on}
        one = replace(chat, template_kwargs=kwargs)
        renders.append(
            [
                _render(one, messages, add_generation_prompt=is_asking)
                for messages in ([_USER], [_USER, _THOUGHT, _USER])
                for is_asking in (True, False)
            ]
        )
    if renders[0] == renders[1]:
        raise BadInput(
            "the chat template knows no `enable_thinking`: leave out --thinking and --no-thinking, "
            "or pass --chat-template FILE"
        )


def _render(
    chat: Chat, messages: list[Json], *tools: Json, add_generation_prompt: bool = True
) -> str:
    try:
        return chat.render(messages, [*tools], add_generation_prompt=add_generation_prompt)
    except PromptRejected:
        return ""
