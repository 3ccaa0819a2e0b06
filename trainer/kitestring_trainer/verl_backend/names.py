"""Names that several processes of the backend share."""

from __future__ import annotations

from typing import Final

TRAINER_MODE: Final = "kitestring"
WEIGHTS_BACKEND: Final = "kitestring_folder"
THREADS_VARIABLE: Final = "KITESTRING_TRAINER_THREADS"
