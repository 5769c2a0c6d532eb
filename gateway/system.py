"""Everything over HTTP that generates no text: models, tokenisation, health and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.document import JSON, answers, denied
from gateway.generate import Generation
from gateway.json_body import JsonRoute
from gateway.metrics import Metrics
from gateway.routing import Replica, Router
from gateway.schema import DetokenizeBody, TokenizeBody
from outrider.errors import OutriderError, Reason, invalid
from outrider.model_info import DrafterInfo, ModelInfo, Stage

MAX_TOKENIZED = 65_536
"""Most tokens that /tokenize and /detokenize take where the model's context is shorter."""


class _Metrics(Response):
    media_type = CONTENT_TYPE_LATEST


def routes(generation: Generation, metrics: Metrics) -> APIRouter:
    """The endpoints around the generation."""
    router = APIRouter(route_class=JsonRoute)
    started = int(time.time())

    @router.get("/v1/models", responses=answers())
    async def models() -> Response:
        """The served models; none before the verifier has told its model's name."""
        listed = [_model(name, info, started) for name, info in generation.router.models.items()]
        return JSONResponse({"object": "list", "data": listed})

    @router.get("/v1/models/{name:path}", responses=answers(404))
    async def model(name: str) -> Response:
        info = generation.router.models.get(name)
        if info is None:
            raise OutriderError(
                Reason.MODEL_NOT_FOUND, f"model {name[:100]!r} is not served here", "model"
            )
        return JSONResponse(_model(name, info, started))

    @router.get("/livez", responses=answers())
    async def livez() -> Response:
        """200 while the process runs."""
        return JSONResponse({"status": "alive"})

    @router.get(
        "/readyz", responses={**answers(), 503: {"description": "As above.", "content": JSON}}
    )
    async def readyz() -> Response:
        """200 when requests are taken, with status "degraded" when something that was there is lost; else 503 with the reason."""
        body = readiness(generation.router)
        return JSONResponse(
            body, status_code=200 if body["status"] in ("ready", "degraded") else 503
        )

    @router.get(
        "/health",
        response_class=Response,
        responses={**denied(), 503: {"description": "No requests are taken."}},
    )
    async def health() -> Response:
        """As vLLM's: 200 without a body when requests are taken, else 503."""
        return Response(status_code=200 if generation.router.ready else 503)

    @router.get("/metrics", response_class=_Metrics, responses=denied())
    async def prometheus() -> Response:
        """Prometheus' text format."""
        for name in generation.router.models:
            # `vllm bench serve` looks for these counters before its first request.
            metrics.drafted(name, 0, ())
        return _Metrics(generate_latest(metrics.registry))

    _answer_head(router)
    _add_tokenizer_routes(router, generation)
    return router


def _answer_head(router: APIRouter) -> None:
    """Let HEAD be answered as GET is, without the body, which uvicorn leaves out."""
    for route in list(router.routes):
        if isinstance(route, APIRoute):
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )


def _add_tokenizer_routes(router: APIRouter, generation: Generation) -> None:
    @router.post("/tokenize", responses=answers(400, 404, 408, 413, 500, 503))
    async def tokenize(body: TokenizeBody) -> Response:
        """The ids of a prompt or of a rendered conversation, in vLLM's shape."""
        _, info = generation.router.lookup(body.model)
        if (body.prompt is None) is (body.messages is None):
            raise invalid("prompt", "or messages must be given, and not both")
        most, prompts = max(info.context_length, MAX_TOKENIZED), generation.prompts
        field, text = "prompt", body.prompt or ""
        if body.messages is not None:
            field, messages = "messages", [message.for_template() for message in body.messages]
            text = await prompts.rendered(messages, field, most, **body.rendering())
        special = (
            body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        )
        try:
            ids = await prompts.encode(text, field, most, add_special_tokens=special)
        except OutriderError as error:
            # Here the limit may be another than the model's context.
            raise invalid(field, f"must have at most {most} tokens") from error
        strings = await prompts.token_names(ids) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": info.context_length,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", responses=answers(400, 404, 408, 413, 500, 503))
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of ids, special tokens included, in vLLM's shape."""
        _, info = generation.router.lookup(body.model)
        most = max(info.context_length, MAX_TOKENIZED)
        if len(body.tokens) > most:
            raise invalid("tokens", f"must hold at most {most} ids, not {len(body.tokens)}")
        outside = next(
            (
                i
                for i in (min(body.tokens, default=0), max(body.tokens, default=0))
                if not 0 <= i < info.vocab_size
            ),
            None,
        )
        if outside is not None:
            raise invalid(
                f"tokens[{body.tokens.index(outside)}]",
                f"must be in [0, {info.vocab_size}), not {outside}",
            )
        return JSONResponse({"prompt": generation.prompts.decode(body.tokens)})


def _model(name: str, info: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": info.context_length,
    }


def readiness(router: Router) -> dict[str, Any]:
    """What `/readyz` says: status ready, degraded, loading, failed, unavailable or draining, and each verifier's state."""
    verifiers = [_verifier(replica) for replica in router.replicas]
    if router.draining:
        return {
            "status": "draining",
            "detail": "the gateway is shutting down",
            "verifiers": verifiers,
        }
    problems = [str(replica.problem) for replica in router.replicas if replica.problem is not None]
    if not router.ready:
        return {
            "status": _not_ready(router.replicas[0]),
            "detail": "; ".join(problems),
            "verifiers": verifiers,
        }
    drafters = [
        drafter
        for replica in router.replicas
        if replica.info is not None
        for drafter in replica.info.drafters
    ]
    problems += [
        f"drafter {drafter.drafter_id} is lost" for drafter in drafters if not drafter.connected
    ]
    return {
        "status": "degraded" if problems else "ready",
        "detail": "; ".join(problems),
        "verifiers": verifiers,
    }


def _not_ready(replica: Replica) -> str:
    if replica.info is None or (
        replica.problem is not None and replica.problem.reason is Reason.VERIFIER_UNAVAILABLE
    ):
        return "unavailable"
    stages = {Stage.LOADING: "loading", Stage.WARMING_UP: "loading", Stage.DRAINING: "draining"}
    return stages.get(replica.info.stage, "failed")


def _verifier(replica: Replica) -> dict[str, Any]:
    info = replica.info
    known: dict[str, Any] = {}
    if info is not None:
        known = {
            "model": info.model_id,
            "stage": info.stage.name.lower(),
            "stage_detail": info.stage_detail,
            "dtype": info.dtype,
            "device": info.device,
            "drafters": [_drafter(drafter) for drafter in info.drafters],
        }
    problem, running = (
        None if replica.problem is None else replica.problem.message,
        len(replica.sequences),
    )
    here = {
        "ready": problem is None,
        "problem": problem,
        "running": running,
        "round_trip_seconds": replica.round_trip_s,
    }
    return {"address": replica.address, **here, **known}


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
