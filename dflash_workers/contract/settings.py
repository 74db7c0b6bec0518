"""Where a process finds Redis, S3 and its run: flags > environment (DFLASH_*) > dflash.toml.

Read once, by the outermost frame of each process, and handed down; nothing below reads the
environment. Unknown keys in dflash.toml or unknown DFLASH_* variables are errors. Secrets never
appear in a repr.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_workers.contract.errors import BadUsage

CONFIG_FILE = Path("dflash.toml")
LOCAL_REDIS_URL = "redis://127.0.0.1:6379/0"
ENGINE_DIALECTS = ("sglang", "openai")
SPOT_PROVIDERS = ("", "none", "aws", "gcp", "azure")


@dataclass(frozen=True, slots=True)
class Settings:
    """One value per name; the environment variable is DFLASH_ + the name in capitals."""

    redis_url: str = field(default="", repr=False)  # empty: this machine's, without a password
    redis_prefix: str = "dflash:"
    s3_endpoint: str = ""  # empty: AWS
    s3_bucket: str = "dflash"
    s3_prefix: str = ""
    s3_region: str = "us-east-1"
    s3_access_key: str = field(default="", repr=False)  # empty: boto3's own credential chain
    s3_secret_key: str = field(default="", repr=False)
    run: str = ""
    model: str = ""  # folder of the target: config, tokenizer, weights
    engine_url: str = "http://127.0.0.1:30000"
    engine_dialect: str = "sglang"  # how the engine is spoken to; openai: vLLM and others
    max_in_flight: int = 48  # requests running in the engine at once
    slot: str = ""  # a stable name for this worker; empty: host name and the engine's port
    flower_login: str = field(default="", repr=False)  # "user:password" for Flower
    spot_provider: str = ""  # aws | gcp | azure: whose notices count; empty, none: nobody asked
    spot_url: str = ""  # of its metadata service; empty: the provider's own
    spot_rebalance: int = 0  # 1: AWS' rebalance recommendation, which names no time, counts too
    spot_file: str = ""  # a file that means "this host is going" while it exists

    def __post_init__(self) -> None:
        if self.run and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.run):
            raise BadUsage(f"run name {self.run!r}: use letters, digits, '.', '_', '-'")
        if self.slot and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.slot):
            raise BadUsage(f"slot {self.slot!r}: use letters, digits, '.', '_', '-'")
        if self.engine_dialect not in ENGINE_DIALECTS:
            known = ", ".join(ENGINE_DIALECTS)
            raise BadUsage(f"engine_dialect {self.engine_dialect!r} is not known: use {known}")
        if self.spot_provider not in SPOT_PROVIDERS:
            known = ", ".join(SPOT_PROVIDERS[1:])
            raise BadUsage(f"spot_provider {self.spot_provider!r} is not known: use {known}")
        if self.spot_url and not re.fullmatch(r"http://[^/\s?#]+", self.spot_url):
            raise BadUsage(f"spot_url {self.spot_url!r}: use http://HOST or http://HOST:PORT")
        if self.max_in_flight < 1:
            raise BadUsage(f"max_in_flight must be at least 1, not {self.max_in_flight}")

    @property
    def broker_url(self) -> str:
        """Where Redis is. Over TLS its certificate is checked, unless the URL says otherwise."""
        url = self.redis_url or LOCAL_REDIS_URL
        if url.startswith("rediss:") and "ssl_cert_reqs=" not in url:
            # kombu checks nothing of a server where the URL has no option of TLS.
            return f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"
        return url

    def require_run(self) -> str:
        """The run's name; BadUsage where none was given."""
        if not self.run:
            raise BadUsage("no run given: pass --run NAME or set DFLASH_RUN")
        return self.run

    def public_redis_url(self) -> str:
        """The Redis URL without user, password and options, for messages."""
        before, at, where = self.broker_url.rpartition("@")
        scheme = re.match(r"[a-z]+://", before)
        shown = f"{scheme[0] if scheme else ''}***@{where}" if at else where
        return shown.partition("?")[0]

    def environment(self) -> dict[str, str]:
        """These settings as DFLASH_* variables, for a child process."""
        return {
            f"DFLASH_{f.name.upper()}": str(getattr(self, f.name)) for f in dataclasses.fields(self)
        }


# DFLASH_* variables that are not settings of this class, each read by the one place named.
OTHER_VARIABLES = frozenset({"DFLASH_DEBUG"})  # fleet.py


def load_settings(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    config_file: Path = CONFIG_FILE,
) -> Settings:
    """Merge the three sources; a flag of None or "" counts as not given."""
    environ = os.environ if environ is None else environ
    names = {f.name: f.type for f in dataclasses.fields(Settings)}
    values: dict[str, object] = dict(_read_config(config_file, names))
    for variable, text in environ.items():
        if variable.startswith("DFLASH_") and variable not in OTHER_VARIABLES:
            name = variable.removeprefix("DFLASH_").lower()
            if name not in names:
                raise BadUsage(f"unknown environment variable {variable}")
            values[name] = text
    values.update({k: v for k, v in flags.items() if v not in (None, "")})
    return Settings(**{k: _typed(k, v, names[k]) for k, v in values.items()})  # type: ignore[arg-type]


def _read_config(path: Path, names: Mapping[str, object]) -> Mapping[str, object]:
    if not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadUsage(f"{path}: {error}") from error
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise BadUsage(f"{path}: unknown key {unknown[0]!r}")
    return values


def _typed(name: str, value: object, kind: object) -> object:
    if isinstance(value, (list, dict)):
        raise BadUsage(f"{name} must be a single value, not {value!r}")
    if kind != "int":
        return str(value)
    try:
        return int(str(value))
    except ValueError as error:
        raise BadUsage(f"{name} must be a whole number, not {value!r}") from error
