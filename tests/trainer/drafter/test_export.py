"""Exports against the format as its readers know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_workers.contract.errors import Conflict, Corrupt, Missing
from trainer.drafter.config import DrafterConfig
from trainer.drafter.export import export_drafter, load_export, tensor_shapes
from trainer.drafter.model import Drafter
from trainer.drafter.start import start_at_random


@pytest.fixture
def drafter(small_config: DrafterConfig) -> Drafter:
    drafter = Drafter(small_config)
    start_at_random(drafter, 0)
    return drafter


def test_the_tensors_of_the_published_27b_drafter_are_expected(small_config: DrafterConfig) -> None:
    published = dataclasses.replace(
        small_config,
        hidden_size=5120,
        intermediate_size=17408,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_layers=5,
        layer_types=["full_attention"] * 5,
        vocab_size=248320,
        num_target_layers=64,
        target_layer_ids=[1, 16, 31, 46, 61],
    )

    shapes = tensor_shapes(published)

    assert len(shapes) == 58
    assert shapes["fc.weight"] == (5120, 25600)
    assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 5120)
    assert sum(torch.Size(s).numel() for s in shapes.values()) == pytest.approx(1.730e9, rel=1e-3)


def test_an_export_in_fp32_comes_back_the_same(drafter: Drafter, tmp_path: Path) -> None:
    export_drafter(drafter, tmp_path / "out", dtype="float32", provenance={"run": "r"})

    loaded = load_export(tmp_path / "out")

    assert loaded.config == drafter.config
    pairs = zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_dspark_drafter_says_so_and_comes_back_the_same(
    small_config: DrafterConfig, tmp_path: Path
) -> None:
    drafter = Drafter(dataclasses.replace(small_config, markov_rank=6))
    start_at_random(drafter, 0)
    export_drafter(drafter, tmp_path / "out", dtype="float32", provenance={})

    config = orjson.loads((tmp_path / "out/config.json").read_bytes())
    tensors = load_file(tmp_path / "out/model.safetensors")
    loaded = load_export(tmp_path / "out")

    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        assert tensors[name].shape == (512, 6)
    assert loaded.config == drafter.config
    pairs = zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_an_export_says_what_servers_look_for(drafter: Drafter, tmp_path: Path) -> None:
    export_drafter(drafter, tmp_path / "out", provenance={"run": "r"})

    config = orjson.loads((tmp_path / "out/config.json").read_bytes())
    tensors = load_file(tmp_path / "out/model.safetensors")

    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 4
    assert config["dflash_config"] == {"mask_token_id": 511, "target_layer_ids": [1, 3]}
    assert "auto_map" not in config
    assert "is_causal" not in config
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not [n for n in tensors if n.startswith("model.") or "embed" in n or "rotary" in n]
    provenance = orjson.loads((tmp_path / "out/provenance.json").read_bytes())
    assert provenance == {"run": "r", "engine": "sglang==0.5.23"}


def without_one(tensors: dict[str, Tensor]) -> None:
    del tensors["layers.1.self_attn.k_norm.weight"]


def with_one_more(tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.zeros(512, 32)


def with_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(32, 32)


def with_another_type(tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = torch.zeros(32, dtype=torch.float64)


@pytest.mark.parametrize(
    "damage", [without_one, with_one_more, with_another_shape, with_another_type]
)
def test_a_tensor_too_few_too_many_or_wrong_is_refused(
    drafter: Drafter, tmp_path: Path, damage: Callable[[dict[str, Tensor]], None]
) -> None:
    out = export_drafter(drafter, tmp_path / "out", provenance={})
    tensors = load_file(out / "model.safetensors")
    damage(tensors)
    save_file(tensors, out / "model.safetensors")

    with pytest.raises(Corrupt):
        load_export(out)


def test_a_configuration_that_says_something_else_is_refused(
    drafter: Drafter, tmp_path: Path
) -> None:
    out = export_drafter(drafter, tmp_path / "out", provenance={})
    config = orjson.loads((out / "config.json").read_bytes())
    (out / "config.json").write_bytes(orjson.dumps({**config, "is_causal": True}))

    with pytest.raises(Corrupt):
        load_export(out)


def test_an_export_is_never_overwritten(drafter: Drafter, tmp_path: Path) -> None:
    export_drafter(drafter, tmp_path / "out", provenance={})

    with pytest.raises(Conflict):
        export_drafter(drafter, tmp_path / "out", provenance={})


def test_a_folder_that_is_no_export_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Missing):
        load_export(tmp_path)
