"""The identity of a model folder's weights, without reading them.

Asked by producer/fingerprint.py, which writes it to run.json, and by the trainer, which trains on
no other target's answers. Two folders agree only if their files have the same names, sizes and
headers: another precision, quantisation or split is another identity.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_workers.contract.errors import BadInput, Missing

MAX_HEADER_BYTES = 1 << 28  # a longer safetensors header means that the file is none


def weights_sha256(folder: Path) -> str:
    """Over the index and each file's name, size and header: seconds, not a read of all weights.

    Raises Missing where there are none, BadInput where a file is no safetensors file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Missing(f"{folder}: no *.safetensors: a run is bound to its target's weights")
    digest = hashlib.sha256()
    for path in [*sorted(folder.glob("*.safetensors.index.json")), *files]:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(_header(path) if path.suffix == ".safetensors" else path.read_bytes())
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """A safetensors file's header: 8 bytes of length, little-endian, then that much JSON."""
    with path.open("rb") as file:
        length = file.read(8)
        num_bytes = int.from_bytes(length, "little")
        header = file.read(num_bytes) if num_bytes <= MAX_HEADER_BYTES else b""
    if len(length) < 8 or len(header) < num_bytes:
        raise BadInput(f"{path}: not a safetensors file, or not complete")
    return header
