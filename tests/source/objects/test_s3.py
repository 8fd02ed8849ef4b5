"""A folder on moto's S3 server, which was not written here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.source.remote import RemoteFolderSource

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")

# Prints its port when it serves. boto3 is what people use to fill a bucket.
SERVER = """
import sys, threading, boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
host, port = server.get_host_and_port()
client = boto3.client(
    "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
    aws_access_key_id="key", aws_secret_access_key="secret",
)
client.create_bucket(Bucket="photos")
for number in range(30):
    key = f"train/c{number % 2}/{number:04d}.bin"
    client.put_object(Bucket="photos", Key=key, Body=b"%d" % number)
client.put_object(Bucket="photos", Key="train/c0/", Body=b"")  # as consoles make folders
print("port", port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def storage() -> Iterator[dict[str, str]]:
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    try:
        port = next(line.split()[1] for line in server.stdout if line.startswith("port "))
        yield {
            "endpoint": f"http://127.0.0.1:{port}",
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "secret",
        }
    finally:
        server.stdin.close()
        server.kill()
        server.wait()
        server.stdout.close()


def test_a_bucket_of_another_server_is_read_whole(
    storage: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "kept"))
    pipeline = ps.from_folder("s3://photos/train", extensions=None, storage=storage)
    source = pipeline.source
    assert isinstance(source, RemoteFolderSource)
    assert (len(source), source.classes) == (30, ["c0", "c1"])
    with pipeline.batch(8).loader(seed=0, workers=2, kind="threads") as loader:
        found = {
            (content, label) for batch in loader for content, label in zip(*batch, strict=True)
        }
    assert found == {(b"%d" % number, number % 2) for number in range(30)}
