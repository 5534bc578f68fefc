"""OpenAI's embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.generation import GenerationRequest, Prompt, TextPrompt, TokensPrompt
from quire.server.protocol.common import Body
from quire.step import Pooling

MAX_INPUTS = 2048
FIELDS = {"prompt": "input", "text": "input", "token_ids": "input"}
"""Parameters as clients of this API write them."""


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<lists of tokens>"
    return "<texts>" if isinstance(first, str) else "<tokens>"


class EmbeddingsRequest(Body):
    """POST /v1/embeddings"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "messages": "give the text as input",
        "normalize": "vectors always have length 1",
        "task": "there is one kind of embedding",
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), Tag("<texts>")]
        | Annotated[list[int], Field(min_length=1), Tag("<tokens>")]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MAX_INPUTS), Tag("<lists of tokens>")],
        Discriminator(
            _kind_of_input,
            custom_error_type="embedding_input",
            custom_error_message="Input should be a text, a list of texts, token ids, or a list of lists of token ids",
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    """Keep this many of the first numbers, scaled to length 1 again."""
    user: str | None = Field(None, max_length=1024)
    pooling: Pooling = "mean"
    """How a text's hidden states become one vector: their mean, or the last token's."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of a text's last tokens; -1: as many as fit."""
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0

    def to_generation(self, response_id: str, request_id: str) -> GenerationRequest:
        params = SamplingParams(max_tokens=1, temperature=0, cache_salt=self.cache_salt, priority=self.priority)
        return GenerationRequest(
            response_id=response_id,
            request_id=request_id,
            prompts=tuple(self._prompts()),
            params=params,
            endpoint="/v1/embeddings",
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            fields=FIELDS,
            notes={} if self.user is None else {"user": self.user},
        )

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.input, str):
            return [TextPrompt(self.input, self.add_special_tokens)]
        if isinstance(self.input[0], int):
            return [TokensPrompt(tuple(self.input))]
        return [
            TextPrompt(one, self.add_special_tokens) if isinstance(one, str) else TokensPrompt(tuple(one))
            for one in self.input
        ]

    def check_dimensions(self, hidden_size: int) -> None:
        if self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidRequestError("dimensions", f"is {self.dimensions}; this model's vectors have {hidden_size}")


def embeddings_body(
    request: EmbeddingsRequest, model: str, vectors: Sequence[bytes], num_prompt_tokens: int
) -> dict[str, Any]:
    """`vectors` as the engine gives them: float32, little-endian, of length 1."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(request, vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens},
    }


def _written(request: EmbeddingsRequest, vector: bytes) -> str | list[float]:
    if request.dimensions is not None:
        kept = np.frombuffer(vector, "<f4")[: request.dimensions].astype(np.float64)
        norm = np.linalg.norm(kept)
        vector = (kept / norm if norm > 0 else kept).astype("<f4").tobytes()
    if request.encoding_format == "base64":
        return base64.b64encode(vector).decode("ascii")
    # The shortest decimals that mean these float32 numbers, not the long ones of their float64 neighbours.
    return [float(str(number)) for number in np.frombuffer(vector, "<f4")]
