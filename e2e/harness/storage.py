"""The object storage of the installation, read from outside the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.harness import release
from e2e.harness.kubectl import Kubectl
from kitestring_rollout.storage import ObjectStore, S3StoreConfig, open_store


@contextmanager
def opened(kubectl: Kubectl, keys: Path, prefix: str = "") -> Iterator[ObjectStore]:
    """The bucket below a prefix, through a forwarded port; `keys` is a folder for the files that hold its keys."""
    (keys / "access").write_text(release.ACCESS_KEY)
    (keys / "secret").write_text(release.SECRET_KEY)
    service = f"svc/{release.NAME}-seaweedfs"
    with kubectl.in_namespace(release.NAME).forwarded(service, 8333) as port:
        config = S3StoreConfig(
            kind="s3",
            endpoint=f"127.0.0.1:{port}",
            bucket=release.BUCKET,
            prefix=prefix,
            secure=False,
            access_key_file=keys / "access",
            secret_key_file=keys / "secret",
        )
        yield open_store(config)
