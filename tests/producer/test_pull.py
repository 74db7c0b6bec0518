from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from dflash_workers.contract.errors import BadInput, Corrupt, NotEnough
from producer.pull import Form, Heldout, PullOptions, pull
from tests.producer.campaign import Campaign, prompts

LOADERS = {Form.JSONL: "json", Form.ARROW: "arrow", Form.PARQUET: "parquet"}


@pytest.fixture
def committed(campaign: Campaign) -> Campaign:
    """Two batches that are committed, one of them without a row, and one that is not."""
    first, second, _ = campaign.plan(
        [*prompts("a", "b"), *prompts("c", heldout=True)], prompts("d"), prompts("e")
    )
    campaign.commit(first)
    campaign.commit(second, {"d": "poison"})
    return campaign


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*/*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def load(form: Form, folder: Path, cache: Path) -> Any:
    """As people load it."""
    import datasets

    datasets.disable_progress_bars()
    files = str(folder / f"*/*.{form}")
    return datasets.load_dataset(LOADERS[form], data_files=files, split="train", cache_dir=cache)


@pytest.mark.parametrize("form", Form)
@pytest.mark.filterwarnings("ignore::Warning")
def test_every_form_is_read_by_datasets_with_the_rows_that_were_committed(
    committed: Campaign, tmp_path: Path, form: Form
) -> None:
    report = pull(committed.store, committed.run, tmp_path / "rows", PullOptions(form))

    rows = load(form, tmp_path / "rows", tmp_path / "cache")

    assert sorted(rows["id"]) == ["a", "b", "c"]
    assert rows[0]["answers"][0]["output_ids"] == [7, 8, 2]
    assert orjson.loads(rows[0]["messages"])[-1] == {"role": "assistant", "content": "fine"}
    assert (report.num_files, report.num_rows, report.num_there) == (2, 3, 0)


def test_a_second_pull_takes_only_what_is_new(committed: Campaign, tmp_path: Path) -> None:
    options = PullOptions()
    pull(committed.store, committed.run, tmp_path, options)
    (message,) = committed.plan(prompts("f"))
    committed.commit(message)
    heard = []

    again = pull(
        committed.store, committed.run, tmp_path, options, lambda *done: heard.append(done)
    )

    assert (again.num_files, again.num_rows, again.num_there) == (1, 1, 2)
    assert heard == [(1, 1)]
    assert (tmp_path / "000001" / f"{message.batch}.jsonl").is_file()
    assert sorted(row["id"] for row in lines(tmp_path)) == ["a", "b", "c", "f"]


@pytest.mark.parametrize(
    ("heldout", "ids"),
    [
        (Heldout.ONLY, ["c"]),
        (Heldout.WITHOUT, ["a", "b"]),
        (Heldout.BOTH, ["a", "b", "c"]),
    ],
)
def test_held_out_rows_come_alone_not_at_all_or_with_the_others(
    committed: Campaign, tmp_path: Path, heldout: Heldout, ids: list[str]
) -> None:
    pull(committed.store, committed.run, tmp_path, PullOptions(heldout=heldout))

    assert sorted(row["id"] for row in lines(tmp_path)) == ids


def test_a_folder_takes_one_choice_only(committed: Campaign, tmp_path: Path) -> None:
    pull(committed.store, committed.run, tmp_path, PullOptions())

    with pytest.raises(BadInput, match="holds another pull"):
        pull(committed.store, committed.run, tmp_path, PullOptions(heldout=Heldout.ONLY))
    with pytest.raises(BadInput, match="holds another pull"):
        pull(committed.store, committed.run, tmp_path, PullOptions(Form.PARQUET))


def test_changed_data_leaves_no_file(committed: Campaign, tmp_path: Path) -> None:
    for key, _size in committed.store.list(f"{committed.run}/data/"):
        committed.store.replace(key, committed.store.get(key) + b"\0")

    with pytest.raises(Corrupt, match="sha256"):
        pull(committed.store, committed.run, tmp_path, PullOptions())

    assert [path for path in tmp_path.glob("*/*") if path.is_file()] == []


def test_a_pull_that_broke_off_is_finished_by_the_next(
    committed: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full_disk)
        with pytest.raises(NotEnough, match="No space left"):
            pull(committed.store, committed.run, tmp_path, PullOptions())
    left = [path for path in tmp_path.rglob("*") if path.is_file()]

    report = pull(committed.store, committed.run, tmp_path, PullOptions())

    assert left == []
    assert report.num_files == 2
    assert len(lines(tmp_path)) == 3


def test_a_folder_that_is_a_file_is_said_in_one_line(committed: Campaign, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(NotEnough, match="file: can't be written"):
        pull(committed.store, committed.run, tmp_path / "file", PullOptions())
