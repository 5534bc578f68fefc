"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from quire.server.generation import GenerationEvent
from quire.server.lifecycle import Writer, endpoint
from quire.server.protocol.embeddings import EmbeddingsRequest


class EmbeddingWriter(Writer[EmbeddingsRequest]):
    """Vectors as lists of numbers or in base64; there are no streams."""

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


router = endpoint(EmbeddingsRequest, EmbeddingWriter, "create_embeddings", "Vectors for texts.", "OpenAI")
