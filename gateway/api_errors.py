"""Answers every error, from validation, routing, the verifier or our bugs, in an API's shape.

The shape is Anthropic's on the paths of its Messages API, and OpenAI's on all other paths.

`outrider.errors.Reason` says which HTTP status each reason has, such as 400.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.types import Scope

from gateway import access_log
from gateway.unsupported import UNSUPPORTED
from outrider.errors import OutriderError, Reason
from outrider.process.settings.usage import suggestion

log = logging.getLogger(__name__)

_MESSAGES = "/v1/messages"
# Anthropic's error types by HTTP status. A status that is not listed has invalid_request_error.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
# Types of content other than text in OpenAI's, Anthropic's and vLLM's APIs.
_MEDIA = frozenset(
    {
        "audio_url",
        "document",
        "file",
        "image",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video_url",
    }
)
_SHOWN_CHARACTERS = 60
_BY_STATUS = {
    404: Reason.ROUTE_NOT_FOUND,
    405: Reason.METHOD_NOT_ALLOWED,
}


def error_body(error: OutriderError) -> dict[str, Any]:
    """Return OpenAI's error object: `{"error": {message, type, param, code}}`."""
    shown = {
        "message": error.message,
        "type": error.reason.kind.openai_type,
        "param": error.field,
        "code": error.reason.name.lower(),
    }
    return {"error": shown}


def messages_error(error: OutriderError, request_id: str) -> dict[str, object]:
    """Return Anthropic's error: `{"type": "error", "error": {type, message}, "request_id"}`."""
    kind = _MESSAGES_TYPES.get(error.reason.kind.http, "invalid_request_error")
    shown: dict[str, object] = {"type": kind, "message": error.message}
    if error.reason is Reason.UNSUPPORTED_PARAMETER and error.field == "thread":
        # When Anthropic's tool runners get this detail, they send this request again, and all later
        # requests, without `thread`.
        shown["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": shown, "request_id": request_id}


def body_for(path: str, error: OutriderError, request_id: str) -> dict[str, object]:
    """Return the error in the shape of the path's API. Anthropic's shape has the request's id."""
    if path != _MESSAGES and not path.startswith(f"{_MESSAGES}/"):
        return error_body(error)
    return messages_error(error, request_id)


class AsciiResponse(JSONResponse):
    """Compact JSON in ASCII, since an error may quote invalid Unicode, such as lone surrogates."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(error: OutriderError, scope: Scope) -> Response:
    """Return the error with its HTTP status, and with Retry-After if the error says when to retry.

    Retry-After has whole seconds. `scope` is the request's.
    """
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    access = access_log.current()
    access.error = error.reason.name.lower()
    body = body_for(scope["path"], error, access.request_id)
    if "request_id" in body:
        headers["request-id"] = access.request_id
    return AsciiResponse(body, status_code=error.reason.kind.http, headers=headers)


def unexpected() -> OutriderError:
    """Return the error that a caller gets for a bug of ours.

    The exception's text may hold a user's data, so it goes only to the log.
    """
    return OutriderError(Reason.INTERNAL, "the gateway failed; its log has the reason")


def install(app: FastAPI) -> None:
    """Register handlers that answer every error in the shape of the path's API."""
    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]] = {
        OutriderError: _outrider_error,
        RequestValidationError: _validation_error,
        HTTPException: _http_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _outrider_error(request: Request, error: OutriderError) -> Response:
    return error_response(error, request.scope)


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    body = getattr(request.scope.get("route"), "body_field", None)
    details = error.errors()
    known: Iterable[str] = ()
    if body is not None and details:
        known = _names_beside(body.field_info.annotation, details[0]["loc"])
    return error_response(validation_error(details, known), request.scope)


def _names_beside(model: Any, location: Sequence[str | int]) -> Iterable[str]:
    """Return the names of the fields of the object that holds the parameter at `location`.

    The result is empty if the parameter is within a list or a union.
    """
    for part in location[1:-1]:
        field = getattr(model, "model_fields", {}).get(part)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        models = [kind for kind in kinds if hasattr(kind, "model_fields")]
        if len(models) != 1:
            return ()
        model = models[0]
    return getattr(model, "model_fields", ())


async def _http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error.__cause__, OutriderError):
        # FastAPI wraps an error that is raised while it reads the body.
        return error_response(error.__cause__, request.scope)
    reason = _BY_STATUS.get(error.status_code, Reason.MALFORMED_REQUEST)
    path = request.url.path[:200]
    cause = error.__cause__ or error.detail
    messages = {
        Reason.MALFORMED_REQUEST: f"the body cannot be read as JSON: {cause}",
        Reason.ROUTE_NOT_FOUND: f"there is no {path} here{_instead(path)}",
        Reason.METHOD_NOT_ALLOWED: f"{path} does not take {request.method}",
    }
    described = OutriderError(reason, messages.get(reason, str(error.detail)))
    response = error_response(described, request.scope)
    response.headers.update(error.headers or {})
    return response


