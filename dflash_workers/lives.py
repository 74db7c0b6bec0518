"""Whether the engine behind the URL is still the process that it was.

Asked by deaths, at each look at the engine. A supervisor may have a dead engine back in under a
second, in which no probe finds it gone. Two marks tell one life from the next. SGLang says how long
each step of its start took, which no two starts share. Of a server that doesn't, on this host, the
kernel shows which socket listens there: another number is another life; the same one may be a
proxy's, and says nothing. A network that was cut changes neither.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from dflash_workers.contract.errors import FleetError
from dflash_workers.wire import Wire

_TELLS_PATH = "/server_info"  # of SGLang, in both dialects
_TELLS_S = 10.0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Life:
    """What tells one life of an engine from another."""

    told: bytes = b""  # by the engine; empty: it says nothing
    sockets: frozenset[str] = frozenset()  # that listen there; empty: they can't be seen

    def is_other_than(self, earlier: Life) -> bool | None:
        """None: nobody can tell."""
        if self.told and earlier.told:
            return self.told != earlier.told
        is_replaced = self.sockets and earlier.sockets and self.sockets.isdisjoint(earlier.sockets)
        return True if is_replaced else None


class Lives:
    """One engine's. Made and used inside one event loop, one look at a time."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._last = Life()

    async def is_another(self) -> bool | None:
        """Than at the last look. None: nobody can tell, as at the first."""
        life = Life(await self._told(), await asyncio.to_thread(sockets_of, self._wire.url))
        is_another = life.is_other_than(self._last)
        if is_another:
            self._last = life
        else:  # what was not to be had this time still holds
            self._last = Life(life.told or self._last.told, life.sockets or self._last.sockets)
        return is_another

    async def _told(self) -> bytes:
        try:
            told = orjson.loads(await self._wire.call(_TELLS_PATH, _TELLS_S))
            return orjson.dumps(told["startup_time"])
        except (FleetError, LookupError, TypeError, ValueError):  # another kind of server
            return b""


def sockets_of(url: str) -> frozenset[str]:
    """The kernel's numbers of the sockets that listen at the port of this host's engine."""
    where = urlsplit(url)
    if not where.port or not is_local(where.hostname or ""):
        return frozenset()
    entries = [line.split() for table in _TABLES for line in _lines_of(table)]
    ending = f":{where.port:04X}"
    return frozenset(
        fields[9] for fields in entries if fields[3] == _LISTENS and fields[1].endswith(ending)
    )


def is_local(host: str) -> bool:
    """Whether it is this host, as far as its name says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", socket.gethostname())


def _lines_of(table: Path) -> list[str]:
    try:
        return table.read_text().splitlines()[1:]
    except OSError:  # not Linux, or not allowed
        return []
