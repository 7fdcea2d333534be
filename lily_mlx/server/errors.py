"""Errors that become HTTP answers."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """A request that gets an error as its answer.

    Args:
        message: what is wrong and what to do about it.
        field: the field of the body at fault, if there is one.
        status: the HTTP status.
        kind: OpenAI's `type` of the error.
    """

    def __init__(self, message: str, field: str | None = None, status: int = 400, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.message, self.field, self.status, self.kind = message, field, status, kind

    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.status}}


def busy(waiting: int) -> RequestError:
    """The answer when the queue is full."""
    return RequestError(f"{waiting} requests wait already: try again later", status=429, kind="rate_limit_error")


def unavailable(reason: str) -> RequestError:
    """The answer when nothing can be generated any more."""
    return RequestError(reason, status=503, kind="server_error")


def internal(error: BaseException) -> RequestError:
    """The answer when the work on a request failed."""
    return RequestError(f"the generation failed: {type(error).__name__}: {error}", status=500, kind="server_error")
