"""Keys of trace objects: their order is the order in which they were received, and no two collide.

`{prefix}{YYYYMMDD}/{HHMM}/traces_{uuidv7}.binpb`, date and minute in UTC and taken from the UUID itself.
"""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from uuid_utils import uuid7

SUFFIX = ".binpb"
_LAST_MILLISECONDS = 253402300799999
"""End of the year 9999."""


def new_key(prefix: str) -> str:
    """A key for an object received now; within a process every key is greater than the ones before."""
    uid = uuid7()
    return f"{prefix}{_minute(uid.timestamp)}/traces_{uid}{SUFFIX}"


def first_key(prefix: str, unix_seconds: float) -> str:
    """Not greater than any key made at that time or later by a clock that is right."""
    milliseconds = min(max(0, int(unix_seconds * 1000)), _LAST_MILLISECONDS)
    digits = f"{milliseconds:012x}"
    return f"{prefix}{_minute(milliseconds)}/traces_{digits[:8]}-{digits[8:]}"


def unix_seconds_of(uuid7_text: str) -> float:
    """When a UUIDv7 was made; raises ValueError for any other text."""
    uid = UUID(uuid7_text)
    if uid.version != 7:
        raise ValueError(f"{uuid7_text} is not a UUIDv7")
    return (uid.int >> 80) / 1000


def key_time(key: str) -> float | None:
    """When an object of that key was received, in unix seconds; None for a key that is not of this form."""
    name = key.rpartition("/")[2]
    if not name.startswith("traces_"):
        return None
    try:
        return unix_seconds_of(name[len("traces_") :].partition(".")[0])
    except ValueError:
        return None


def _minute(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds // 1000, UTC).strftime("%Y%m%d/%H%M")
