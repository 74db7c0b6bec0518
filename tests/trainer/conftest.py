"""Targets small enough for a test, with weights wild enough that their replies differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.tiny_model import make_tiny_model
from trainer.drafter.config import FULL, DrafterConfig
from trainer.tokens.shards import Sample

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-like target: q and k norms, its own output head."""
    folder = make_tiny_model(tmp_path_factory.mktemp("qwen"))
    torch.manual_seed(1)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like target: no q and k norms, scaled rotary positions, tied embeddings."""
    folder = make_tiny_model(tmp_path_factory.mktemp("llama"))
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    torch.manual_seed(2)
    config = LlamaConfig(**SIZES, rope_parameters=rope, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def window_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers look back over eight tokens, all but one."""
    folder = make_tiny_model(tmp_path_factory.mktemp("window"))
    torch.manual_seed(3)
    layer_types = ["sliding_attention"] * 4 + ["full_attention"]
    config = Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=8, layer_types=layer_types
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    """Samples of random ids and random lengths."""

    def make(num: int, *, heldout: bool = False, answer_len: int = 20) -> list[Sample]:
        random = np.random.default_rng(num)
        samples = []
        for i in range(num):
            prompt_len = int(random.integers(3, 12))
            length = prompt_len + int(random.integers(answer_len // 2, answer_len + 1))
            ids = random.integers(3, 500, length).astype(np.int32)
            samples.append(
                Sample(f"{i:032x}", f"s{i}", 0, ids, prompt_len, -1, heldout, "length", [])
            )
        return samples

    return make


@pytest.fixture
def small_config() -> DrafterConfig:
    """A drafter that fits both targets."""
    return DrafterConfig(
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_layers=2,
        vocab_size=512,
        rms_norm_eps=1e-6,
        attention_bias=False,
        max_position_embeddings=512,
        rope_theta=10000.0,
        rope_scaling=None,
        layer_types=[FULL, FULL],
        sliding_window=None,
        num_target_layers=5,
        target_layer_ids=[1, 3],
        mask_token_id=511,
        block_size=4,
    )
