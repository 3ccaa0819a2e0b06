"""Object storage in the cluster, opened from outside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.harness import release
from e2e.harness.kubectl import Kubectl
from kitestring_rollout.storage import ObjectStore, S3StoreConfig, open_store

PORT = 8333


@contextmanager
def opened(kubectl: Kubectl, keys: Path, prefix: str = "") -> Iterator[ObjectStore]:
    """The installation's bucket below a prefix, through a forwarded port; `keys` is a folder for files of its keys."""
    with kubectl.in_namespace(release.NAME).forwarded(f"svc/{release.NAME}-seaweedfs", PORT) as port:
        yield at(port, release.ACCESS_KEY, release.SECRET_KEY, keys, prefix)


def at(port: int, access_key: str, secret_key: str, keys: Path, prefix: str = "") -> ObjectStore:
    """The bucket `release.BUCKET` of the storage behind a port of this machine, below a prefix."""
    (keys / "access").write_text(access_key)
    (keys / "secret").write_text(secret_key)
    config = S3StoreConfig(
        kind="s3",
        endpoint=f"127.0.0.1:{port}",
        bucket=release.BUCKET,
        prefix=prefix,
        secure=False,
        access_key_file=keys / "access",
        secret_key_file=keys / "secret",
    )
    return open_store(config)
