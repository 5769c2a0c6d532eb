"""The HTTP endpoints that generate no text: models, tokenisation, health and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.access.gate import Identity, identity_of, operators_only
from gateway.generation.generate import Generation
from gateway.http.ingress.json_body import JsonRoute
from gateway.http.openai.schema import DetokenizeBody, TokenizeBody
from gateway.http.openapi import JSON, error_responses, json_responses
from gateway.metrics import GatewayMetrics
from gateway.text.prompts import Prompts
from gateway.upstream.replica import Replica, explain_differing
from gateway.upstream.routing import Router
from outrider import __version__
from outrider.errors import OutriderError, Reason, invalid
from outrider.protocol.model_info import DrafterInfo, ModelInfo, Stage

# A text may have this many tokens even if the model's context is shorter.
_MAX_TOKENIZED = 65_536
_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
"""Statuses of errors of /tokenize and /detokenize."""


class _Metrics(Response):
    media_type = CONTENT_TYPE_LATEST


def routes(generation: Generation, metrics: GatewayMetrics) -> APIRouter:
    """Return the router of these endpoints."""
    router = APIRouter(route_class=JsonRoute)
    _add_model_routes(router, generation.router)
    _add_health_routes(router, generation.router)

    @router.get(
        "/metrics",
        response_class=_Metrics,
        responses=error_responses(401),
        dependencies=[Depends(operators_only)],
    )
    async def prometheus() -> Response:
        """The metrics in Prometheus' text format, for operators."""
        for name in generation.router.models:
            # Create these counters: `vllm bench serve` reads them before its first request.
            metrics.drafted(name, 0, ())
        return _Metrics(generate_latest(metrics.registry))

    _add_tokenizer_routes(router, generation)
    _answer_head(router)
    return router


def _add_model_routes(router: APIRouter, replicas: Router) -> None:
    started = int(time.time())

    @router.get("/v1/models", responses=json_responses(401))
    async def models() -> Response:
        """The served models, under each of their names.

        The list is empty until a verifier answers.
        """
        listed = [_model(name, info, started) for name, info in replicas.names.items()]
        return JSONResponse({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}", responses=json_responses(401, 404))
    async def model(name: str) -> Response:
        """One served model, or 404."""
        info = replicas.names.get(name)
        if info is None:
            message = f"model {name[:100]!r} is not served here"
            raise OutriderError(Reason.MODEL_NOT_FOUND, message, "model")
        return JSONResponse(_model(name, info, started))


def _add_health_routes(router: APIRouter, replicas: Router) -> None:
    @router.get("/livez", responses=json_responses())
    async def livez() -> Response:
        """200 while the process runs."""
        return JSONResponse({"status": "alive"})

    @router.get(
        "/readyz",
        responses={**json_responses(), 503: {"description": "Not ready.", "content": JSON}},
    )
    async def readyz(request: Request) -> Response:
        """200 if the gateway takes requests, else 503 with the reason.

        The status is "degraded" if the gateway takes requests although a verifier is not ready or
        differs from the others, a name cannot be resolved, or a drafter is lost. Only operators see
        the reason and the processes.
        """
        body = readiness(replicas, identity_of(request))
        takes_requests = body["status"] in ("ready", "degraded")
        return JSONResponse(body, status_code=200 if takes_requests else 503)

    answers = {**error_responses(), 503: {"description": "The gateway takes no requests."}}

    @router.get("/health", response_class=Response, responses=answers)
    @router.get("/ping", response_class=Response, responses=answers)
    @router.post("/ping", response_class=Response, responses=answers)
    async def health() -> Response:
        """vLLM's health checks: 200 without a body if the gateway takes requests, else 503."""
        return Response(status_code=200 if replicas.ready else 503)

    @router.get("/version", responses=json_responses(401))
    async def version() -> Response:
        """The version of Outrider, in vLLM's shape."""
        return JSONResponse({"version": __version__})


def _answer_head(router: APIRouter) -> None:
    """Answer HEAD like GET. uvicorn leaves out the body."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                dependencies=route.dependencies,
                include_in_schema=False,
            )


def _add_tokenizer_routes(router: APIRouter, generation: Generation) -> None:
    @router.get("/tokenizer_info", responses=json_responses(401))
    async def tokenizer_info() -> Response:
        """The special tokens and the chat template, in vLLM's response format, for lm-eval."""
        return JSONResponse(generation.prompts.tokenizer_info)

    @router.post("/tokenize", responses=json_responses(*_ERRORS))
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The token ids of a prompt or of a rendered conversation, in vLLM's response format."""
        _, info = generation.router.lookup(body.model)
        prompts = generation.prompts
        most = most_tokens(info)
        ids = await _tokenize(body, prompts, most, identity_of(request).tenant)
        strings = await prompts.token_names(ids) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": info.context_length,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", responses=json_responses(*_ERRORS))
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids, special tokens included, in vLLM's response format."""
        _, info = generation.router.lookup(body.model)
        most = most_tokens(info)
        if len(body.tokens) > most:
            raise invalid("tokens", f"must hold at most {most} ids, not {len(body.tokens)}")
        for extreme in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= extreme < info.vocab_size:
                message = f"must be in [0, {info.vocab_size}), not {extreme}"
                raise invalid(f"tokens[{body.tokens.index(extreme)}]", message)
        text = generation.prompts.decode(body.tokens)
        return JSONResponse({"prompt": text})


