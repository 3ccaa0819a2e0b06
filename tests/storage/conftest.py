"""The stores under test: a folder, and a bucket on a real SeaweedFS started once per session."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
import urllib3
from minio import Minio
from minio.error import MinioException

from kitestring_rollout.storage import DirectoryStore, ObjectStore, S3StoreConfig, open_store

BUCKET = "kitestring"
START_SECONDS = 90


@pytest.fixture(scope="session")
def s3_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3StoreConfig]:
    """Config of a bucket on a SeaweedFS of this session's own, on free ports of the loopback interface."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    (folder / "access").write_text("access-key\n")
    (folder / "secret").write_text("secret-key\n")
    identity = {
        "name": "run",
        "credentials": [{"accessKey": "access-key", "secretKey": "secret-key"}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    ports = dict(zip(("master", "volume", "filer", "s3"), _free_ports(4), strict=True))
    grpc = dict(zip(ports, _free_ports(4), strict=True))
    command = [str(Path(sys.executable).with_name("weed")), f"-logdir={folder}", "server"]
    command += [f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.iam=false"]
    command += [f"-{part}.port={port}" for part, port in ports.items()]
    command += [f"-{part}.port.grpc={port}" for part, port in grpc.items()]
    command += [f"-filer.localSocket={folder / 'f.sock'}", f"-s3.localSocket={folder / 's.sock'}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"]
    command += ["-volume.max=8", "-volume.minFreeSpace=1", "-master.volumeSizeLimitMB=64"]
    with (folder / "output").open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        _make_bucket(server, f"127.0.0.1:{ports['s3']}", folder / "output")
        yield S3StoreConfig(
            kind="s3",
            endpoint=f"127.0.0.1:{ports['s3']}",
            bucket=BUCKET,
            secure=False,
            access_key_file=folder / "access",
            secret_key_file=folder / "secret",
        )
    finally:
        server.kill()  # on SIGTERM it takes ten seconds to end
        server.wait()
        for part, port in grpc.items():  # it makes these sockets whatever it is told
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


@pytest.fixture(params=["directory", "s3"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ObjectStore]:
    """Opens the test's own empty store, the same one every time."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "store")
    config: S3StoreConfig = request.getfixturevalue("s3_config")
    config = config.model_copy(update={"prefix": f"runs/{uuid4().hex}"})
    return lambda: open_store(config)


@pytest.fixture
def store(open_again: Callable[[], ObjectStore]) -> ObjectStore:
    return open_again()


def _make_bucket(server: subprocess.Popen[bytes], endpoint: str, output: Path) -> None:
    pool = urllib3.PoolManager(retries=False, timeout=5)
    client = Minio(endpoint, "access-key", "secret-key", secure=False, region="us-east-1", http_client=pool)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if not client.bucket_exists(BUCKET):
                client.make_bucket(BUCKET)
            return
        except (MinioException, urllib3.exceptions.HTTPError):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"SeaweedFS did not start:\n{output.read_text()[-4000:]}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
