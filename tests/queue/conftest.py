from __future__ import annotations

from tests.trainer.conftest import world

__all__ = ["world"]
