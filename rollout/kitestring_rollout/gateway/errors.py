"""Refusals and failures as an agent sees them: OpenAI's error shape."""

from __future__ import annotations

from typing import Any, Final

import orjson

from kitestring_rollout.traces.records import UNREACHABLE

JSON_TYPE = "application/json"
NO_RETRY = {"x-should-retry": "false"}
"""Read by OpenAI's and Anthropic's clients: asking again would be answered the same."""
MAX_ERROR_BYTES: Final = 65_536
"""So much of a model server's error is read: servers echo what they refuse, and an agent may send megabytes."""
MAX_MESSAGE: Final = 4096
"""Characters of a model server's message that are passed on and recorded."""


class Refusal(Exception):
    """A request answered with an error. `code` is stable; it is also the label of the refusal's counter."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry: bool = False,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.kind = kind
        self.admitted = False
        """The call had its number already: it is recorded, and not counted as rejected."""
        self.headers = {**({} if retry else NO_RETRY), **(headers or {})}

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.code, self.param)


class UpstreamRefusal(Refusal):
    """An error of the model server itself, passed on."""

    def __init__(self, status: int, error: dict[str, Any], retry_after: str | None) -> None:
        super().__init__(
            status,
            "upstream_error",
            error["message"],
            retry=status >= 500 or status == 429,
            headers={"Retry-After": retry_after} if retry_after is not None else None,
        )
        self._error = error

    def body(self) -> bytes:
        return orjson.dumps({"error": self._error})


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def normalised_error(status: int, body: bytes) -> dict[str, Any]:
    """The `error` object of an upstream's error body, whatever shape it came in. Of a body that was cut off at
    `MAX_ERROR_BYTES` its beginning is the message."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = {"error": {"message": body[:MAX_MESSAGE].decode(errors="replace")}} if _is_cut(body) else None
    found: Any = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if isinstance(found, dict):
        message = found.get("message") or found.get("detail")
        kind, code, param = found.get("type"), found.get("code"), found.get("param")
    else:
        message, kind, code, param = found, None, None, None
    return {
        "message": _bounded(message) if isinstance(message, str) and message else f"the model server answered {status}",
        "type": kind if isinstance(kind, str) else ("invalid_request_error" if status < 500 else "server_error"),
        "param": param if isinstance(param, str) else None,
        "code": code if isinstance(code, str | int) else None,
    }


def _is_cut(body: bytes) -> bool:
    return len(body) >= MAX_ERROR_BYTES


def _bounded(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}… ({len(message)} characters)"


def upstream_failed(
    message: str, code: str = UNREACHABLE, status: int = 502, headers: dict[str, str] | None = None
) -> Refusal:
    """The model server, or the gateway itself, cannot answer as it should: a client may ask again."""
    return Refusal(status, code, message, kind="server_error", retry=True, headers=headers)
