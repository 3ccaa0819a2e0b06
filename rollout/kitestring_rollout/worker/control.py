"""The control socket between worker and launcher (SOCK_SEQPACKET): messages, and descriptors with them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

log = logging.getLogger(__name__)

LONGEST = 1 << 20
"""Bytes of a message."""


async def tell(control: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message; OSError when the other side is gone."""
    await asyncio.get_running_loop().sock_sendall(control, json.dumps(message).encode())


async def hear(control: socket.socket) -> dict[str, Any] | None:
    """The next message, or None when the other side is gone."""
    try:
        data = await asyncio.get_running_loop().sock_recv(control, LONGEST)
    except ConnectionResetError:
        return None
    if not data:
        return None
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict):  # from where agents are: not a launcher of ours
        log.error("the launcher said what makes no sense: %r", data[:200])
        return None
    return message


async def give(control: socket.socket, name: bytes, fd: int) -> None:
    """Sends a descriptor under a name; OSError when the other side is gone."""
    while True:
        try:
            socket.send_fds(control, [name], [fd])
        except BlockingIOError:
            await asyncio.sleep(0.001)  # the launcher is behind: its queue of messages is full
        else:
            return
