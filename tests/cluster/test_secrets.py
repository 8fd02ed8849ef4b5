"""The secrets of a cluster are made once, and refused if others can read them."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from penstock.cluster.secrets import CERTIFICATE, KEY, TOKEN, make_secrets, read_secrets
from penstock.errors import ClusterError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_secrets_are_files_that_only_their_user_can_read(secret_directory: Path) -> None:
    before = os.umask(0)  # the mode must not depend on it
    try:
        made = make_secrets(secret_directory)
    finally:
        os.umask(before)
    assert mode(secret_directory) == 0o700
    assert {path.name: mode(path) for path in secret_directory.iterdir()} == {
        TOKEN: 0o600,
        CERTIFICATE: 0o600,
        KEY: 0o600,
    }
    assert len(made.token) == 32
    assert made.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    assert made.key.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert read_secrets(secret_directory) == made


def test_every_cluster_has_other_secrets(tmp_path: Path) -> None:
    one, two = make_secrets(tmp_path / "one"), make_secrets(tmp_path / "two")
    assert one.token != two.token
    assert one.key != two.key
    assert one.certificate != two.certificate


def test_the_variable_names_the_directory(
    secret_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_secrets(secret_directory)
    monkeypatch.setenv("PENSTOCK_CLUSTER_SECRET", str(secret_directory))
    assert read_secrets() == made
    monkeypatch.delenv("PENSTOCK_CLUSTER_SECRET")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(secret_directory.parent / "config"))
    with pytest.raises(ClusterError, match="config/penstock/cluster does not exist"):
        read_secrets()


def test_secrets_are_never_shown(secret_directory: Path) -> None:
    made = make_secrets(secret_directory)
    assert repr(made) == str(made) == "Secrets()"


def test_secrets_that_exist_are_not_replaced(secret_directory: Path) -> None:
    made = make_secrets(secret_directory)
    with pytest.raises(ClusterError, match="already contains"):
        make_secrets(secret_directory)
    assert read_secrets(secret_directory) == made


@pytest.mark.parametrize("name", [TOKEN, CERTIFICATE, KEY])
@pytest.mark.parametrize("open_to", [0o604, 0o640, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(
    secret_directory: Path, name: str, open_to: int
) -> None:
    make_secrets(secret_directory)
    (secret_directory / name).chmod(open_to)
    with pytest.raises(ClusterError, match=f"chmod 600 .*{name}"):
        read_secrets(secret_directory)


def test_a_directory_that_others_can_open_is_refused(secret_directory: Path) -> None:
    make_secrets(secret_directory)
    secret_directory.chmod(0o750)
    with pytest.raises(ClusterError, match="chmod 700"):
        read_secrets(secret_directory)
    with pytest.raises(ClusterError, match="chmod 700"):
        make_secrets(secret_directory)


def test_links_pipes_and_damaged_tokens_are_refused(secret_directory: Path, tmp_path: Path) -> None:
    make_secrets(secret_directory)
    token = secret_directory / TOKEN
    content = token.read_bytes()
    token.write_bytes(content[:31])
    with pytest.raises(ClusterError, match="has 31 bytes"):
        read_secrets(secret_directory)
    token.unlink()
    with pytest.raises(ClusterError, match="No such file"):
        read_secrets(secret_directory)
    (tmp_path / "elsewhere").write_bytes(content)
    (tmp_path / "elsewhere").chmod(0o600)
    token.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClusterError, match="cannot be read"):
        read_secrets(secret_directory)
    token.unlink()
    os.mkfifo(token, 0o600)
    with pytest.raises(ClusterError, match="not a file"):
        read_secrets(secret_directory)


def test_a_missing_directory_is_named(secret_directory: Path) -> None:
    with pytest.raises(ClusterError, match="does not exist on this machine"):
        read_secrets(secret_directory)


def test_without_openssl_the_error_says_what_to_install(
    secret_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ClusterError, match="apt-get install openssl"):
        make_secrets(secret_directory)
    assert list(secret_directory.iterdir()) == []
