"""Object storage in a bucket of any server that speaks S3, through the `minio` client."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from kitestring_rollout.storage.config import S3StoreConfig
from kitestring_rollout.storage.keys import check_key, check_prefix
from kitestring_rollout.storage.s3_refusals import remedy, words
from kitestring_rollout.storage.scratch import scratch_beside
from kitestring_rollout.storage.store import ObjectExists, ObjectInfo, ObjectMissing, StoreRefused, StoreUnavailable

_RETRIES = 3
_RETRIED_STATUS = (500, 502, 503, 504)
_PART_BYTES = 16 << 20
"""A larger file goes up in parts of this size, and comes down in ranges of it, so that one that breaks off costs little
and several together fill the wire."""
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_CHUNK_BYTES = 1 << 20
_PRESIGNED_FOR = timedelta(minutes=5)


class S3Store:
    """`ObjectStore` in a bucket, below the config's prefix.

    `put(if_absent=True)` sends `If-None-Match: *`. AWS, SeaweedFS and MinIO hold it atomically; servers that ignore the
    header are served by a look beforehand, which two writers at once can slip past. A conditional put is not repeated
    here: after `StoreUnavailable` it may or may not have been done.
    """

    def __init__(self, config: S3StoreConfig) -> None:
        self._bucket = config.bucket
        self._prefix = f"{config.prefix}/" if config.prefix else ""
        self._region = config.region
        self._where = f"bucket {config.bucket} at {config.endpoint}"
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=config.connections,
            block=True,
            timeout=urllib3.Timeout(connect=config.timeout_seconds, read=config.timeout_seconds),
            retries=urllib3.Retry(
                total=_RETRIES, backoff_factor=0.2, status_forcelist=_RETRIED_STATUS, allowed_methods=None
            ),
        )
        self._client = Minio(
            config.endpoint,
            access_key=config.access_key_file.read_text().strip(),
            secret_key=config.secret_key_file.read_text().strip(),
            secure=config.secure,
            region=config.region,
            http_client=self._pool,
        )

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        full = self._prefix + check_key(key)
        with self._errors(key):
            if if_absent:
                self._put_if_absent(key, full, data)
            else:
                self._client.put_object(self._bucket, full, io.BytesIO(data), len(data))

    def get(self, key: str) -> bytes:
        full = self._prefix + check_key(key)
        with self._errors(key):
            response = self._client.get_object(self._bucket, full)
            try:
                # Decoding would undo the compression that an object was stored with, or fail for want of a codec.
                return response.read(decode_content=False)
            finally:
                response.close()
                response.release_conn()

    def put_file(self, key: str, path: Path) -> None:
        full = self._prefix + check_key(key)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            smallest = -(-size // _MAX_PARTS)
            part = _PART_BYTES * max(1, -(-smallest // _PART_BYTES))
            with self._errors(key):
                self._client.put_object(
                    self._bucket, full, file, size, part_size=part, num_parallel_uploads=_PARALLEL_PARTS
                )

    def get_file(self, key: str, path: Path) -> None:
        full = self._prefix + check_key(key)
        with self._errors(key):
            found = self._client.stat_object(self._bucket, full)
        size, etag = found.size or 0, found.etag or ""
        with scratch_beside(path) as scratch, scratch.open("wb") as file, ThreadPoolExecutor(_PARALLEL_PARTS) as pool:
            starts = range(0, size, _PART_BYTES)
            ranges = [
                pool.submit(self._get_range, key, etag, file.fileno(), start, min(_PART_BYTES, size - start))
                for start in starts
            ]
            try:
                for fetched in ranges:
                    fetched.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _get_range(self, key: str, etag: str, descriptor: int, start: int, length: int) -> None:
        """Write bytes `start`… of the object to the same place of a file; what breaks off is asked for again."""
        done = 0
        for attempt in range(_RETRIES + 1):
            try:
                for chunk in self._chunks(key, etag, start + done, length - done):
                    os.pwrite(descriptor, chunk, start + done)
                    done += len(chunk)
                if done != length:
                    raise StoreUnavailable(f"{self._where} gave {done} of {length} bytes of {key}")
                return
            except StoreRefused:
                raise
            except StoreUnavailable:
                if attempt == _RETRIES:
                    raise

    def _chunks(self, key: str, etag: str, start: int, length: int) -> Iterator[bytes]:
        with self._errors(key):
            response = self._client.get_object(
                self._bucket, self._prefix + key, start, length, request_headers={"If-Match": f'"{etag}"'}
            )
            try:
                yield from response.stream(_CHUNK_BYTES, decode_content=False)
            finally:
                response.close()
                response.release_conn()

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        full = self._prefix + check_prefix(prefix)
        after = self._prefix + start_after if start_after else None
        with self._errors(prefix):
            for entry in self._client.list_objects(self._bucket, full, recursive=True, start_after=after):
                yield ObjectInfo((entry.object_name or "").removeprefix(self._prefix), entry.size or 0)

    def exists(self, key: str) -> bool:
        full = self._prefix + check_key(key)
        try:
            with self._errors(key):
                self._client.stat_object(self._bucket, full)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        full = self._prefix + check_key(key)
        with self._errors(key):
            self._client.remove_object(self._bucket, full)

    def _put_if_absent(self, key: str, full: str, data: bytes) -> None:
        if self.exists(key):
            raise ObjectExists(key)
        # The client has no conditional put; a signed URL takes any header.
        url = self._client.presigned_put_object(self._bucket, full, expires=_PRESIGNED_FOR)
        response = self._pool.request("PUT", url, body=data, headers={"If-None-Match": "*"}, retries=False)
        if response.status in (409, 412):
            raise ObjectExists(key)
        if response.status != 200:
            raise _said(response) or StoreUnavailable(
                f"{self._where} answers a conditional put with HTTP {response.status}"
            )

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except S3Error as error:
            if error.code == "NoSuchKey":
                raise ObjectMissing(key) from error
            said = f"{self._where}: {error.code}: {error.message}"
            mends = remedy(error.code, error.response.headers, self._region)
            if mends is not None:
                raise StoreRefused(f"{said}; {mends}") from error
            raise StoreUnavailable(said) from error
        except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
            raise StoreUnavailable(f"{self._where}: {words(error)}") from error


def _said(response: urllib3.BaseHTTPResponse) -> S3Error | None:
    """The error that an answer holds; None: it is none of an S3 server's."""
    try:
        return S3Error.fromxml(response)
    except (ElementTree.ParseError, UnicodeDecodeError):
        return None
