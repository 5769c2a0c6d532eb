"""Errors in OpenAI's shape, whatever raised them: validation, routing, the verifier, or a fault of our own."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from gateway.unsupported import UNSUPPORTED
from outrider.errors import OutriderError, Reason

log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 60
_BY_STATUS = {
    404: Reason.ROUTE_NOT_FOUND,
    405: Reason.METHOD_NOT_ALLOWED,
    413: Reason.REQUEST_TOO_LARGE,
}


def error_body(error: OutriderError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`."""
    kind = error.reason.kind
    code = error.reason.name.lower()
    return {
        "error": {
            "message": error.message,
            "type": kind.openai_type,
            "param": error.field,
            "code": code,
        }
    }


class _AsciiResponse(JSONResponse):
    """JSON with every other character escaped: an error may quote what is not even Unicode, such as half a surrogate pair."""

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()


def error_response(error: OutriderError) -> Response:
    """The error with its HTTP status."""
    headers = (
        {"Retry-After": str(max(1, round(error.retry_after_s)))}
        if error.retry_after_s is not None
        else None
    )
    return _AsciiResponse(error_body(error), status_code=error.reason.kind.http, headers=headers)


def unexpected() -> OutriderError:
    """What a caller learns of a fault of our own; its text, which may hold a user's data, goes to the log alone."""
    return OutriderError(Reason.INTERNAL, "the gateway failed; its log has the reason")


def install(app: FastAPI) -> None:
    """Answer every error of the application in OpenAI's shape."""
    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
        OutriderError: _outrider_error,
        RequestValidationError: _validation_error,
        HTTPException: _http_error,
        Exception: _fault,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _outrider_error(_request: Request, error: OutriderError) -> Response:
    return error_response(error)


async def _validation_error(_request: Request, error: RequestValidationError) -> Response:
    return error_response(validation_error(error.errors()))


async def _http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error.__cause__, OutriderError):
        # FastAPI's wrapping of what was raised while the body was read.
        return error_response(error.__cause__)
    reason = _BY_STATUS.get(error.status_code, Reason.MALFORMED_REQUEST)
    messages = {
        Reason.MALFORMED_REQUEST: f"the body cannot be read as JSON: {error.__cause__ or error.detail}",
        Reason.ROUTE_NOT_FOUND: f"there is no {request.url.path[:200]} here{_instead(request.url.path)}",
        Reason.METHOD_NOT_ALLOWED: f"{request.url.path[:200]} does not take {request.method}",
    }
    response = error_response(OutriderError(reason, messages.get(reason, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


async def _fault(_request: Request, _error: Exception) -> Response:
    return error_response(unexpected())


def _instead(path: str) -> str:
    """Names the endpoints that generate text, for callers of others of OpenAI's, such as /v1/responses."""
    return (
        "; POST /v1/chat/completions and POST /v1/completions generate text"
        if path.startswith("/v1/")
        else ""
    )


def validation_error(details: Sequence[ErrorDetails | dict[str, Any]]) -> OutriderError:
    """The first of pydantic's complaints, with the field's path and what was sent there."""
    if not details:
        return OutriderError(Reason.MALFORMED_REQUEST, "the request is malformed")
    detail = details[0]
    kind, message = detail["type"], detail["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        cause = detail.get("ctx", {}).get("error", "")
        return OutriderError(Reason.MALFORMED_REQUEST, f"the body is not JSON: {message} ({cause})")
    path = field_path(detail["loc"])
    if not path:
        return OutriderError(
            Reason.MALFORMED_REQUEST,
            "the body must be a JSON object, sent with Content-Type: application/json",
        )
    if kind == "extra_forbidden":
        return OutriderError(
            Reason.UNKNOWN_PARAMETER, f"{path} is not a parameter of this request", path
        )
    if kind == UNSUPPORTED:
        return OutriderError(Reason.UNSUPPORTED_PARAMETER, f"{path} {message}", path)
    if kind == "missing":
        return OutriderError(Reason.INVALID_VALUE, f"{path} is required", path)
    return OutriderError(
        Reason.INVALID_VALUE, f"{path}: {message}, not {_shown(detail.get('input'))}", path
    )


def _shown(value: object) -> str:
    """The beginning of a value as JSON, written no further than it is shown."""
    shown = ""
    for part in json.JSONEncoder(default=str).iterencode(
        _cut(value) if isinstance(value, str) else value
    ):
        shown += part
        if len(shown) > _SHOWN_CHARACTERS:
            break
    return _cut(shown)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def field_path(location: Sequence[str | int]) -> str:
    """`messages[0].content` for ("body", "messages", 0, "content"); a client's own names are cut."""
    path = ""
    for part in location[1:] if location[:1] == ("body",) else location:
        path += f"[{part}]" if isinstance(part, int) else f".{_cut(part)}"
    return path.removeprefix(".")
