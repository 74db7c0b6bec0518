"""store.py against a real S3: what is written once stays, and every error is one of ours."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import botocore.exceptions
import pytest

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    Conflict,
    FleetError,
    Missing,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import FATE_BY_CODE, FATE_BY_STATUS, Store, open_store

NUM_WRITERS = 16


def test_one_writer_of_sixteen_wins_a_key(store: Store) -> None:
    start = threading.Barrier(NUM_WRITERS)

    def write(number: int) -> bool:
        start.wait()
        try:
            store.put_new("race", b"body of %d" % number)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        won = list(writers.map(write, range(NUM_WRITERS)))

    assert won.count(True) == 1
    assert store.get("race") == b"body of %d" % won.index(True)


def test_the_same_bytes_twice_are_a_success(store: Store) -> None:
    store.put_new("key", b"body")

    store.put_new("key", b"body")

    assert store.get("key") == b"body"


def test_other_bytes_conflict_and_change_nothing(store: Store) -> None:
    store.put_new("key", b"body")

    with pytest.raises(Conflict, match="could not write key"):
        store.put_new("key", b"another body")

    assert store.get("key") == b"body"


def test_replace_overwrites_and_delete_is_safe_to_repeat(store: Store) -> None:
    store.replace("key", b"1")
    store.replace("key", b"2")
    assert store.get("key") == b"2"

    store.delete("key")
    store.delete("key")

    assert not store.exists("key")
    with pytest.raises(Missing, match="could not read key"):
        store.get("key")


def test_list_is_in_key_order_within_the_prefix_and_after_a_key(store: Store) -> None:
    for key in ("a/3", "a/1", "a/2", "ab/1", "b/1"):
        store.put_new(key, key.encode() * 2)

    assert list(store.list("a/")) == [("a/1", 6), ("a/2", 6), ("a/3", 6)]
    assert [key for key, _ in store.list("a/", after="a/1")] == ["a/2", "a/3"]
    assert list(store.list("c/")) == []


def test_list_goes_past_one_page(store: Store) -> None:
    keys = [f"many/{n:04d}" for n in range(1001)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda key: store.put_new(key, b""), keys))

    assert [key for key, _ in store.list("many/")] == keys


def test_stores_of_other_prefixes_see_nothing(store: Store, settings: Settings) -> None:
    store.put_new("key", b"body")
    other = open_store(dataclasses.replace(settings, s3_prefix=f"{settings.s3_prefix}-other"))

    assert list(other.list("")) == []
    other.client.close()


def test_a_bucket_may_be_made_twice(store: Store) -> None:
    store.create_bucket()

    store.check()


def test_a_wrong_secret_is_access_denied_in_one_line(settings: Settings) -> None:
    with _opened(settings, s3_secret_key="wrong") as store:
        for call in (store.check, lambda: store.put_new("k", b""), lambda: list(store.list(""))):
            with pytest.raises(AccessDenied, match="check DFLASH_S3_ACCESS_KEY") as caught:
                call()
            assert "\n" not in str(caught.value)


def test_no_server_is_unavailable_and_names_the_setting(settings: Settings) -> None:
    with _opened(settings, s3_endpoint=f"http://127.0.0.1:{_free_port()}") as store:
        for call in (store.check, lambda: store.get("k"), lambda: list(store.list(""))):
            with pytest.raises(StoreUnavailable, match="is DFLASH_S3_ENDPOINT right"):
                call()


def test_a_missing_bucket_is_missing(settings: Settings) -> None:
    with _opened(settings, s3_bucket="no-such-bucket") as store:
        for call in (store.check, lambda: store.put_new("k", b""), lambda: list(store.list(""))):
            with pytest.raises(Missing, match="no-such-bucket"):
                call()


@pytest.mark.parametrize("endpoint", ["no-scheme:1", "http://"])
def test_an_endpoint_that_is_no_url_is_bad_input(endpoint: str) -> None:
    with pytest.raises(BadInput, match="DFLASH_S3_ENDPOINT"):
        open_store(Settings(s3_endpoint=endpoint))


@pytest.mark.parametrize(("code", "fate"), FATE_BY_CODE.items())
def test_each_known_code_has_its_fate(code: str, fate: type[FleetError]) -> None:
    with _answering(400, code) as store, pytest.raises(FleetError, match=code) as caught:
        store.replace("key", b"")

    assert caught.type is fate


@pytest.mark.parametrize(
    ("status", "fate"),
    [*FATE_BY_STATUS.items(), (400, BadInput), (500, StoreUnavailable), (503, StoreUnavailable)],
)
def test_an_unknown_code_is_decided_by_its_status(status: int, fate: type[FleetError]) -> None:
    with _answering(status, "Unheard") as store, pytest.raises(FleetError) as caught:
        store.replace("key", b"")

    assert caught.type is fate


def test_a_lost_reply_is_unavailable() -> None:
    with _answering(0, "") as store, pytest.raises(StoreUnavailable):
        store.get("key")


def test_a_body_cut_short_is_unavailable() -> None:
    with _answering(206, "") as store, pytest.raises(StoreUnavailable):
        store.get("key")


def test_every_error_that_botocore_knows_is_translated(settings: Settings) -> None:
    known = [
        kind
        for kind in vars(botocore.exceptions).values()
        if isinstance(kind, type) and issubclass(kind, botocore.exceptions.BotoCoreError)
    ]
    with _opened(settings) as store:
        for kind in known:
            with pytest.raises(FleetError), store._translated("try"):
                raise kind.__new__(kind)


@contextmanager
def _opened(settings: Settings, **changes: str) -> Iterator[Store]:
    store = open_store(dataclasses.replace(settings, **changes), max_attempts=1)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.client.close()


@contextmanager
def _answering(status: int, code: str) -> Iterator[Store]:
    """A store whose server gives one answer: an error, a cut body (206), or no reply at all (0)."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if not status:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            body = f"<Error><Code>{code}</Code></Error>".encode()
            length = len(body) + (100 if status == 206 else 0)
            self.send_response(status)
            self.send_header("Content-Length", "0" if status == 304 else str(length))
            self.end_headers()
            if status != 304:
                self.wfile.write(body)
            self.close_connection = True

        do_GET = do_PUT

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with _opened(
                Settings(
                    s3_endpoint=f"http://127.0.0.1:{server.server_port}",
                    s3_access_key="key",
                    s3_secret_key="secret",
                )
            ) as store:
                yield store
        finally:
            server.shutdown()
            thread.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_folders_are_named_whatever_they_hold(store: Store) -> None:
    for key in ("a/1", "a/2/3", "a-1/x", "a0/x", "b/c/d", "loose", "b/loose"):
        store.put_new(key, b"")

    assert sorted(store.folders("")) == ["a", "a-1", "a0", "b"]
    assert [list(store.folders(prefix)) for prefix in ("b/", "nothing/")] == [["c"], []]


def test_folders_go_past_one_page(store: Store) -> None:
    for number in range(5):
        store.put_new(f"{number}/x", b"")
    store.client.meta.events.register(
        "provide-client-params.s3.ListObjectsV2", lambda params, **_: params | {"MaxKeys": 2}
    )

    assert list(store.folders("")) == ["0", "1", "2", "3", "4"]