def _instead(path: str) -> str:
    """Return a hint for callers of a path that the gateway does not have.

    They may have left out or doubled /v1, misspelt a path, or called, for example, /v1/embeddings.
    """
    if path.startswith("/v1/v1/"):
        return "; the client adds /v1 itself, so its base URL ends before it"
    if f"/v1{path}" in (*_PATHS, "/v1/models"):
        return f"; the path is /v1{path}, so a client's base URL ends in /v1"
    known = [each for each in (*_PATHS, "/v1/models") if each.count("/") == path.count("/")]
    if alike := suggestion(path, known):
        return alike
    if not path.startswith("/v1/"):
        return ""
    return f"; {' and '.join(f'POST {each}' for each in _PATHS)} generate text"


def validation_error(
    details: Sequence[ErrorDetails | dict[str, Any]], known: Iterable[str] = ()
) -> OutriderError:
    """Return the first of pydantic's complaints, with the field's path and the value sent there.

    For an unknown parameter, the error suggests a similar name out of `known`.
    """
    if not details:
        return OutriderError(Reason.MALFORMED_REQUEST, "the request is malformed")
    detail = details[0]
    kind = detail["type"]
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        cause = detail.get("ctx", {}).get("error", "")
        message = f"the body is not JSON: {cause} (character {detail['loc'][-1]})"
        return OutriderError(Reason.MALFORMED_REQUEST, message)
    path = field_path(detail["loc"])
    if not path:
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        return OutriderError(Reason.MALFORMED_REQUEST, message)
    if kind == "extra_forbidden":
        alike = suggestion(str(detail["loc"][-1]), known)
        message = f"{path} is not a parameter of this request{alike}"
        return OutriderError(Reason.UNKNOWN_PARAMETER, message, path)
    if kind == UNSUPPORTED:
        return OutriderError(Reason.UNSUPPORTED_PARAMETER, f"{path} {message}", path)
    if kind == "union_tag_invalid":
        return OutriderError(Reason.INVALID_VALUE, _wrong_tag(path, detail["ctx"]), path)
    if kind == "missing":
        return OutriderError(Reason.INVALID_VALUE, f"{path} is required", path)
    if kind == "too_short" and isinstance(detail.get("input"), list):
        count = detail["ctx"]["min_length"]
        message = f"must have at least {count} item{'' if count == 1 else 's'}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        message = "must be an object"
    message = f"{path}: {message}, not {_shown(detail.get('input'))}"
    return OutriderError(Reason.INVALID_VALUE, message, path)


def _wrong_tag(path: str, context: Mapping[str, Any]) -> str:
    """Return the message for an object whose type, or other tag, is unknown."""
    name = context["discriminator"].strip("'")
    tag = context["tag"]
    why = text_only(tag) if name == "type" else ""
    return f"{path}.{name} must be one of {context['expected_tags']}, not '{_cut(tag)}'{why}"


def text_only(kind: object) -> str:
    """Return the end of a sentence that refuses an image or other media; "" for other types."""
    return ": the model takes text only" if isinstance(kind, str) and kind in _MEDIA else ""


def _shown(value: object) -> str:
    """Return the first characters of a value as JSON.

    Of a large value only the beginning is encoded, except that a string within it is encoded whole.
    """
    if isinstance(value, str):
        value = _cut(value)
    shown = ""
    for part in json.JSONEncoder(default=str).iterencode(value):
        shown += part
        if len(shown) > _SHOWN_CHARACTERS:
            break
    return _cut(shown)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def field_path(location: Sequence[str | int]) -> str:
    """Return `messages[0].content` for ("body", "messages", 0, "content"); cut long keys."""
    path = ""
    named = location[:1] in (("body",), ("query",))
    for part in location[1:] if named else location:
        path += f"[{part}]" if isinstance(part, int) else f".{_cut(part)}"
    return path.removeprefix(".")
