"""Kubernetes quantities as numbers of bytes."""

from __future__ import annotations

from decimal import Decimal

_SUFFIXES = {
    "": 1,
    "m": Decimal("0.001"),
    **{letter: 1000**power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)},
}


def bytes_of(quantity: str) -> int:
    """`512Mi` → 536870912. The text has the form that the API allows; anything else raises."""
    digits = quantity.rstrip("kKMGTPEim")
    return int(Decimal(digits) * _SUFFIXES[quantity[len(digits) :]])
