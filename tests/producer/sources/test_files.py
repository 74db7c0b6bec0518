from __future__ import annotations

import os
import re
from pathlib import Path

import datasets
import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.settings import Settings
from producer.sources.files import ending_of, find_files
from producer.sources.inputs import check_inputs, read_items
from tests.producer.sources.reading import rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tree with everything that people have lying around."""
    for name in [
        "b.jsonl", "a.jsonl.gz", "deep/er/c.parquet", "deep/d.CSV", "e.json", "f.ndjson.zst",
        "README.md", "dataset_infos.json", ".hidden.jsonl", "_SUCCESS.json", ".git/x.jsonl",
        "deep/_temporary/y.jsonl", "part-1", "part-2",
    ]:  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(given: Path | str, folder: Path) -> list[str]:
    return [os.path.relpath(file.name, folder) for file in find_files(str(given), Settings())]


def test_a_folder_stands_for_its_files_of_known_kinds_by_name(folder: Path) -> None:
    assert names(folder, folder) == [
        "a.jsonl.gz", "b.jsonl", "deep/d.CSV", "deep/er/c.parquet", "e.json", "f.ndjson.zst"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["b.jsonl"]),
        ("*.jsonl*", ["a.jsonl.gz", "b.jsonl"]),
        ("**/*.parquet", ["deep/er/c.parquet"]),
        ("deep/**", ["deep/d.CSV", "deep/er/c.parquet"]),
        ("*/er", ["deep/er/c.parquet"]),
        ("de?p/[a-d].*", ["deep/d.CSV"]),
        (".h*", [".hidden.jsonl"]),
        ("*/_temporary/*", ["deep/_temporary/y.jsonl"]),
        ("part-*", ["part-1", "part-2"]),
        ("**/*.json", ["e.json"]),
    ],
)
def test_a_pattern_stands_for_the_files_it_matches_each_once(
    folder: Path, pattern: str, expected: list[str]
) -> None:
    assert names(folder / pattern, folder) == expected


def test_a_pattern_may_be_relative(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "deep")

    found = [[file.name for file in find_files(p, Settings())] for p in ("*.CSV", "../b.*", ".")]

    assert found == [["d.CSV"], ["../b.jsonl"], ["./d.CSV", "./er/c.parquet"]]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1]*.jsonl").touch()
    (tmp_path / "a1.jsonl").touch()

    assert names(tmp_path / "a[1]*.jsonl", tmp_path) == ["a[1]*.jsonl"]


def test_a_link_to_a_file_is_read_and_one_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "blob").touch()
    (tmp_path / "data" / "a.jsonl").symlink_to("../blob")
    (tmp_path / "data" / "loop").symlink_to("..")

    assert names(tmp_path / "data", tmp_path) == ["data/a.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl", tmp_path) == ["data/a.jsonl"]


@pytest.mark.parametrize("given", ["", "**/*.orc", "empty", "gone.jsonl"])
def test_what_names_no_file_is_an_error(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").touch()

    with pytest.raises(BadInput, match=r"known kind|matches no file|no such file"):
        find_files(str(tmp_path / given), Settings())


@pytest.mark.parametrize("name", ["HuggingFaceH4/ultrachat_200k", "some-org/Name-2.5"])
def test_a_hub_name_without_its_scheme_is_told_how_to_write_it(name: str) -> None:
    with pytest.raises(BadInput, match=f"written hf:{re.escape(name)}$"):
        check_inputs([name])


def test_a_file_name_that_is_not_utf8_is_an_error_named_or_found(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.jsonl"
    with open(path, "wb"):
        pass

    for given in (os.fsdecode(path), str(tmp_path), f"{tmp_path}/*.jsonl"):
        with pytest.raises(BadInput, match="not UTF-8: rename it"):
            find_files(given, Settings())


def test_a_file_that_is_not_read_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"a":1}\n')
    for name in (b"\xff.txt", b".\xff.jsonl"):
        with open(os.fsencode(tmp_path) + b"/" + name, "wb"):
            pass

    assert rows(tmp_path) == rows(f"{tmp_path}/*.jsonl") == rows(f"{tmp_path}/**") == [{"a": 1}]


def test_a_saved_data_set_is_its_data_without_the_librarys_caches(tmp_path: Path) -> None:
    given = [{"id": str(n)} for n in range(100)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(given).save_to_disk(tmp_path / "saved", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "saved")
    loaded.map(lambda row: {"more": row["id"]})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))

    assert rows(tmp_path / "saved") == given


def test_a_saved_dict_of_data_sets_is_all_its_splits(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    splits = {
        name: datasets.Dataset.from_list([{"id": name, "n": None}]) for name in ("train", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")

    assert rows(tmp_path / "saved") == [{"id": "test", "n": None}, {"id": "train", "n": None}]
    assert rows(tmp_path / "saved" / "train") == [{"id": "train", "n": None}]


def test_the_files_of_a_folder_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"n":"{name}"}}\n')

    items = list(read_items([tmp_path], Settings()))

    assert items == [
        (f"{tmp_path}/a.jsonl:1", b'{"n":"a"}'),
        (f"{tmp_path}/b.jsonl:1", b'{"n":"b"}'),
    ]


@pytest.mark.parametrize(
    ("name", "ending"),
    [("a.jsonl", ".jsonl"), ("x/b.JSON.gz", ".json"), ("c.gz", ""), ("d", ""), ("e.tar", ".tar")],
)
def test_the_ending_of_a_compressed_file_is_the_one_before(name: str, ending: str) -> None:
    assert ending_of(name) == ending
