"""What a chat template shows, and what it leaves out without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_workers.contract.chat import Chat, load_tokenizer
from dflash_workers.contract.errors import BadInput
from producer.abilities import check_thinking, probe_abilities
from producer.limits import Abilities
from tests.tiny_model import TEMPLATE

CHATML = Path(__file__).parents[2] / "examples" / "chatml.jinja"
TEXTS_ONLY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USERS_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
NO_TOOLS = "{% if tools %}{{ raise_exception('no') }}{% endif %}"
COUNTS_TOOLS = "{{ tools | length if tools else 0 }} tools\n"
ONLY_WHEN_ASKING = "{% if add_generation_prompt and enable_thinking %}<think>{% endif %}"
ONLY_IN_HISTORY = (
    "{% for m in messages if enable_thinking and not add_generation_prompt %}"
    "{{ m.reasoning_content }}{% endfor %}"
)


def chat_of(model_dir: Path, template: str) -> Chat:
    return Chat(load_tokenizer(str(model_dir)), template, {"enable_thinking": True}, "escape")


@pytest.mark.parametrize(
    ("template", "abilities"),
    [
        (TEMPLATE, Abilities(tools=True, tool_results=True, system=True)),
        (CHATML.read_text(encoding="utf-8"), Abilities(True, True, True)),
        (TEXTS_ONLY, Abilities(tools=False, tool_results=True, system=True)),
        (USERS_ONLY, Abilities(tools=False, tool_results=False, system=False)),
        (NO_SYSTEM + TEXTS_ONLY, Abilities(tools=False, tool_results=True, system=False)),
        (NO_TOOLS + TEXTS_ONLY, Abilities(tools=False, tool_results=True, system=True)),
        (COUNTS_TOOLS + TEXTS_ONLY, Abilities(tools=False, tool_results=True, system=True)),
    ],
)
def test_a_template_is_able_to_do_what_it_shows(
    model_dir: Path, template: str, abilities: Abilities
) -> None:
    assert probe_abilities(chat_of(model_dir, template)) == abilities


@pytest.mark.parametrize("template", [TEMPLATE, ONLY_WHEN_ASKING, ONLY_IN_HISTORY])
def test_a_template_that_knows_thinking_anywhere_may_be_told(
    model_dir: Path, template: str
) -> None:
    check_thinking(chat_of(model_dir, template))


@pytest.mark.parametrize("template", [TEXTS_ONLY, "{# enable_thinking #}" + TEXTS_ONLY])
def test_a_template_without_thinking_is_not_told_to_think(model_dir: Path, template: str) -> None:
    with pytest.raises(BadInput, match=r"enable_thinking.*--no-thinking"):
        check_thinking(chat_of(model_dir, template))
