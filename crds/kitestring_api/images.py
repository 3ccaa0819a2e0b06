"""Which images a task may ask for (RolloutPool `spec.allowedImages`). Pure."""

from __future__ import annotations

from collections.abc import Sequence


def is_allowed(image: str, allowed: Sequence[str]) -> bool:
    """Whether an image is one of those, or begins as one that ends in `*`."""
    return any(image.startswith(one[:-1]) if one.endswith("*") else image == one for one in allowed)
