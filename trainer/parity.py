"""Is the drafter that was trained the one that will draft: the same replay through every way.

Used by the `parity` verb, and by `export` before an export appears, on a folder in the servers'
format and on held-out samples of the run. Four ways by which "fine accuracy, poor acceptance" comes
about are measured: features taken from the wrong layer (hooks against transformers' own hidden
states), training that sees what decoding doesn't (all blocks at once against one block and a grown
cache), weights that another reader reads otherwise (z-lab's class, where it is installed), and a
prediction that decoding doesn't keep. Everything is in fp32, so that what differs by more than
rounding differs in meaning. Source of the reference: `DFlashDraftModel` of z-lab's `dflash`.

B batch (1), L context length, A anchors, K block size, D hidden, F features of the target.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_workers.contract.errors import NotEnough
from trainer.drafter.blocks import BlockBatch
from trainer.drafter.export import load_export
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.speculate import Limits, accepted_along, decode_speculatively
from trainer.online.target import FrozenTarget

ROUNDING = 1e-3  # of the largest value: fp32 in another order stays far below, a mistake far above
KEPT = 0.05  # of the predicted accept length
BLOCKS_EACH = 8  # of a replay, spread over its reply


@dataclass(frozen=True, slots=True)
class Replay:
    """A recorded sample: ids, of which the first `prompt_len` are the prompt."""

    ids: Sequence[int]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest differences, as shares of the largest value; accept lengths in tokens per step."""

    features: float  # hooks against transformers' hidden_states[id + 1]
    states: float  # training's forward against decoding's
    reference: float | None  # ours against z-lab's class; None: not installed, or not its model
    predicted_accept_length: float  # by one forward along the replies
    measured_accept_length: float  # by decoding them
    num_replays: int
    num_blocks: int

    @property
    def faults(self) -> list[str]:
        """What is apart, for people; empty: nothing is."""
        apart = {
            "features are not the layers' outputs": self.features,
            "training and decoding see different things": self.states,
            "z-lab's class reads these weights otherwise": self.reference or 0.0,
        }
        found = [f"{what} ({size:.2g})" for what, size in apart.items() if not size <= ROUNDING]
        predicted, measured = self.predicted_accept_length, self.measured_accept_length
        if abs(predicted - measured) > KEPT * predicted:
            found.append(f"accept length {measured:.3f}, where {predicted:.3f} was predicted")
        return found


@torch.no_grad()
def check_parity(
    export: Path, target: FrozenTarget, replays: Sequence[Replay], limits: Limits
) -> Parity:
    """Measure on a whole target in fp32. Raises NotEnough without replays."""
    replays = [r for r in replays if 1 < r.prompt_len < len(r.ids)]
    if not replays:
        raise NotEnough("no held-out sample to replay: plan some with --heldout, and tokenize")
    drafter = load_export(export).to(target.head_VD.device).eval()
    reference = _load_reference(export, drafter)
    differences = [_replay(drafter, reference, target, replay) for replay in replays]
    predicted, measured = _accept_lengths(drafter, target, replays, limits)
    return Parity(
        features=max(d.features for d in differences),
        states=max(d.states for d in differences),
        reference=None if reference is None else max(d.reference for d in differences),
        predicted_accept_length=predicted,
        measured_accept_length=measured,
        num_replays=len(replays),
        num_blocks=sum(d.num_blocks for d in differences),
    )


@dataclass(frozen=True, slots=True)
class _Differences:
    features: float
    states: float
    reference: float
    num_blocks: int


