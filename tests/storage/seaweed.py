"""A real SeaweedFS of the test's own, on free ports of the loopback interface."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3
from minio import Minio
from minio.error import MinioException

from kitestring_rollout.storage import S3StoreConfig

BUCKET = "kitestring"
START_SECONDS = 90


@dataclass(frozen=True)
class Seaweed:
    """A running server: its process, and the config of a bucket on it."""

    process: subprocess.Popen[bytes]
    config: S3StoreConfig


@contextmanager
def running_seaweed(folder: Path) -> Iterator[Seaweed]:
    """A server with everything it writes below `folder`; ended by its process id."""
    (folder / "access").write_text("access-key\n")
    (folder / "secret").write_text("secret-key\n")
    identity = {
        "name": "run",
        "credentials": [{"accessKey": "access-key", "secretKey": "secret-key"}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    free = _free_ports(8)  # all at once: ports of a second call could be those of the first
    ports = dict(zip(("master", "volume", "filer", "s3"), free[:4], strict=True))
    grpc = dict(zip(ports, free[4:], strict=True))
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
        config = S3StoreConfig(
            kind="s3",
            endpoint=f"127.0.0.1:{ports['s3']}",
            bucket=BUCKET,
            secure=False,
            access_key_file=folder / "access",
            secret_key_file=folder / "secret",
        )
        yield Seaweed(server, config)
    finally:
        server.kill()  # on SIGTERM it takes ten seconds to end
        server.wait()
        for part, port in grpc.items():  # it makes these sockets whatever it is told
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


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
