"""Certificates for TLS tests, made with the `openssl` command: an authority, and what it signs."""

import hashlib
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


def openssl_is_there() -> bool:
    return shutil.which("openssl") is not None


needs_openssl = pytest.mark.skipif(not openssl_is_there(), reason="needs the openssl command")

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files. `chain` holds the certificate, then those above it that the server is to show as well."""

    chain: Path
    key: Path

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the first certificate, in hexadecimal digits."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(self.chain.read_text()))).hexdigest()

    def encrypted(self, password: str) -> "Certificate":
        """The same, its key under that password."""
        key = self.key.with_suffix(".encrypted")
        _openssl("pkcs8", "-topk8", "-in", self.key, "-out", key, "-passout", f"pass:{password}")
        return Certificate(self.chain, key)


class Authority:
    """An authority of that name. Two of one name are two: each has a key of its own."""

    def __init__(self, directory: Path, name: str = "Pagemill test authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._number = 0
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            "req", "-x509", *_KEY, "-keyout", self._key, "-out", self.certificate, "-days", "3650",
            "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip

    def issue(self, host: str = "127.0.0.1", *, days: int = 3650, shows: Path | None = None) -> Certificate:
        """A server's or client's certificate for a host name or IPv4 address.

        `shows`: a certificate that its holder shows behind it, whoever signed; with one, ours is left without the
        identifiers by which a chain is put together. `days`: how long it is good from now on; -1: since yesterday not.
        """
        self._number += 1
        path = self._directory / f"issued-{self._number}"
        key, request, extensions, chain = (path.with_suffix(end) for end in (".key", ".csr", ".ext", ".pem"))
        kind = "IP" if host.replace(".", "").isdigit() else "DNS"
        lines = [f"subjectAltName={kind}:{host}"]
        if shows is not None:
            lines += ["authorityKeyIdentifier=none", "subjectKeyIdentifier=none"]
        extensions.write_text("\n".join(lines) + "\n")
        _openssl("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={host}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial",
            "-days", str(days), "-extfile", extensions, "-out", chain,
        )  # fmt: skip
        if shows is not None:
            chain.write_text(chain.read_text() + shows.read_text())
        return Certificate(chain, key)


def _first(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    return pem[: pem.index(end) + len(end)] + "\n"


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
