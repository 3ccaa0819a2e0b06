"""A policy server for machines without a GPU: `transformers` behind the part of vLLM's HTTP surface that we use.

Importing this package is cheap; torch and transformers load in `run`.
"""

from __future__ import annotations

from kitestring_trainer.policy_server.config import PolicyServerConfig
from kitestring_trainer.policy_server.errors import PolicyServerError

__all__ = ["PolicyServerConfig", "PolicyServerError", "run"]


def run(config: PolicyServerConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises PolicyServerError for what the user can mend."""
    import asyncio  # noqa: PLC0415

    from kitestring_trainer.policy_server.server import serve  # noqa: PLC0415

    asyncio.run(serve(config))
