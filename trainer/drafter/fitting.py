"""The drafter that fits a target: its configuration from the target's and a recipe's shape.

Used by online/train.py before the first step. Sizes, norm epsilon, biases and rotary scaling are
the target's own; the target layers listened to are the published drafters' choice unless the shape
names others. Invariant: what the format's readers know nothing of (gates, partial rotation) is left
out, unless the shape asks for it by name, whatever the target's own attention does.
Source: arXiv 2602.06036, section 4; `build_target_layer_ids` of z-lab's dflash.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import FULL, SLIDING, DrafterConfig, DrafterShape


def drafter_config(target: PreTrainedConfig, shape: DrafterShape, model_dir: str) -> DrafterConfig:
    """The drafter of that shape for a target. `model_dir` is asked for its tokenizer only where
    the shape leaves the mask token open.
    """
    text = target.get_text_config()
    rope = dict(text.rope_parameters)
    if not shape.partial_rotary or rope.get("partial_rotary_factor") == 1.0:
        rope.pop("partial_rotary_factor", None)
    theta = float(rope.pop("rope_theta"))
    is_plain = rope == {"rope_type": "default"}
    num_target_layers = int(text.num_hidden_layers)
    layer_type = SLIDING if shape.sliding_window else FULL
    return DrafterConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        num_layers=shape.num_layers,
        vocab_size=text.vocab_size,
        rms_norm_eps=text.rms_norm_eps,
        attention_bias=bool(getattr(text, "attention_bias", False)),
        max_position_embeddings=text.max_position_embeddings,
        rope_theta=theta,
        rope_scaling=None if is_plain else rope,
        # As published: the last layer sees everything, those below a window.
        layer_types=[layer_type] * (shape.num_layers - 1) + [FULL],
        sliding_window=shape.sliding_window or None,
        num_target_layers=num_target_layers,
        target_layer_ids=shape.target_layer_ids
        or spread_layer_ids(num_target_layers, shape.num_layers),
        mask_token_id=shape.mask_token_id
        if shape.mask_token_id >= 0
        else unused_token_id(model_dir, text.vocab_size),
        block_size=shape.block_size,
        markov_rank=shape.markov_rank,
    )


def spread_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """As many target layers as the drafter has, from the second to the last but two."""
    if num_draft_layers == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def unused_token_id(model_dir: str, vocab_size: int) -> int:
    """A row of the target's embedding that no conversation uses: the first one beyond the
    tokenizer, else the unknown token, else the last special token without a duty.

    Raises BadInput where there is none.
    """
    tokenizer = load_tokenizer(model_dir)
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    duties = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in duties:
        return int(tokenizer.unk_token_id)
    idle = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    idle = [i for i in idle if i not in duties]
    if not idle:
        raise BadInput(f"{model_dir}: no token is free to be the mask: name one (mask_token_id)")
    return int(max(idle))
