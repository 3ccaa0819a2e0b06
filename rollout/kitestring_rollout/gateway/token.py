"""Attempt tokens: who may do what for which attempt, signed with HMAC-SHA256.

Form: base64url(JSON array of the claims) "." base64url(mac), without padding. The key comes from a file; every process
of a run shares it, so that a token of another process of the run is told apart (epoch) from a forged one.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

import orjson

from kitestring_rollout.gateway.errors import Refusal

FORMAT = 1
MAX_LENGTH = 4096

SCOPE_CALLS = "calls"
SCOPE_REWARDS = "rewards"
SCOPE_SPANS = "spans"


@dataclass(frozen=True, slots=True)
class Claims:
    run: str
    rollout: str
    attempt: str
    mode: str
    scopes: tuple[str, ...]
    expires: float
    """Unix seconds."""
    epoch: str


def sign(claims: Claims, key: bytes) -> str:
    fields = [
        FORMAT,
        claims.run,
        claims.rollout,
        claims.attempt,
        claims.mode,
        list(claims.scopes),
        claims.expires,
        claims.epoch,
    ]
    payload = _encode(orjson.dumps(fields))
    return (payload + b"." + _mac(payload, key)).decode()


def verify(token: str, key: bytes, *, now: float, epoch: str, scope: str) -> Claims:
    """The claims of a token; Refusal 401 when it is forged or malformed, else as `permit`."""
    claims = _read(token, key)
    permit(claims, now=now, epoch=epoch, scope=scope)
    return claims


def fingerprint(token: str) -> bytes:
    """What a known token is looked up by: who guesses at tokens learns nothing from the time that it takes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def permit(claims: Claims, *, now: float, epoch: str, scope: str) -> None:
    """Refusal 401 expired, 410 another epoch, 403 scope not held."""
    if now >= claims.expires:
        raise Refusal(401, "token_expired", "the attempt's token has expired", kind="authentication_error")
    if claims.epoch != epoch:
        raise Refusal(410, "epoch_gone", "the gateway process of this attempt is gone; the attempt is lost")
    if scope not in claims.scopes:
        raise Refusal(403, "wrong_scope", f"the attempt's token does not permit {scope}", kind="permission_error")


def _read(token: str, key: bytes) -> Claims:
    if len(token) > MAX_LENGTH or not token.isascii():
        raise _invalid()
    payload, _, mac = token.encode().partition(b".")
    if not hmac.compare_digest(_mac(payload, key), mac):
        raise _invalid()
    fields = orjson.loads(urlsafe_b64decode(payload + b"=" * (-len(payload) % 4)))
    if fields[0] != FORMAT:
        raise _invalid()
    _, run, rollout, attempt, mode, scopes, expires, epoch = fields
    return Claims(run, rollout, attempt, mode, tuple(scopes), expires, epoch)


def _invalid() -> Refusal:
    return Refusal(401, "invalid_token", "no valid token of an attempt was given", kind="authentication_error")


def _encode(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def _mac(payload: bytes, key: bytes) -> bytes:
    return _encode(hmac.digest(key, payload, "sha256"))
