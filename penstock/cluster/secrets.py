"""The secrets of a cluster: a token, and a certificate with its key.

The launcher makes them once, in files that only its user can read; every node reads them. They are
never part of a command line, an environment variable or a log.

All nodes of a cluster have the same certificate. Each end of a connection shows it and accepts no
other, so a process without the key cannot even send a request.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock import config
from penstock.errors import ClusterError, StoreError
from penstock.host.private_dir import check_own, own_directory

SERVER_NAME = "penstock.cluster"
"""The name in the certificate. Nodes check this name, not the address: addresses change."""

TOKEN, CERTIFICATE, KEY = "token", "certificate.pem", "key.pem"
TOKEN_BYTES = 32
_LARGEST = 64 << 10
_DAYS = 3650
_EXPORT = "penstock-cluster-secrets-1"


@dataclass(frozen=True, slots=True)
class Secrets:
    """Token, certificate and key of a cluster. Their values are not shown in ``repr``."""

    token: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


def make_secrets(directory: Path) -> Secrets:
    """Make new secrets in a directory, which is created with mode 0700 if it is missing.

    Fails if there are secrets already: nodes that have read them would lose the others.
    """
    try:
        own_directory(directory)
    except StoreError as error:
        raise ClusterError(str(error)) from None
    found = [name for name in (TOKEN, CERTIFICATE, KEY) if (directory / name).exists()]
    if found:
        raise ClusterError(
            f"{directory} already contains {', '.join(found)}. Use these secrets, or remove the "
            "directory when no node of the cluster is running."
        )
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        _make_certificate(Path(scratch))
        _write(Path(scratch) / TOKEN, secrets.token_bytes(TOKEN_BYTES))
        # The token comes last: a reader that finds it finds the rest.
        for name in (CERTIFICATE, KEY, TOKEN):
            os.chmod(Path(scratch) / name, 0o600)
            os.rename(Path(scratch) / name, directory / name)
    return read_secrets(directory)


def read_secrets(directory: Path | None = None) -> Secrets:
    """The secrets in a directory, by default the one that PENSTOCK_CLUSTER_SECRET names.

    Raises ClusterError if a file is missing, or if other users can read it.
    """
    directory = directory or config.cluster_secret()
    try:
        check_own(directory)
    except FileNotFoundError:
        raise ClusterError(
            f"{directory} does not exist on this machine. Copy the secrets of the cluster to it "
            "(cp -rp), or put them on a file system that all machines share."
        ) from None
    except StoreError as error:
        raise ClusterError(str(error)) from None
    token = _read(directory / TOKEN)
    if len(token) != TOKEN_BYTES:
        raise ClusterError(
            f"{directory / TOKEN} has {len(token)} bytes, and a token has {TOKEN_BYTES}. Copy the "
            "file again, as it is."
        )
    return Secrets(token, _read(directory / CERTIFICATE), _read(directory / KEY))


def write_secrets(directory: Path, given: Secrets) -> None:
    """Write secrets that came on a safe way to a directory, which must not have any yet."""
    try:
        own_directory(directory)
    except StoreError as error:
        raise ClusterError(str(error)) from None
    files = {CERTIFICATE: given.certificate, KEY: given.key, TOKEN: given.token}
    found = [name for name in files if (directory / name).exists()]
    if found:
        raise ClusterError(
            f"{directory} already contains {', '.join(found)}. Remove the directory when no node "
            "of its cluster is running, or name another with --secret."
        )
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        # The token comes last, as in ``make_secrets``.
        for name, content in files.items():
            _write(Path(scratch) / name, content)
            os.rename(Path(scratch) / name, directory / name)


def fingerprint_of(given: Secrets) -> str:
    """Identifies secrets without giving them away: the digest of their certificate, which every
    connection shows anyway."""
    return hashlib.sha256(given.certificate).hexdigest()


def export_secrets(given: Secrets) -> str:
    """The secrets as text for a pipe to another machine; ``import_secrets`` is the reverse.

    >>> import_secrets(export_secrets(Secrets(bytes(TOKEN_BYTES), b"c", b"k"))).certificate
    b'c'
    """
    parts = (given.token, given.certificate, given.key)
    return "\n".join([_EXPORT, *(base64.b64encode(part).decode() for part in parts), ""])


def import_secrets(text: str) -> Secrets:
    """The secrets that ``export_secrets`` has made a text of. Raises ClusterError."""
    lines = text.split()
    try:
        head, *parts = lines
        token, certificate, key = (base64.b64decode(part, validate=True) for part in parts)
    except ValueError:
        head, token, certificate, key = "", b"", b"", b""
    if head != _EXPORT or len(token) != TOKEN_BYTES or not certificate or not key:
        # The text itself is not shown: it may be secret.
        raise ClusterError(
            f"these {len(lines)} lines are not the secrets of a cluster. Give the whole output of "
            "`penstock cluster secrets --export`."
        )
    return Secrets(token, certificate, key)


def _make_certificate(directory: Path) -> None:
    """Make a self-signed certificate with the program ``openssl``.

    The alternative is the package cryptography: 4 MB more for every node, for something that only
    the launcher does, once.
    """
    program = shutil.which("openssl")
    if program is None:
        raise ClusterError(
            "the secrets of a cluster need the program openssl, which is not installed. Install "
            "it (apt-get install openssl), or make the secrets on another machine and copy them."
        )
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-sha256", "-days", str(_DAYS), "-subj", f"/CN={SERVER_NAME}"]
    command += ["-addext", f"subjectAltName=DNS:{SERVER_NAME}"]
    # It cannot sign other certificates: this one is accepted, and nothing derived from it.
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-keyout", str(directory / KEY), "-out", str(directory / CERTIFICATE)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, umask=0o077
    )
    if done.returncode:
        raise ClusterError(f"openssl cannot make a certificate: {done.stderr.strip()[-500:]}")


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(content)


def _read(path: Path) -> bytes:
    """The content of a file that only this user can read."""
    try:
        # The file that is checked is the file that is read: a path could be replaced in between.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(f"{path} cannot be read: {error.strerror}.") from None
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise ClusterError(f"{path} is not a secret of a cluster: too large, or not a file.")
        if found.st_uid != os.getuid():
            raise ClusterError(
                f"{path} belongs to user {found.st_uid}, not to you (user {os.getuid()})."
            )
        if found.st_mode & 0o077:
            raise ClusterError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: other users can read it. Run "
                f"chmod 600 {path}; if others may have read it, make new secrets."
            )
        return file.read(_LARGEST)
