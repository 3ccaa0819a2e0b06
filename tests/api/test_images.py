"""Images that a task may ask for: the queue and the operator must agree about them."""

from __future__ import annotations

import pytest

from kitestring_api.images import is_allowed

ALLOWED = ("registry/agents/*", "python:3.11")


@pytest.mark.parametrize(
    ("image", "allowed"),
    [
        ("python:3.11", True),
        ("python:3.11-slim", False),
        ("registry/agents/a:1", True),
        ("registry/agents", False),
        ("evil/registry/agents/a", False),
        ("", False),
    ],
)
def test_images_are_those_that_the_pool_allows(image: str, allowed: bool) -> None:
    assert is_allowed(image, ALLOWED) is allowed


def test_without_a_list_none_is_allowed() -> None:
    assert not is_allowed("python:3.11", ())
