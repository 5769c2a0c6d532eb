"""What `/openapi.json` says beside the routes: their errors, the media types of answers, and the limits of parameters."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Json = dict[str, Any]


_ERROR: Json = {
    "description": "The body of every error, in OpenAI's shape.",
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
_ERRORS = {
    400: "The request is at fault; `param` names the field, and `message` the limit.",
    403: "The Host or Origin is not allowed.",
    404: "There is no such model or drafter.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too much is asked at once; `Retry-After` says when to come back.",
    431: "The headers are too large.",
    500: "The server is at fault.",
    503: "The model is not served now; `Retry-After` says when to come back.",
}
JSON: Json = {"application/json": {"schema": {"type": "object"}}}
STREAMED: Json = {"text/event-stream": {"schema": {"type": "string"}}}
"""The media type of a streamed answer, for a route's 200."""


def denied(*errors: int) -> dict[int | str, Json]:
    """FastAPI's `responses` of a route: these errors, and those of every route."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        status: {"description": _ERRORS[status], "content": content}
        for status in (*errors, 403, 431)
    }


def answers(*errors: int, also: Json | None = None) -> dict[int | str, Json]:
    """The same for a route that answers with a JSON object, or with what `also` has by media type."""
    return {200: {"description": "The answer.", "content": JSON | (also or {})}, **denied(*errors)}


def install(app: FastAPI) -> None:
    """Serve the document without FastAPI's own validation errors (422), which api_errors answers as 400."""

    def document() -> Json:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in found["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            schemas = found["components"]["schemas"]
            schemas["Error"] = _ERROR
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation says
