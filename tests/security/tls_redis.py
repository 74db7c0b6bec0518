"""A real redis-server as an operator hardens it: TLS alone, no default user, one user of the fleet.

The user's rights are those that SECURITY.md tells people to give. `denied` is Redis' own record of
what it refused, which shows whether they are enough.
"""

from __future__ import annotations

import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import redis

from dflash_workers.embedded import free_ports
from tests.faults.processes import ROOT, Process, until
from tests.programs import program
from tests.security.certificates import Authority, Certificate

USER = "fleet"
SECURITY = ROOT / "SECURITY.md"


def documented_rights() -> list[str]:
    """The rights of the ACL line in SECURITY.md, without user and password."""
    found = re.search(r"^ACL SETUSER fleet on >\S+ (.+)$", SECURITY.read_text(), re.MULTILINE)
    assert found, "SECURITY.md tells no ACL line"
    return found[1].split()


class TlsRedis(Process):
    """Start it; it answers then."""

    def __init__(
        self, folder: Path, authority: Authority, certificate: Certificate, password: str
    ) -> None:
        (self.port,) = free_ports(1)
        self.authority = authority
        self.data = folder / "redis"
        self.data.mkdir()
        self._password = password
        self._admin = secrets.token_hex(8)
        config = folder / "redis.conf"
        config.write_text(self._config(certificate))
        super().__init__(
            "redis",
            [program("redis-server", install="apt-get install redis-server"), str(config)],
            folder,
            {},
        )

    def _config(self, certificate: Certificate) -> str:
        return f"""\
port 0
tls-port {self.port}
bind 127.0.0.1
tls-cert-file {certificate.certificate}
tls-key-file {certificate.key}
tls-ca-cert-file {self.authority.certificate}
tls-auth-clients no
dir {self.data}
save ""
appendonly yes
appendfsync everysec
auto-aof-rewrite-percentage 0
user default off
user {USER} on >{self._password} {" ".join(documented_rights())}
user admin on >{self._admin} ~* &* +@all
"""

    def url(self, *, trusted: Path | None = None, scheme: str = "rediss") -> str:
        """Of the fleet's user. `trusted`: None for the system's own authorities."""
        url = f"{scheme}://{USER}:{quote(self._password, safe='')}@127.0.0.1:{self.port}/0"
        return f"{url}?ssl_ca_certs={trusted}" if trusted else url

    def start(self) -> None:
        """Until it answers."""
        super().start()
        until(self._answers, 30, "Redis' start")

    def denied(self) -> list[dict[str, Any]]:
        """What Redis refused a user, in its own words, the newest first."""
        with self._admin_client() as client:
            return cast("list[dict[str, Any]]", client.acl_log())

    def everything_written(self) -> list[bytes]:
        """The append-only file: every command that ever changed anything, with its values."""
        with self._admin_client() as client:
            client.config_set("appendfsync", "always")
        return [path.read_bytes() for path in sorted(self.data.rglob("*.aof"))]

    def _admin_client(self) -> redis.Redis:
        return redis.Redis(
            port=self.port,
            username="admin",
            password=self._admin,
            ssl=True,
            ssl_ca_certs=str(self.authority.certificate),
            ssl_check_hostname=False,  # some are given a wrong name on purpose
            socket_timeout=5,
            decode_responses=True,
        )

    def _answers(self) -> bool:
        with self._admin_client() as client, suppress(redis.ConnectionError, redis.TimeoutError):
            return bool(client.ping())
        return False
