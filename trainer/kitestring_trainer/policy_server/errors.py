"""What goes wrong, by who can mend it."""

from __future__ import annotations

from http import HTTPStatus
from reprlib import Repr

from kitestring_api.errors import UserMistakeError


class PolicyServerError(UserMistakeError):
    """A user's mistake at start (model folder, port, limits): one line that says what, where, and what to do."""


class RequestRefused(Exception):
    """A request that is answered with an error in OpenAI's shape.

    `param` names the field at fault, where there is one.
    """

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param

    def body(self) -> dict[str, object]:
        """`{"error": {message, type, param, code}}`; type and code as vLLM spells them."""
        return error_body(self.message, self.status, self.param)


_BRIEF = Repr()
_BRIEF.maxlevel = 1
_BRIEF.maxstring = _BRIEF.maxother = 200


def shown(value: object) -> str:
    """A value of a request for a message: its `repr`, of which a long one is cut to some hundred characters."""
    return _BRIEF.repr(value)


_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BadRequestError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def error_body(message: str, status: HTTPStatus, param: str | None = None) -> dict[str, object]:
    """OpenAI's error object for a status."""
    kind = _TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}
