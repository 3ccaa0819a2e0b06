"""Loaded by verl in every process that imports it (`VERL_USE_EXTERNAL_MODULES`), before it asks for its platform."""

from __future__ import annotations

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    import kitestring_trainer.verl_backend.cpu_platform  # noqa: F401  (registers itself)
