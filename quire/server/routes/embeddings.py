"""POST /v1/embeddings"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.connection import body_schema, cancel_on_disconnect, convert, new_id, read_body, response_headers
from quire.server.embedding import start_embedding
from quire.server.json_response import JsonResponse
from quire.server.protocol.embeddings import EmbeddingsRequest, embeddings_body
from quire.server.service import get_service

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingsRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_embeddings(request: Request) -> Response:
    """Vectors for texts."""
    body = await read_body(request, EmbeddingsRequest)
    service = get_service(request)
    model = service.check_model(body.model)
    body.check_dimensions(service.ready.hidden_size)
    wanted = await convert(request, body.to_generation, new_id("embd"), request.state.request_id)
    run = await start_embedding(service, wanted, body.pooling)
    request.state.record = run.record
    vectors = await run.run()
    return JsonResponse(
        embeddings_body(body, model, vectors, run.record.prompt_tokens), headers=response_headers(request)
    )
