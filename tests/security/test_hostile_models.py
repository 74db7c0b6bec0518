"""A model folder from elsewhere brings data, never code that runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.chat import load_tokenizer, open_chat
from dflash_workers.contract.errors import BadInput, PromptRejected
from tests.tiny_model import make_tiny_model

# What each of these would do if it were run: leave a file where the test looks.
CODE = """\
open({mark!r}, "w").close()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
class Config(PreTrainedConfig): model_type = "hostile"
class Model(Qwen3ForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"}
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ (messages | attr('__class__')).__base__.__subclasses__() }}",
    "{{ namespace.__init__.__globals__['__builtins__'].open('MARK', 'w') }}",
    "{{ messages.append('more') }}",
    "{% for i in range(100000000) %}{% endfor %}",
]


class Unpickled:
    """Says so when it is."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-was-run"


@pytest.fixture
def hostile_dir(tmp_path: Path, mark: Path) -> Path:
    """A model that names classes of its own, with their code beside it."""
    folder = make_tiny_model(tmp_path / "hostile")
    (folder / "hostile.py").write_text(CODE.format(mark=str(mark)))
    _change(folder / "config.json", {"auto_map": AUTO_MAP, "model_type": "hostile"})
    tokenizer = {"auto_map": {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}}
    _change(folder / "tokenizer_config.json", tokenizer)
    return folder


def test_a_tokenizers_own_class_is_not_loaded(hostile_dir: Path, mark: Path) -> None:
    tokenizer = load_tokenizer(str(hostile_dir))

    assert tokenizer.encode("What is the weather?")
    assert not mark.exists()


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_nothing_but_the_conversation(
    template: str, model_dir: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    chat = open_chat(str(model_dir), template.replace("MARK", str(mark)), {})

    with pytest.raises(PromptRejected, match="template_error"):
        chat.prompt_ids([{"role": "user", "content": "hi"}], [])

    assert not mark.exists()


@pytest.mark.slow
def test_a_models_own_code_is_not_run(
    hostile_dir: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch  # two seconds that the other tests do without

    from trainer.online.target import load_target, target_config

    monkeypatch.setattr("builtins.input", lambda _: "y")  # a person who agrees to whatever is asked

    with pytest.raises(BadInput):
        target_config(str(hostile_dir))
    with pytest.raises(BadInput):
        load_target(str(hostile_dir), [0], dtype=torch.float32, device=torch.device("cpu"))

    assert not mark.exists()


@pytest.mark.slow
def test_weights_that_are_no_safetensors_are_not_unpickled(tmp_path: Path, mark: Path) -> None:
    import torch  # as above

    from trainer.online.target import load_target

    folder = make_tiny_model(tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Unpickled(mark)}, folder / "pytorch_model.bin")

    with pytest.raises(BadInput, match="safetensors"):
        load_target(str(folder), [0], dtype=torch.float32, device=torch.device("cpu"))

    assert not mark.exists()


def _change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
