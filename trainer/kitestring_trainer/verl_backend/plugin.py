"""Loaded by verl in every process that imports it (`VERL_USE_EXTERNAL_MODULES`), before it asks for its platform."""

from __future__ import annotations

import os
import warnings

# Of five training engines that are not used, in every process.
warnings.filterwarnings("ignore", message=r"\w+ engine is not available")

if os.environ.get("VERL_PLATFORM") == "cpu":
    import kitestring_trainer.verl_backend.cpu_platform  # noqa: F401  (registers itself)
