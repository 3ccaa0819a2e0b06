"""Attempt tokens: what is accepted, and how each other one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.token import Claims, sign, verify

KEY = bytes(range(32))
CLAIMS = Claims("run", "t000001-00000000-000", "0190", "train", ("calls", "spans"), 1000.0, "e" * 16)
TOKEN = sign(CLAIMS, KEY)


def refused(
    token: str, *, now: float = 999.0, epoch: str = "e" * 16, scope: str = "calls", key: bytes = KEY
) -> Refusal:
    with pytest.raises(Refusal) as caught:
        verify(token, key, now=now, epoch=epoch, scope=scope)
    return caught.value


def test_a_signed_token_gives_its_claims() -> None:
    assert verify(TOKEN, KEY, now=999.9, epoch="e" * 16, scope="calls") == CLAIMS


def test_each_way_to_be_refused() -> None:
    assert (refused(TOKEN, now=1000.0).status, refused(TOKEN, now=1000.0).code) == (401, "token_expired")
    assert (refused(TOKEN, epoch="f" * 16).status, refused(TOKEN, epoch="f" * 16).code) == (410, "epoch_gone")
    assert (refused(TOKEN, scope="rewards").status, refused(TOKEN, scope="rewards").code) == (403, "wrong_scope")
    assert (refused(TOKEN, key=bytes(32)).status, refused(TOKEN, key=bytes(32)).code) == (401, "invalid_token")


@pytest.mark.parametrize(
    "token", ["", ".", "a.b", "é" * 10, "x" * 5000, TOKEN + "=", TOKEN + " ", TOKEN.upper(), "\udce9"]
)
def test_what_is_no_token_is_401(token: str) -> None:
    assert refused(token).code == "invalid_token"


@given(st.integers(0, len(TOKEN) - 1), st.characters(codec="ascii"))
def test_no_other_text_than_the_token_itself_is_accepted(place: int, character: str) -> None:
    altered = TOKEN[:place] + character + TOKEN[place + 1 :]
    if altered != TOKEN:
        assert refused(altered).code == "invalid_token"


@given(
    st.builds(
        Claims,
        run=st.text(max_size=40),
        rollout=st.text(max_size=40),
        attempt=st.text(max_size=40),
        mode=st.sampled_from(["train", "try"]),
        scopes=st.just(("calls",)),
        expires=st.floats(1, 1e12),
        epoch=st.text("0123456789abcdef", min_size=16, max_size=16),
    )
)
def test_claims_survive_signing(claims: Claims) -> None:
    assert verify(sign(claims, KEY), KEY, now=0.5, epoch=claims.epoch, scope="calls") == claims
