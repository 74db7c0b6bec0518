"""A model folder small enough to be built inside a test: tokenizer, template, config, weights.

The tokenizer is byte-level BPE (every text has ids, and one character may need several), the
template is ChatML with tools and thinking, the model is a Qwen3 of two layers with random weights.
Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # one id each, yet plain text
VOCAB_SIZE = 512  # embedding rows: more than the tokenizer has, as real models do
HIDDEN_SIZE = 32
CONTEXT_LEN = 4096

CORPUS = [
    "What is the weather in Paris today? The weather in Paris is sunny and warm.",
    "Write a function that adds two numbers: def add(a, b): return a + b",
    "system user assistant tool name arguments content function description parameters",
]

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def make_tiny_model(folder: Path, *, weights: bool = False) -> Path:
    """Fill `folder` and return it.

    Without `weights` a file with only the embedding stands for them, so that torch isn't loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    stop_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = _config(stop_ids[0])
    (folder / "generation_config.json").write_text(
        json.dumps(
            {
                "do_sample": True,
                "eos_token_id": stop_ids,
                "temperature": 0.6,
                "top_p": 0.95,
                "top_k": 20,
            }
        )
    )
    if weights:
        _save_weights(folder, config)
    else:
        embedding = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), dtype=np.float32)
        save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _config(eos_token_id: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT_LEN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": eos_token_id,
        "dtype": "float32",
    }


def _save_weights(folder: Path, config: dict[str, object]) -> None:
    import torch  # two seconds and 200 MB that most tests do without
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(dict(config)))
    model.save_pretrained(folder)
