r"""What a recipe needs of a GPU's memory for a target, before any of it is at hand.

    python -m benchmarks.h200.headline.planning --recipe qwen3_8b_h200 --model FOLDER \
        [--gpu-gib 139] [--set key=value]

FOLDER needs a config.json alone. Resolves the recipe for it, down to the drafter's layers and the
target's layers that are listened to, and counts what is sure to be in memory. Activations and the
allocator's waste come on top: benchmarks/results/online_h200_202611.md has 39.3 GiB for what this
counts as 33.2. Exit code 1 where even that does not fit.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.drafter.fitting import drafter_config
from trainer.drafter.model import Drafter
from trainer.online.recipe import TrainRecipe
from trainer.recipes import named_recipe

BF16_BYTES, FP32_BYTES = 2, 4
TRAINED_BYTES = 4 * FP32_BYTES  # of a parameter: itself, its gradient and Adam's two averages
LOGITS_BYTES = BF16_BYTES + 2 * FP32_BYTES  # of one: itself, its log-probability, its probability
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one kind of GPU, by what they are."""

    role: str  # target | drafter | both
    num_gpus: int  # 0: all that there are
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Of one such GPU."""
        return sum(self.parts.values())


def main(arguments: list[str]) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    needs = needs_of(named_recipe(args.recipe, args.changes), args.model)
    for need in needs:
        where = f"each of {need.num_gpus} GPUs" if need.num_gpus else "each GPU"
        print(f"{need.role}, on {where}: {_gib(need.total)} at least")
        for name, num_bytes in need.parts.items():
            print(f"  {name}: {_gib(num_bytes)}")
    fits = all(need.total <= args.gpu_gib * GIB for need in needs)
    print(f"{'fits' if fits else 'does not fit'} into {args.gpu_gib:g} GiB")
    return 0 if fits else 1


def needs_of(recipe: TrainRecipe, model_dir: str) -> list[Need]:
    """By role. Raises BadInput where recipe and target don't agree."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    fitted = drafter_config(config, recipe.drafter, model_dir)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        drafter = Drafter(fitted)
    layers = target.get_decoder().layers
    unused = sum(_size(layer) for layer in layers[max(fitted.target_layer_ids) + 1 :])
    tokens = recipe.data.batch_size * recipe.data.max_len
    width = fitted.hidden_size * len(fitted.target_layer_ids)
    head = {"head and embedding": _ends(target) * BF16_BYTES}
    features = {"features of a microbatch": tokens * width * BF16_BYTES}
    looked = {"target, up to the last layer listened to": (_size(target) - unused) * BF16_BYTES}
    rows = min(
        recipe.loss.chunk_rows,
        recipe.data.batch_size * recipe.data.num_anchors * fitted.num_drafts,
    )
    trained = {
        "drafter, gradients, optimizer": _size(drafter) * TRAINED_BYTES,
        "logits of a chunk": rows * fitted.vocab_size * LOGITS_BYTES,
    }
    if not recipe.topology.num_targets:
        return [Need("both", 0, {**looked, **features, **trained})]
    num_targets = recipe.topology.num_targets
    return [
        Need("target", num_targets, {**looked, **features}),
        Need("drafter", 0, {**head, **features, **trained}),
    ]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _ends(target: nn.Module) -> int:
    """Parameters of embedding and head, which may be one."""
    ends = (target.get_input_embeddings(), target.get_output_embeddings())  # type: ignore[operator]
    return sum(p.numel() for p in {id(end.weight): end.weight for end in ends}.values())


def _gib(num_bytes: int) -> str:
    return f"{math.ceil(num_bytes / GIB * 10) / 10:.1f} GiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--model", required=True, help="folder with the target's config.json")
    parser.add_argument("--gpu-gib", type=float, default=139.0, help="of each GPU")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
