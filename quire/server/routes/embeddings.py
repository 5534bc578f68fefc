"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from quire.server.generation import GenerationEvent
from quire.server.guard.connection import body_schema, cancel_on_disconnect
from quire.server.lifecycle import Writer, answer
from quire.server.protocol.embeddings import EmbeddingsRequest

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingsRequest), tags=["OpenAI"])
@cancel_on_disconnect
async def create_embeddings(request: Request) -> Response:
    """Vectors for texts."""
    return await answer(request, EmbeddingsRequest, EmbeddingWriter)


class EmbeddingWriter(Writer[EmbeddingsRequest]):
    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        num_tokens = self.call.usage.prompt_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": event.index, "embedding": self._vector(event.vector)}
                for event in sorted(events, key=lambda event: event.index)
            ],
            "model": self.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, vector: bytes) -> str | list[float]:
        if self.body.dimensions is not None:
            kept = np.frombuffer(vector, "<f4")[: self.body.dimensions].astype(np.float64)
            norm = np.linalg.norm(kept)
            vector = (kept / norm if norm > 0 else kept).astype("<f4").tobytes()
        if self.body.encoding_format == "base64":
            return base64.b64encode(vector).decode("ascii")
        # The shortest decimals that mean these float32 numbers, not the long ones of their float64 neighbours.
        return [float(str(number)) for number in np.frombuffer(vector, "<f4")]
