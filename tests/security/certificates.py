"""Certificates for a server on this machine, made by openssl as an operator would make them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.programs import program

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
subjectAltName = {names}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs; `certificate` is what clients trust."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """A server's."""

    certificate: Path
    key: Path


def make_authority(folder: Path, name: str) -> Authority:
    """A new one, of two days' life."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    config = _write_config(folder, name, names="DNS:unused")
    _openssl("req", "-x509", *_new_key(key, certificate, config), "-extensions", "ca")
    return Authority(certificate, key)


def make_certificate(folder: Path, authority: Authority, names: str) -> Certificate:
    """For a server that is reached by these names, written as in subjectAltName."""
    stem = names.replace(":", "-")
    certificate, key = folder / f"server-{stem}.pem", folder / f"server-{stem}.key"
    config = _write_config(folder, stem, names=names)
    signer = ["-CA", str(authority.certificate), "-CAkey", str(authority.key)]
    _openssl("req", "-x509", *_new_key(key, certificate, config), "-extensions", "server", *signer)
    return Certificate(certificate, key)


def _write_config(folder: Path, name: str, *, names: str) -> Path:
    path = folder / f"{name}.cnf"
    path.write_text(_CONFIG.format(name=name, names=names))
    return path


def _new_key(key: Path, certificate: Path, config: Path) -> list[str]:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(key), "-out", str(certificate), "-config", str(config)]
    return [*curve, *files, "-days", "2"]


def _openssl(*arguments: str) -> None:
    done = subprocess.run(
        [program("openssl", install="apt-get install openssl"), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