async def _tokenize(body: TokenizeBody, prompts: Prompts, most: int, tenant: str) -> list[int]:
    """Return the ids of the body's prompt or messages.

    Raises OutriderError, also if there are more than `most` ids.
    """
    if (body.prompt is None) is (body.messages is None):
        raise invalid("prompt", "or messages must be given, and not both")
    if body.messages is None:
        field = "prompt"
        text = body.prompt or ""
    else:
        field = "messages"
        messages = [message.for_template() for message in body.messages]
        with naming_limit(field, most):
            text = await prompts.render(messages, field, most, tenant, **body.rendering())
    special = body.add_special_tokens
    if special is None:
        special = body.messages is None
    with naming_limit(field, most):
        return await prompts.encode(text, field, most, add_special_tokens=special)


def most_tokens(info: ModelInfo) -> int:
    """Return the maximum number of tokens of a text to tokenise or of ids to decode."""
    return max(info.context_length, _MAX_TOKENIZED)


@contextmanager
def naming_limit(field: str, most: int) -> Iterator[None]:
    """Replace an error for too many tokens by an error that states the limit `most`.

    The new error is OutriderError(INVALID_VALUE). The original error, which the block raises,
    states the length of the model's context, but the limit of these endpoints may be higher.
    """
    try:
        yield
    except OutriderError as error:
        if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
            raise
        raise invalid(field, f"must have at most {most} tokens") from error


def _model(name: str, info: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "root": info.model_id,
        "max_model_len": info.context_length,
    }


def readiness(router: Router, identity: Identity) -> dict[str, Any]:
    """Return the body of `/readyz`: the status, its reason, and each verifier's state.

    The status is ready, degraded, loading, failed, unavailable or draining. The states hold sums
    over all tenants, so only operators get more than the status.
    """
    status, detail = service_status(router)
    if not identity.is_operator:
        return {"status": status, "detail": "", "verifiers": []}
    verifiers = [_verifier(replica) for replica in router.replicas]
    return {"status": status, "detail": detail, "verifiers": verifiers}


def service_status(router: Router) -> tuple[str, str]:
    """Return the status of `/readyz`, and its reason."""
    if router.draining:
        return "draining", "the gateway is shutting down"
    staying = [replica for replica in router.replicas if not replica.leaving]
    problems = [str(replica.problem) for replica in staying if replica.problem is not None]
    problems += router.addresses.problems.values()
    if not router.ready:
        status = _not_ready(router.replicas[0]) if router.replicas else "unavailable"
        return status, "; ".join(problems)
    problems += [f"drafter {each} is lost" for each in dict.fromkeys(lost_drafters(router))]
    problems += [explain_differing(*each) for each in router.differing.items()]
    return "degraded" if problems else "ready", "; ".join(problems)


def lost_drafters(router: Router) -> list[str]:
    """Return the ids of the drafters that the verifiers have lost in the last ten minutes."""
    infos = [replica.info for replica in router.replicas if replica.info is not None]
    drafters = [drafter for info in infos for drafter in info.drafters]
    return [drafter.drafter_id for drafter in drafters if not drafter.connected]


def _not_ready(replica: Replica) -> str:
    problem = replica.problem
    lost = problem is not None and problem.reason is Reason.VERIFIER_UNAVAILABLE
    if replica.info is None or lost:
        return "unavailable"
    stages = {Stage.LOADING: "loading", Stage.WARMING_UP: "loading", Stage.DRAINING: "draining"}
    return stages.get(replica.info.stage, "failed")


def _verifier(replica: Replica) -> dict[str, Any]:
    info = replica.info
    known: dict[str, Any] = {}
    if info is not None:
        known = {
            "model": info.model_id,
            "stage": "draining" if replica.leaving else info.stage.name.lower(),
            "stage_detail": info.stage_detail,
            "dtype": info.dtype,
            "device": info.device,
            "version": info.server_version,
            "model_fingerprint": info.model_fingerprint,
            "drafters": [_drafter(drafter) for drafter in info.drafters],
        }
    return {
        "address": replica.address,
        "ready": replica.problem is None and not replica.leaving,
        "problem": None if replica.problem is None else replica.problem.message,
        "running": len(replica.sequences),
        "round_trip_seconds": replica.round_trip_s,
        **known,
    }


def _drafter(drafter: DrafterInfo) -> dict[str, Any]:
    return {
        "id": drafter.drafter_id,
        "family": drafter.family,
        "placement": drafter.placement.kind,
        "host": drafter.placement.host,
        "device": drafter.placement.device,
        "cores": len(drafter.placement.cores),
        "numa_node": drafter.placement.numa_node,
        "architecture": drafter.placement.architecture,
        "connected": drafter.connected,
        "sequences": drafter.sequence_count,
        "acceptance_rate": drafter.acceptance_rate,
        "round_trip_seconds": drafter.round_trip_s,
        "token_seconds": drafter.token_s,
    }
