"""Server-sent events: incremental parsing, and writing. Pure.

Grammar: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream; of the fields only
`data` matters here.
"""

from __future__ import annotations

from typing import Final

DONE: Final = b"[DONE]"
DONE_EVENT: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": \n\n"


class EventParser:
    """Cuts a byte stream into the data of its events, wherever the chunks end."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_return = False
        self._started = False
        self.comments = 0
        """Comment lines seen: servers send them to keep a connection alive."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that `chunk` completes."""
        if not self._rest and not self._data and not self._after_return and self._started:
            whole = _plain_events(chunk)
            if whole is not None:
                return whole
        return self._feed_lines(chunk)

    def finish(self) -> list[bytes]:
        """The stream has ended: an event whose closing blank line is missing still counts."""
        return self._feed_lines(b"\n\n")

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        text = self._rest + chunk
        if self._after_return and chunk:
            # The last chunk ended in \r, which closed a line; a \n right after it belongs to it.
            self._after_return = False
            if text[:1] == b"\n":
                text = text[1:]
        if not self._started and text:
            if len(text) < 3 and b"\xef\xbb\xbf".startswith(text):
                self._rest = text
                return []
            self._started = True
            text = text.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in text:
            self._after_return = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                value = line[5:]
                self._data.append(value[1:] if value[:1] == b" " else value)
            elif line == b"data":
                self._data.append(b"")
            elif line.startswith(b":"):
                self.comments += 1
        return events


def _plain_events(chunk: bytes) -> list[bytes] | None:
    """Data of the events in a chunk of whole `data: …\\n\\n` events, as nearly every chunk is; else None."""
    if not chunk.endswith(b"\n\n") or not chunk.startswith(b"data: ") or b"\r" in chunk:
        return None
    events = chunk[6:-2].split(b"\n\ndata: ")
    return None if any(b"\n" in event for event in events) else events


def event(data: bytes) -> bytes:
    """An event whose data is one line."""
    return b"data: " + data + b"\n\n"
