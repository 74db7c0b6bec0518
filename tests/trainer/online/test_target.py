"""Which states the drafter reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_workers.contract.errors import BadInput, Missing
from trainer.online.target import FrozenTarget, TargetRecipe, load_target

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 0, 0, 0]])  # the second one is padded


def open_target(folder: Path) -> FrozenTarget:
    return load_target(str(folder), [0, 2, 3], dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", ["qwen_dir", "llama_dir"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_feature_is_the_state_after_its_layer(
    kind: str, is_cut: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    states = model(IDS[1:, :3], output_hidden_states=True).hidden_states
    target = open_target(folder)
    if is_cut:
        target.cut()

    features = target.features(IDS)

    assert features.shape == (2, 6, 96)
    wanted = torch.cat([states[i + 1] for i in (0, 2, 3)], dim=-1)
    assert torch.allclose(features[1, :3], wanted[0], rtol=1e-4, atol=1e-3)


def test_a_cut_target_has_no_layer_behind_the_last_one_needed(qwen_dir: Path) -> None:
    target = open_target(qwen_dir)

    target.cut()

    assert len(target.layers) == 4


def test_nothing_of_the_target_can_be_trained(qwen_dir: Path) -> None:
    target = open_target(qwen_dir)

    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.features(IDS).requires_grad


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="pass --model"):
        open_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(BadInput, match="can't be loaded"):
        open_target(tmp_path)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Flex attention by its definition: compiling it for a CPU takes minutes."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore")  # torch's, that it isn't compiled
def test_flex_attention_keeps_the_documents_of_a_row_apart(window_dir: Path) -> None:
    assert_packed_is_alone(window_dir, "flex_attention")


@pytest.mark.parametrize("kind", ["qwen_dir", "llama_dir", "window_dir"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_of_a_packed_row_has_the_features_that_it_has_alone(
    kind: str, attention: str, request: pytest.FixtureRequest
) -> None:
    assert_packed_is_alone(request.getfixturevalue(kind), attention)


def assert_packed_is_alone(folder: Path, attention: str) -> None:
    recipe = TargetRecipe(attention=attention)
    target = load_target(str(folder), [0, 2, 3], dtype=torch.float32, device=CPU, recipe=recipe)
    documents = [torch.arange(5, 5 + length) * 7 % 500 for length in (17, 40, 3)]
    row = torch.cat([*documents, torch.zeros(4, dtype=torch.int64)])
    positions = torch.cat([*(torch.arange(len(d)) for d in documents), torch.zeros(4).long()])

    packed = target.features(row[None], positions[None])[0]

    alone = torch.cat([target.features(d[None])[0] for d in documents])
    assert target.model.config._attn_implementation == attention
    assert (packed[: len(alone)] - alone).abs().max() < 2e-4 * alone.abs().max()
    assert not torch.allclose(target.features(row[None])[0][17:57], alone[17:57], atol=0.1)


def test_an_attention_that_would_mix_the_documents_of_a_row_is_refused() -> None:
    with pytest.raises(BadInput, match="flash_attention_2"):
        TargetRecipe(attention="flash_attention_2")
