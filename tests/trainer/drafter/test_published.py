"""Folders as others publish them, made by z-lab's own class or written out by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.records import Json
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.export import export_drafter
from trainer.drafter.model import Drafter
from trainer.drafter.published import read_published
from trainer.drafter.start import start_at_random

# What SpecForge's export of a drafter of one layer is, name by name.
LAYER = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
NAMES = {f"layers.0.{name}": shape for name, shape in LAYER.items()}
NAMES |= {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
CONFIG: Json = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 4,
    "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 3]},
    "num_target_layers": 5,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "layer_types": ["sliding_attention"],
    "sliding_window": 64,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "vocab_size": 512,
    "eos_token_id": 3,
    "dtype": "bfloat16",
    "transformers_version": "5.9.0",
}


def random_tensors() -> dict[str, Tensor]:
    return {name: torch.randn(shape).bfloat16() for name, shape in NAMES.items()}


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in (CONFIG | changes).items() if v is not ...}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("markov_rank", [0, 6])
def test_what_was_exported_here_comes_back_the_same(
    small_config: DrafterConfig, tmp_path: Path, markov_rank: int
) -> None:
    drafter = Drafter(dataclasses.replace(small_config, markov_rank=markov_rank))
    start_at_random(drafter, 0)
    export_drafter(drafter, tmp_path / "out", dtype="float32", provenance={})

    config, tensors = read_published(tmp_path / "out")

    assert config == drafter.config
    assert tensors.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensors[k], v) for k, v in drafter.state_dict().items())


@pytest.mark.skipif(
    not os.environ.get("CI") and importlib.util.find_spec("dflash") is None,
    reason="z-lab's package is not installed",
)
def test_what_z_labs_class_saves_is_read_and_computes_the_same(
    small_config: DrafterConfig, tmp_path: Path
) -> None:
    from dflash.model import DFlashDraftModel

    sizes = {k: v for k, v in CONFIG.items() if k not in ("architectures", "auto_map", "dtype")}
    sizes |= {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "use_sliding_window": True}
    theirs = DFlashDraftModel(Qwen3Config(**sizes)).eval()
    theirs.save_pretrained(tmp_path)

    config, tensors = read_published(tmp_path)

    drafter = Drafter(config).eval()
    drafter.load_state_dict(tensors)
    block_BQD, features_BLF = torch.randn(1, 4, 32), torch.randn(1, 9, 64)
    with torch.no_grad():
        ours = drafter(block_BQD, drafter.read_context(features_BLF), torch.tensor([[9]]))
        wanted = theirs(
            position_ids=torch.arange(13)[None],
            noise_embedding=block_BQD,
            target_hidden=features_BLF,
        )
    assert config.rope_theta == 1000000
    assert (config.sliding_window, config.layer_types) == (64, [SLIDING, FULL])
    torch.testing.assert_close(ours, wanted)


def test_specforges_names_are_read_with_a_prefix_and_in_several_files(tmp_path: Path) -> None:
    tensors = random_tensors()
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    prefixed["model.embed_tokens.weight"] = torch.zeros(512, 32)  # the target's own
    files = {"model-1.safetensors": list(prefixed)[:5], "model-2.safetensors": list(prefixed)[5:]}
    for file, names in files.items():
        save_file({name: prefixed[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_bytes(
        orjson.dumps({"weight_map": weight_map})
    )

    config, read = read_published(tmp_path)

    assert read.keys() == NAMES.keys()
    assert all(torch.equal(read[name], tensors[name].float()) for name in NAMES)
    assert (config.target_layer_ids, config.mask_token_id, config.block_size) == ([1, 3], 511, 4)


def test_what_is_not_said_is_what_the_servers_take_for_it(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    old_form: Json = {
        "rope_parameters": ...,
        "rope_theta": 5000.0,
        "rope_scaling": scaling,
        "layer_types": ...,
        "head_dim": ...,
        "block_size": ...,
        "dflash_config": {"mask_token_id": 511},
    }
    tensors = random_tensors() | {"fc.weight": torch.randn(32, 32).bfloat16()}

    config, _ = read_published(write(tmp_path, tensors, **old_form))

    assert (config.layer_types, config.sliding_window, config.block_size) == ([FULL], None, 16)
    assert (config.target_layer_ids, config.head_dim) == ([2], 8)
    assert config.rope_theta == 5000.0
    scaling["rope_type"] = scaling.pop("type")
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle3"),
        ({"is_causal": False}, "is_causal False with sliding_attention"),
        ({"layer_types": [FULL], "is_causal": True}, "is_causal True with full_attention"),
        ({"gating": True}, "gating"),
        ({"dflash_config": CONFIG["dflash_config"] | {"projector_type": "domino"}}, "projector"),
        ({"dflash_config": CONFIG["dflash_config"] | {"selector_rank": 256}}, "selector_rank"),
        ({"dflash_config": CONFIG["dflash_config"] | {"shift_label": True}}, "shift_label"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id"),
        ({"num_target_layers": ...}, "num_target_layers"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary"),
        ({"markov_rank": 4, "markov_head_type": "gated"}, "DSpark"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"head_dim": 16}, "k_norm"),
    ],
)
def test_what_would_mean_something_else_here_is_refused_by_name(
    tmp_path: Path, change: Json, what: str
) -> None:
    folder = write(tmp_path, random_tensors(), **change)

    with pytest.raises(BadInput, match=what):
        read_published(folder)


def test_a_tensor_too_few_or_too_many_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    with pytest.raises(BadInput, match="attention_conv"):
        read_published(write(tmp_path, tensors | {"attention_conv.weight": torch.zeros(1)}))
    del tensors["norm.weight"]
    with pytest.raises(BadInput, match=r"norm\.weight is missing"):
        read_published(write(tmp_path, tensors))


def test_a_mask_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors())
    (folder / "mask_embedding.pt").touch()

    with pytest.raises(BadInput, match="mask of its own"):
        read_published(folder)


def test_damage_is_told_from_absence(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        read_published(tmp_path)
    folder = write(tmp_path, random_tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(Corrupt):
        read_published(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(Missing, match="only safetensors"):
        read_published(folder)
    (folder / "config.json").write_bytes(b"{")
    with pytest.raises(Corrupt):
        read_published(folder)
