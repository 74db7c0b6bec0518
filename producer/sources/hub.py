"""A data set of the Hugging Face hub -> rows, streamed by the `datasets` library.

Named hf:ORG/NAME[:CONFIG][@SPLIT]; a folder of this machine may stand for ORG/NAME. Hands
(source, row) to -> inputs.py. Without @SPLIT every split is read, one after the other. Rows come as
Arrow blocks, so that values are read as those of tables.py. Types are the library's guess where the
data set states none: the files themselves, named without hf:, are read without guessing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_workers.contract.errors import BadInput, FleetError, Missing, StoreUnavailable
from producer.sources.rows import SourcedItem
from producer.sources.tables import BLOCK_ROWS, table_rows

HUB_SCHEME = "hf:"

_ADVICE_NAME = ": check the name; a private or gated data set wants `hf auth login` first"
_ADVICE_NETWORK = ": check the network, or download the data set's files elsewhere and name those"
_ADVICE_DOWNLOAD = ": download the data set's files and name those: their types are not guessed"

PROBE_TIMEOUT_S = 4.0  # to connect, and again to answer
_ON_HUB = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")

_NAME = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")


@dataclass(frozen=True, slots=True)
class _HubName:
    path: str
    config: str | None
    split: str | None


def check_hub_name(name: str) -> None:
    """Raise BadInput for a name that can't be read, without asking the hub."""
    path = Path(_parse_name(name).path)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        raise BadInput(f"{name}: written by `save_to_disk`: name the folder without {HUB_SCHEME}")
    if importlib.util.find_spec("datasets") is None:
        raise BadInput(f"{name}: the hub's reader is missing: pip install 'dflash-fleet[hub]'")


def read_hub(name: str) -> Iterator[SourcedItem]:
    """Every row of the named split, or of all. Needs the `hub` extra."""
    check_hub_name(name)
    wanted = _parse_name(name)
    with _translated_errors(name):
        for split, rows in _load_splits(wanted):
            source = f"{name.partition('@')[0]}@{split}"
            num_rows = 0
            for block in rows.with_format("arrow").iter(batch_size=BLOCK_ROWS):
                yield from table_rows(block, source, num_rows + 1)
                num_rows += block.num_rows


def _parse_name(name: str) -> _HubName:
    match = _NAME.fullmatch(name.removeprefix(HUB_SCHEME))
    if match is None:
        raise BadInput(f"{name}: write hf:ORG/NAME, hf:ORG/NAME:CONFIG or hf:ORG/NAME@SPLIT")
    return _HubName(match["path"], match["config"], match["split"])


def _load_splits(wanted: _HubName) -> list[tuple[str, Any]]:
    # Imported here: it takes longer than all else, and is installed only where it is asked for.
    import datasets

    datasets.disable_progress_bars()
    if _ON_HUB.fullmatch(wanted.path) and not Path(wanted.path).exists():
        _reach_hub()
    loaded = datasets.load_dataset(wanted.path, wanted.config, split=wanted.split, streaming=True)
    return [(wanted.split, loaded)] if wanted.split else list(loaded.items())


def _reach_hub() -> None:
    """Ask once and briefly: the library itself asks for half a minute before it gives up."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:  # then only what is cached is read
        get_session().head(constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)


@contextmanager
def _translated_errors(name: str) -> Iterator[None]:
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    # The first entry that fits decides.
    fates: list[tuple[tuple[type[Exception], ...], type[FleetError], str]] = [
        ((DatasetNotFoundError, RepositoryNotFoundError), Missing, _ADVICE_NAME),
        ((ConnectionError, TimeoutError, HTTPError), StoreUnavailable, _ADVICE_NETWORK),
        ((pa.ArrowException, DatasetsError), BadInput, _ADVICE_DOWNLOAD),
        ((OSError, ValueError, RuntimeError), BadInput, ""),
    ]
    try:
        yield
    except tuple(kind for kinds, _, _ in fates for kind in kinds) as error:
        fate, advice = next((f, a) for kinds, f, a in fates if isinstance(error, kinds))
        what = str(error).split("\n")[0].rstrip(". ") or type(error).__name__
        raise fate(f"{name}: {what}{advice}") from error
