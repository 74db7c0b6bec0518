"""Targets that go back, and targets that can't."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM

from dflash_workers.contract.errors import BadInput
from tests.tiny_model import make_tiny_model
from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import Limits, decode_plainly, decode_speculatively
from trainer.drafter.start import start_at_random
from trainer.drafter.target_rows import RECOMPUTED_TOKENS, can_go_back
from trainer.online.target import FrozenTarget, load_target

PROMPTS = [[11, 12, 13, 14, 15], [200, 7, 31]]
LIMITS = Limits(max_new_tokens=12, stop_ids=frozenset())


@pytest.fixture(scope="module")
def recurrent_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a state, two that attend, as Qwen3.5 alternates them."""
    folder = make_tiny_model(tmp_path_factory.mktemp("recurrent"))
    torch.manual_seed(4)
    kinds = ["linear_attention", "full_attention"] * 2 + ["linear_attention"]
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        layer_types=kinds,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recurrent(recurrent_dir: Path) -> FrozenTarget:
    return load_target(str(recurrent_dir), [1, 3], dtype=torch.float32, device=torch.device("cpu"))


def test_a_target_with_states_is_computed_anew_and_says_what_it_says_by_itself(
    recurrent: FrozenTarget, recurrent_dir: Path, small_config: DrafterConfig
) -> None:
    model = AutoModelForCausalLM.from_pretrained(recurrent_dir, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    drafter = Drafter(small_config).eval()
    start_at_random(drafter, seed=0)

    plain = decode_plainly(recurrent, PROMPTS, LIMITS)
    drafted = decode_speculatively(recurrent, drafter, PROMPTS, LIMITS)

    assert not can_go_back(recurrent)
    assert [r.ids for r in drafted] == [r.ids for r in plain]
    for prompt, reply in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert reply.ids == generated[0, len(prompt) :].tolist()


def test_a_sequence_too_long_to_be_computed_anew_is_refused(recurrent: FrozenTarget) -> None:
    with pytest.raises(BadInput, match="recurrent layers"):
        decode_plainly(recurrent, PROMPTS, Limits(RECOMPUTED_TOKENS, frozenset()))
