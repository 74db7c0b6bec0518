from __future__ import annotations

import dataclasses
import gzip
import io
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    FleetError,
    Missing,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import free_ports
from producer.sources.inputs import check_inputs, read_items
from tests.producer.sources.reading import read, rows


def parquet(rows: list[dict[str, str]]) -> bytes:
    body = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), body)
    return body.getvalue()


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("a.jsonl", b'{"id":"1"}\n{"id":"2"}\n'),
        ("a b é+&[1].jsonl.gz", gzip.compress(b'{"id":"1"}\n{"id":"2"}\n')),
        ("a.json", b'[{"id":"1"},{"id":"2"}]'),
        ("a.csv", b"id\n1\n2\n"),
        ("a.parquet", parquet([{"id": "1"}, {"id": "2"}])),
        ("part-00000", b'{"id":"1"}\n{"id":"2"}\n'),
    ],
    ids=["lines", "packed-lines", "array", "table", "parquet", "no-suffix"],
)
def test_an_object_is_read_as_a_file_of_its_name(
    settings: Settings, store: Store, key: str, body: bytes
) -> None:
    store.replace(key, body)
    url = store.url(key)

    found = read(url, settings=settings)

    assert [row for _, row in found] == [{"id": "1"}, {"id": "2"}]
    assert found[1][0] in (f"{url}:2", f"{url}#2")


def test_a_prefix_is_a_folder_and_patterns_match_keys(settings: Settings, store: Store) -> None:
    for key in ("in/b.jsonl", "in/a/c.jsonl", "in/_tmp/d.jsonl", "in/README.md", "in-2.jsonl"):
        store.replace(key, b'{"id":"%s"}\n' % key.encode())

    def ids(key: str) -> list[str]:
        found = rows(store.url(key), settings=settings)
        return [row["id"] for row in found if isinstance(row, dict)]

    assert ids("in") == ids("in/") == ["in/a/c.jsonl", "in/b.jsonl"]
    assert ids("in*") == ["in-2.jsonl", "in/a/c.jsonl", "in/b.jsonl"]
    assert ids("**/c.*") == ["in/a/c.jsonl"]


def test_a_saved_data_set_may_lie_in_s3(settings: Settings, store: Store, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"id": "1"}, {"id": "2"}]).save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "saved").iterdir():
        store.replace(f"saved/{path.name}", path.read_bytes())

    assert rows(store.url("saved"), settings=settings) == [{"id": "1"}, {"id": "2"}]


def test_an_object_larger_than_a_buffer_is_read_whole(settings: Settings, store: Store) -> None:
    lines = [b'{"n":%d,"t":"%s"}' % (n, b"x" * 1000) for n in range(20_000)]
    store.replace("big.jsonl", b"\n".join(lines))

    found = [item for _, item in read_items([store.url("big.jsonl")], settings)]

    assert found == lines


@pytest.mark.parametrize(
    ("changes", "url", "error", "what"),
    [
        ({}, "s3://{bucket}/gone", BadInput, r"no such file or folder.*'s3://.*/gone\*'"),
        ({}, "s3://{bucket}/gone/*.jsonl", BadInput, "matches no file"),
        ({}, "s3://no-such-bucket/*", Missing, "NO_SUCH_BUCKET"),
        ({"s3_secret_key": "wrong"}, "s3://{bucket}/a", AccessDenied, "DFLASH_S3_SECRET_KEY"),
        ({"s3_secret_key": ""}, "s3://{bucket}/a", BadInput, "secret_key"),
    ],
)
def test_what_s3_refuses_is_one_clear_line(
    settings: Settings,
    changes: dict[str, str],
    url: str,
    error: type[FleetError],
    what: str,
) -> None:
    settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]

    with pytest.raises(error, match=rf"^[^\n]*{what}[^\n]*$"):
        read(url.format(bucket=settings.s3_bucket), settings=settings)


def test_an_s3_that_is_away_is_said_with_what_to_do(settings: Settings) -> None:
    (port,) = free_ports(1)
    settings = dataclasses.replace(settings, s3_endpoint=f"http://127.0.0.1:{port}")

    with pytest.raises(StoreUnavailable, match=r"s3://b/a\.jsonl: .*is DFLASH_S3_ENDPOINT right"):
        read("s3://b/a.jsonl", settings=settings)


def test_a_check_asks_nothing_of_s3() -> None:
    check_inputs(["s3://no-such-bucket/gone.jsonl"])


def test_an_s3_url_without_bucket_is_an_error(settings: Settings) -> None:
    with pytest.raises(BadInput, match="names no bucket"):
        read("s3://", settings=settings)
