"""Completes `/openapi.json`: the routes' errors and the media types of their answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Json = dict[str, Any]


_ERROR: Json = {
    "description": "The body of errors in OpenAI's shape.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_MESSAGES_ERROR: Json = {
    "description": "The body of errors in Anthropic's shape.",
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_ERRORS = {
    400: "The request is invalid. `param` names the field, and `message` the limit.",
    401: "There is no API key, or it is unknown or expired.",
    403: "The Host or Origin is not allowed, or the API key is not an operator's.",
    404: "There is no such model or drafter.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's `Content-Encoding` is not gzip or deflate.",
    429: "The server is full, or the API key is at its limit. `Retry-After` says when to retry.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The model is not served now. `Retry-After` says when to try again.",
    504: "The answer was not complete within its timeout.",
}
JSON: Json = {"application/json": {"schema": {"type": "object"}}}
STREAMED: Json = {"text/event-stream": {"schema": {"type": "string"}}}
"""The media type of a streamed answer, for a route's 200."""


def error_responses(*errors: int, shape: str = "Error") -> dict[int | str, Json]:
    """Return FastAPI's `responses` for a route: these error statuses, and 403 and 431.

    `shape` is the schema of the errors: Error (OpenAI's) or MessagesError (Anthropic's).
    """
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    return {
        status: {"description": _ERRORS[status], "content": content}
        for status in (*errors, 403, 431)
    }


def json_responses(
    *errors: int, also: Json | None = None, shape: str = "Error"
) -> dict[int | str, Json]:
    """Return `error_responses`, and a 200 with a JSON object or with a media type of `also`."""
    return {
        200: {"description": "The answer.", "content": JSON | (also or {})},
        **error_responses(*errors, shape=shape),
    }


def install(app: FastAPI) -> None:
    """Serve the document without FastAPI's 422, since `api_errors` answers with 400 instead."""

    def document() -> Json:
        """Return the OpenAPI document, built at the first call."""
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in found["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            schemas = found["components"]["schemas"]
            schemas |= {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation says
