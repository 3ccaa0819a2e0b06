"""The only package that imports verl. Importing it costs nothing: verl loads when a run starts."""

from __future__ import annotations

from kitestring_trainer.verl_backend.session import VerlLearner

__all__ = ["VerlLearner"]
