"""S3, as much of it as this system needs, with its errors translated into ours.

Used by producer (plan), workers (data, commits), tokenizer (shards) and trainer. The one promise
that everything rests on: `put_new` writes a key at most once, whoever races (If-None-Match: *).
A reply that was lost is told from a lost race by reading the object back, so `put_new` is safe to
repeat with the same bytes.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.session
import botocore.utils
import orjson

from dflash_workers.contract.errors import (
    AccessDenied,
    BadInput,
    Conflict,
    FleetError,
    Missing,
    StoreUnavailable,
)
from dflash_workers.contract.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# The fate of each S3 error code; a code not listed is decided by its HTTP status.
FATE_BY_CODE: dict[str, type[FleetError]] = {
    "AccessDenied": AccessDenied,
    "InvalidAccessKeyId": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "ExpiredToken": AccessDenied,
    "NoSuchBucket": Missing,
    "NoSuchKey": Missing,
    "PreconditionFailed": Conflict,
    "ConditionalRequestConflict": StoreUnavailable,  # two writers at once: ask again
    "SlowDown": StoreUnavailable,
    "RequestTimeout": StoreUnavailable,
    "InternalError": StoreUnavailable,
    "ServiceUnavailable": StoreUnavailable,
    "XMinioStorageFull": StoreUnavailable,
}
FATE_BY_STATUS: dict[int, type[FleetError]] = {
    304: Conflict,  # some stores answer a failed If-None-Match so
    401: AccessDenied,
    403: AccessDenied,
    404: Missing,
    409: StoreUnavailable,
    412: Conflict,
    429: StoreUnavailable,
}
# The request or the reply was lost or garbled on the way; every other botocore error is ours.
_NO_ANSWER = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.IncompleteReadError,
    botocore.exceptions.FlexibleChecksumError,
)


@dataclass(frozen=True, slots=True)
class Store:
    """One bucket and prefix. Safe to share between threads (botocore's clients are)."""

    client: S3Client
    bucket: str
    prefix: str
    endpoint: str

    def put_new(self, key: str, body: bytes) -> None:
        """Write `key` once. Quietly succeeds if it holds these very bytes already.

        Raises Conflict where it holds others.
        """
        try:
            with self._translated(f"write {key}"):
                self.client.put_object(
                    Bucket=self.bucket, Key=self._full(key), Body=body, IfNoneMatch="*"
                )
        except Conflict:
            if _sha256(self.get(key)) != _sha256(body):
                raise

    def replace(self, key: str, body: bytes) -> None:
        """Write `key` whatever it held: for the few keys that are not truth (progress.json)."""
        with self._translated(f"write {key}"):
            self.client.put_object(Bucket=self.bucket, Key=self._full(key), Body=body)

    def get(self, key: str) -> bytes:
        """The bytes of `key`. Raises Missing."""
        with self._translated(f"read {key}"):
            return self.client.get_object(Bucket=self.bucket, Key=self._full(key))["Body"].read()

    def get_range(self, key: str, offset: int, num_bytes: int) -> bytes:
        """`num_bytes` of `key` from `offset` on. Raises Missing."""
        wanted = f"bytes={offset}-{offset + num_bytes - 1}"
        with self._translated(f"read {wanted} of {key}"):
            reply = self.client.get_object(Bucket=self.bucket, Key=self._full(key), Range=wanted)
            return reply["Body"].read()

    def exists(self, key: str) -> bool:
        """Whether `key` is there."""
        try:
            with self._translated(f"look for {key}"):
                self.client.head_object(Bucket=self.bucket, Key=self._full(key))
        except Missing:
            return False
        return True

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int]]:
        """(key, size in bytes) of everything under `prefix`, in key order, after key `after`."""
        pages = self.client.get_paginator("list_objects_v2")
        start = self._full(after) if after else ""
        with self._translated(f"list {prefix}"):
            for page in pages.paginate(
                Bucket=self.bucket, Prefix=self._full(prefix), StartAfter=start
            ):
                for entry in page.get("Contents", []):
                    yield entry["Key"].removeprefix(self._full("")), entry["Size"]

    def folders(self, prefix: str) -> Iterator[str]:
        """The names below `prefix`, which ends in "/" or is empty, that have something below them:
        one request for a thousand of them, whatever they hold.
        """
        pages = self.client.get_paginator("list_objects_v2")
        full = self._full(prefix)
        with self._translated(f"list {prefix}"):
            for page in pages.paginate(Bucket=self.bucket, Prefix=full, Delimiter="/"):
                for entry in page.get("CommonPrefixes", []):
                    yield entry["Prefix"].removeprefix(full).removesuffix("/")

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens where it is not there."""
        with self._translated(f"delete {key}"):
            self.client.delete_object(Bucket=self.bucket, Key=self._full(key))

    def create_bucket(self) -> None:
        """Make the bucket. Safe to call twice."""
        try:
            with self._translated(f"create bucket {self.bucket}"):
                self.client.create_bucket(Bucket=self.bucket)
        except FleetError:
            with self._translated(f"reach bucket {self.bucket}"):
                self.client.head_bucket(Bucket=self.bucket)

    def check(self) -> None:
        """Raise now, in one clear line, what the first real call would have raised later."""
        try:
            with self._translated("reach"):
                self.client.head_bucket(Bucket=self.bucket)
        except Missing as error:
            where = self.endpoint or "AWS"
            raise Missing(
                f"S3 at {where} has no bucket {self.bucket!r}: create it, or set DFLASH_S3_BUCKET"
            ) from error

    def url(self, key: str) -> str:
        """`s3://bucket/prefix/key`, for people."""
        return f"s3://{self.bucket}/{self._full(key)}"

    def _full(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        where = f"S3 at {self.endpoint or 'AWS'}, bucket {self.bucket!r}"
        try:
            yield
        except botocore.exceptions.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            fate = FATE_BY_CODE.get(code) or FATE_BY_STATUS.get(status) or _by_class(status)
            raise fate(
                f"{where}: could not {action}: {code or status}{_ADVICE.get(fate, '')}"
            ) from error
        except botocore.exceptions.NoCredentialsError as error:
            raise AccessDenied(
                f"{where}: no credentials: set DFLASH_S3_ACCESS_KEY and DFLASH_S3_SECRET_KEY"
            ) from error
        except _NO_ANSWER as error:
            raise StoreUnavailable(
                f"{where}: could not {action}: {type(error).__name__}: is it running, and is "
                "DFLASH_S3_ENDPOINT right?"
            ) from error
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            raise BadInput(f"{where}: {error}") from error


_ADVICE: dict[type[FleetError], str] = {
    AccessDenied: ": check DFLASH_S3_ACCESS_KEY and DFLASH_S3_SECRET_KEY",
}


def open_store(settings: Settings, *, max_attempts: int = 5) -> Store:
    """A Store from settings. Connects lazily: call `check` to find out early."""
    config = botocore.config.Config(
        retries={"mode": "standard", "max_attempts": max_attempts},
        connect_timeout=5,
        read_timeout=60,
        tcp_keepalive=True,
        max_pool_connections=32,
        # botocore's default trailing checksums break stores that don't know aws-chunked bodies.
        request_checksum_calculation="when_required" if settings.s3_endpoint else "when_supported",
        response_checksum_validation="when_required" if settings.s3_endpoint else "when_supported",
        s3={"addressing_style": "path" if settings.s3_endpoint else "auto"},
    )
    session = botocore.session.get_session()
    session.register_component("data_loader", _models())
    parsers = session.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=_parse_time)
    try:
        client = session.create_client(
            "s3",
            endpoint_url=settings.s3_endpoint or None,
            region_name=settings.s3_region,
            aws_access_key_id=settings.s3_access_key or None,
            aws_secret_access_key=settings.s3_secret_key or None,
            config=config,
        )
    except (ValueError, botocore.exceptions.BotoCoreError) as error:
        raise BadInput(
            f"DFLASH_S3_ENDPOINT {settings.s3_endpoint!r} can't be used with these keys and "
            f"settings: {error}"
        ) from error
    where = (settings.s3_bucket, settings.s3_prefix.strip("/"), settings.s3_endpoint)
    return Store(cast("S3Client", client), *where)


class _ModelFiles(botocore.loaders.JSONFileLoader):
    """botocore's descriptions of S3, parsed in a quarter of the time that its own way takes."""

    def load_file(self, file_path: str) -> Any:
        """None where there is no such file."""
        for path, opened in ((f"{file_path}.json", open), (f"{file_path}.json.gz", gzip.open)):
            if Path(path).is_file():
                with opened(path, "rb") as file:
                    return orjson.loads(file.read())
        return None


@functools.cache
def _models() -> botocore.loaders.Loader:
    """Read once in a process, however many stores it opens."""
    return botocore.loaders.Loader(file_loader=_ModelFiles())


def _parse_time(value: Any) -> Any:
    """As botocore does, whose way takes three quarters of the time that a listing takes."""
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return botocore.utils.parse_timestamp(value)


def _by_class(status: int) -> type[FleetError]:
    return StoreUnavailable if status >= 500 else BadInput


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