def _replay(drafter: Drafter, reference: Any, target: FrozenTarget, replay: Replay) -> _Differences:
    ids_BL = torch.tensor([list(replay.ids)], device=target.head_VD.device)
    features_BLF, own_BLF = target.features(ids_BL), _own_features(target, ids_BL)
    anchors_A = _spread(replay.prompt_len, len(replay.ids), BLOCKS_EACH)
    batch = BlockBatch(
        ids_BL,
        torch.arange(len(replay.ids), device=ids_BL.device)[None],
        torch.tensor([anchors_A], device=ids_BL.device),
    )
    block_BQD = target.embed(drafter.block_ids(ids_BL, batch.anchors_BA))
    block_BAKD = block_BQD.view(1, len(anchors_A), drafter.config.block_size, -1)
    objective = Objective(drafter, TargetEnds(target.embed, target.head_VD), LossRecipe(1.0))
    trained_AKD = objective.block_states(features_BLF, block_BQD, batch)[0]
    states, others = [], []
    for slot, anchor in enumerate(anchors_A):
        block_1KD = block_BAKD[:, slot]
        seen_1LF = features_BLF[:, :anchor]
        states.append(_difference(trained_AKD[slot], _decoded(drafter, block_1KD, seen_1LF)))
        if reference is not None:
            others.append(_difference(trained_AKD[slot], reference(block_1KD, seen_1LF)))
    return _Differences(
        _difference(own_BLF, features_BLF), max(states), max(others, default=0.0), len(anchors_A)
    )


def _own_features(target: FrozenTarget, ids_BL: Tensor) -> Tensor:
    output = target.model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
    target.take_features()
    return torch.cat([output.hidden_states[i + 1] for i in target.layer_ids], dim=-1)


def _decoded(drafter: Drafter, block_1KD: Tensor, seen_1LF: Tensor) -> Tensor:
    """One block as speculate.py has it: behind keys and values that came in pieces."""
    anchor = seen_1LF.shape[1]
    cut = anchor // 2
    pieces = drafter.read_context(seen_1LF[:, :cut]), drafter.read_context(seen_1LF[:, cut:], cut)
    context = [
        (torch.cat((k, more_k), dim=2), torch.cat((v, more_v), dim=2))
        for (k, v), (more_k, more_v) in zip(*pieces, strict=True)
    ]
    anchors_BA = torch.tensor([[anchor]], device=block_1KD.device)
    states_BKD: Tensor = drafter(block_1KD, context, anchors_BA)
    return states_BKD[0]


def _load_reference(export: Path, drafter: Drafter) -> Any:
    """z-lab's class on the same folder, as a function of block and context; None without it."""
    if drafter.config.markov_rank or importlib.util.find_spec("dflash") is None:
        return None
    # An optional package, of which the class is all that is needed.
    from dflash.model import DFlashDraftModel

    device = drafter.fc.weight.device
    model = DFlashDraftModel.from_pretrained(export, dtype=torch.float32).to(device).eval()

    def states(block_1KD: Tensor, seen_1LF: Tensor) -> Tensor:
        num_places = seen_1LF.shape[1] + block_1KD.shape[1]
        positions = torch.arange(num_places, device=device)[None]
        output: Tensor = model(
            position_ids=positions, noise_embedding=block_1KD, target_hidden=seen_1LF
        )
        return output[0]

    return states


def _accept_lengths(
    drafter: Drafter, target: FrozenTarget, replays: Sequence[Replay], limits: Limits
) -> tuple[float, float]:
    """Predicted and measured, mean over all steps."""
    prompts = [list(replay.ids[: replay.prompt_len]) for replay in replays]
    replies = decode_speculatively(target, drafter, prompts, limits)
    measured = [n for reply in replies for n in reply.tokens_by_step]
    predicted = [
        n
        for prompt, reply in zip(prompts, replies, strict=True)
        for n in accepted_along(target, drafter, prompt, reply.ids)
    ]
    if not measured:
        raise NotEnough("every reply ends with its first token: nothing was drafted")
    return sum(predicted) / len(predicted), sum(measured) / len(measured)


def _spread(start: int, end: int, count: int) -> list[int]:
    """Up to `count` different places from `start` to the last but one before `end`."""
    places = torch.linspace(start, end - 1, min(count, end - start)).long().tolist()
    return sorted(set(places))


def _difference(wanted: Tensor, got: Tensor) -> float:
    return float((wanted - got).abs().max() / wanted.abs().max())
