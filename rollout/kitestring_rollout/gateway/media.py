"""Remote media in messages: a model server would fetch any address that an agent names, from where it runs. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from kitestring_rollout.gateway.errors import Refusal


def check_media(messages: Any, allowed_hosts: tuple[str, ...]) -> None:
    """Refusal 400 when a content part names a URL that is neither `data:` nor http(s) on an allowed host."""
    if not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict):
                    _check_part(part, allowed_hosts)


def _check_part(part: dict[str, Any], allowed_hosts: tuple[str, ...]) -> None:
    for name, value in part.items():
        if name.endswith("_url"):
            url = value.get("url") if isinstance(value, dict) else value
            if isinstance(url, str) and not _allowed(url, allowed_hosts):
                raise Refusal(
                    400,
                    "remote_media_refused",
                    f"{name}: remote media are not fetched; send a `data:` URL"
                    + (f", or one of the hosts {', '.join(allowed_hosts)}" if allowed_hosts else ""),
                    param="messages",
                )


def _allowed(url: str, allowed_hosts: tuple[str, ...]) -> bool:
    if url[:5].lower() == "data:":
        return True
    # Blanks, backslashes and a userinfo are read differently by different parsers: no such address is let through.
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or parts.username is not None:
        return False
    return host is not None and host in allowed_hosts
