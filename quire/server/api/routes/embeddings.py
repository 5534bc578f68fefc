"""POST /v1/embeddings"""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np

from quire.server.api.protocol.embeddings import EmbeddingsRequest
from quire.server.calls import vectors
from quire.server.calls.generation import GenerationEvent
from quire.server.lifecycle import Writer, endpoint


class EmbeddingWriter(Writer[EmbeddingsRequest]):
    """Vectors as lists of numbers or in base64; there are no streams."""

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        num_tokens = self.call.usage.prompt_tokens
        return {
            "id": self.response_id,
            "object": "list",
            "created": self.created,
            "data": [
                {
                    "object": "embedding",
                    "index": event.index,
                    "embedding": self._vector(event.vector),
                }
                for event in sorted(events, key=lambda event: event.index)
            ],
            "model": self.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, vector: bytes) -> str | list[float]:
        body = self.body
        numbers = np.frombuffer(vector, "<f4")[: body.dimensions]
        rounded = vectors.rounded(
            vectors.unit(numbers) if body.normalize else numbers, body.embed_dtype
        )
        if body.encoding_format == "base64":
            is_big = body.endianness == "big" or (
                body.endianness == "native" and sys.byteorder == "big"
            )
            return base64.b64encode(vectors.stored(rounded, body.embed_dtype, is_big)).decode(
                "ascii"
            )
        # The shortest decimals that mean these float32 numbers, not the long ones of their float64
        # neighbours.
        return [float(str(number)) for number in rounded]


router = endpoint(
    EmbeddingsRequest, EmbeddingWriter, "create_embeddings", "Vectors for texts.", "OpenAI"
)
