"""`kitestring fetch`: every item in turn, tried again while its source is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_FAILED, EXIT_OK
from kitestring_rollout.fetch.bucket import fetch_from_bucket, readable_bytes
from kitestring_rollout.fetch.config import FetchConfig, Item
from kitestring_rollout.fetch.hub import HubUnavailable, fetch_from_hub
from kitestring_rollout.storage import FolderTorn, StoreRefused, StoreUnavailable

_log = logging.getLogger(__name__)

_MAX_PAUSE_SECONDS = 15.0


def run(config: FetchConfig, sleep: Callable[[float], None] = time.sleep) -> int:
    """Bring every item; the exit code, EXIT_FAILED when a source stayed away. Raises UserMistakeError."""
    for index, item in enumerate(config.items):
        field = f"items[{index}].{'s3' if item.s3 is not None else 'huggingFace'}"
        if item.to.exists():
            _log.info("%s is there already", item.to)
            continue
        started = time.monotonic()
        try:
            size = _persist(item, field, config.retry_seconds, sleep)
        except StoreRefused as error:
            raise UserMistakeError(f"{field}: {error}") from error
        except (StoreUnavailable, HubUnavailable, FolderTorn) as error:
            _log.error("%s: given up: %s", field, error)
            return EXIT_FAILED
        _log.info("%s: %s in %.1f s", item.to, readable_bytes(size), time.monotonic() - started)
    return EXIT_OK


def _persist(item: Item, field: str, retry_seconds: float, sleep: Callable[[float], None]) -> int:
    deadline = time.monotonic() + retry_seconds
    pause = 0.5
    while True:
        try:
            return _fetch(item, field)
        except StoreRefused:
            raise
        except (StoreUnavailable, HubUnavailable, FolderTorn) as error:
            if time.monotonic() + pause > deadline:
                raise
            _log.warning("%s: trying again in %g s: %s", field, pause, error)
            sleep(pause)
            pause = min(_MAX_PAUSE_SECONDS, pause * 2)


def _fetch(item: Item, field: str) -> int:
    try:
        item.to.parent.mkdir(parents=True, exist_ok=True)
        if item.s3 is not None:
            return fetch_from_bucket(item.s3, item.to, field)
        assert item.hugging_face is not None
        return fetch_from_hub(item.hugging_face, item.to, field)
    except OSError as error:
        raise UserMistakeError(
            f"{field.rpartition('.')[0]}.to: cannot write {error.filename or item.to}: {error.strerror}; give it a "
            "folder that can be written, with room for it"
        ) from error
