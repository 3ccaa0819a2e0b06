"""The Secret that a run has for itself: made once, from random bytes, and read by its own pods only."""

from __future__ import annotations

from kitestring_operator import identity
from kitestring_operator.observed import GeneratedSecret

TOKEN_KEY = "tokenKey"  # noqa: S105 -- the name of it
"""Signs the tokens of attempts: gateways only."""
ADMIN = "adminCredential"
"""Trainer to gateways and to the sidecars of policy servers; its nodes make Ray's token from it."""
QUEUE = "queueCredential"
"""Workers and operator to the trainer's queue."""
COLLECTOR = "collectorCredential"
"""Gateways to the collector of calls."""
AGENT = "agentCredential"
"""Gateways to the collector of agents' own spans."""

BYTES = 48
"""Of each: 64 characters of base64url."""


def generated_secret(run: str) -> GeneratedSecret:
    """`RUN-keys`."""
    return GeneratedSecret(identity.keys_name(run), dict.fromkeys((TOKEN_KEY, ADMIN, QUEUE, COLLECTOR, AGENT), BYTES))
