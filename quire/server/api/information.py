"""What can be asked about the server: GET /health, /ready, /version, /metrics, /v1/models,
/tokenizer_info, and /v1/requests, /v1/requests/{id} and /v1/requests/{id}/explain: what happened to
requests.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from quire import __version__
from quire.server.errors import ApiError
from quire.server.guard.auth import seen_by
from quire.server.http_responses import JsonResponse
from quire.server.link.others import hide_others
from quire.server.link.replicas.pool import ReplicaPool
from quire.server.service import GenerationService, get_service
from quire.tools.explain.outside import add_outside
from quire.tools.explain.text import explanation_text

router = APIRouter()


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while there is an engine, 503 while it is being replaced; with replicas, how each of them
    is. Needs no key.
    """
    client = get_service(request).client
    body: dict[str, Any] = {"status": client.state}
    if isinstance(client, ReplicaPool) and (replicas := client.describe_replicas()):
        body["replicas"] = replicas
    return JsonResponse(body, 200 if client.state == "ready" else 503)


@router.get("/ready", tags=["operation"])
async def ready(request: Request) -> Response:
    """200 if requests make progress: send traffic here or not."""
    service = get_service(request)
    client = service.client
    is_ready = client.state == "ready" and not client.is_stalled and not service.is_draining
    body: dict[str, Any] = {"ready": is_ready, "engine": client.state}
    if client.is_stalled:
        body["why"] = (
            f"the engine has work and gave no sign of life for {client.seconds_silent:.0f} s"
        )
    elif service.is_draining:
        body["why"] = "the server is going down"
    return JsonResponse(body, 200 if is_ready else 503)


@router.get("/version", tags=["operation"])
async def version() -> Response:
    return JsonResponse({"version": __version__})


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Prometheus' text format; names are vLLM's where it has one."""
    return Response(get_service(request).metrics.text(), media_type="text/plain; version=0.0.4")


@router.get("/v1/requests", tags=["operation"])
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> Response:
    """The last requests of this key, newest first: ids, states, counts of tokens and times."""
    records = await get_service(request).newest_records(limit, seen_by(request.scope))
    return JsonResponse({"object": "list", "data": [record.describe() for record in records]})


@router.get("/v1/requests/{request_id:path}/explain", tags=["operation"])
async def explain_request(request: Request, request_id: str) -> Response:
    """By the id of the response or by x-request-id: what the request waited for and because of
    whom, what it found in the cache, its chunks and preemptions, and its time in parts that add up
    to the whole; in words, too (`text`).
    """
    service = get_service(request)
    owner = seen_by(request.scope)
    record = await service.find_record(request_id, owner)
    explanation = None if record is None else await service.describe(record)
    if record is None or explanation is None:
        raise ApiError(
            404,
            "there is no request of this id, or the step log has forgotten it",
            code="not_found",
        )
    add_outside(explanation, record)
    explanation = await hide_others(explanation, service.find_record, owner)
    return JsonResponse({**record.describe(), **explanation, "text": explanation_text(explanation)})


@router.get("/v1/requests/{request_id:path}", tags=["operation"])
async def get_request(request: Request, request_id: str) -> Response:
    """By the id of the response or by x-request-id: where its time went, from the engine's step log
    (`engine`) as long as that remembers it.
    """
    service = get_service(request)
    owner = seen_by(request.scope)
    record = await service.find_record(request_id, owner)
    if record is None:
        raise ApiError(
            404, "there is no request of this id, or it was too long ago", code="not_found"
        )
    engine = await hide_others(await service.describe(record), service.find_record, owner)
    return JsonResponse({**record.describe(), "engine": engine})


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The models served here, for clients of OpenAI's API and of Anthropic's."""
    service = get_service(request)
    adapters = await service.in_thread(service.adapters.names)
    names = (*service.config.model_names, *adapters)
    models = [_describe(service, name) for name in names]
    # Anthropic's clients read these
    ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return JsonResponse({"object": "list", "data": models, **ends})


@router.get("/v1/models/{model_id:path}", tags=["OpenAI"])
async def get_model(request: Request, model_id: str) -> Response:
    """One of the models served here."""
    service = get_service(request)
    return JsonResponse(_describe(service, service.check_model(model_id)))


@router.get("/tokenizer_info", tags=["tokens"])
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's own words, as vLLM's users and lm-eval's remote tokenizer read them."""
    service = get_service(request)
    tokenizer = service.tokenizer
    named = dict(tokenizer.named_tokens)
    if tokenizer.eos_token_ids:
        named.setdefault("eos_token", tokenizer.id_to_token(tokenizer.eos_token_ids[0]))
    if tokenizer.bos_token_id is not None:
        named.setdefault("bos_token", tokenizer.id_to_token(tokenizer.bos_token_id))
    known = {name: named.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    body = {
        **known,
        **named,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": tokenizer.eos_token_ids,
        "chat_template": tokenizer.chat_templates.get("default"),
        "model_max_length": service.ready.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_class": tokenizer.class_name,
    }
    return JsonResponse(body)


def _describe(service: GenerationService, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.started,
        "created_at": datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "quire",
        "root": service.config.model_names[0],
        # of an adapter, the model that it changes
        "parent": None if name in service.config.model_names else service.config.model_names[0],
        "max_model_len": service.ready.max_model_len,
    }
