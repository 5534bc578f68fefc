"""OpenAI's embeddings: POST /v1/embeddings"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams
from quire.server.api import vectors
from quire.server.api.body import NO_TEMPLATES, ApiRequest, present, to_prompts
from quire.server.api.endpoint import endpoint
from quire.server.api.vectors import EmbedDtype
from quire.server.api.writer import Writer
from quire.server.calls.generation import GenerationEvent, GenerationRequest, TruncationSide
from quire.step import Pooling

MAX_INPUTS = 2048


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<lists of tokens>"
    return "<texts>" if isinstance(first, str) else "<tokens>"


class EmbeddingsRequest(ApiRequest):
    """POST /v1/embeddings"""

    ENDPOINT: ClassVar[str] = "/v1/embeddings"
    ID_PREFIX: ClassVar[str] = "embd-"
    FIELDS: ClassVar[Mapping[str, str]] = {"prompt": "input", "text": "input", "token_ids": "input"}
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "messages": "give the text as input",
        "task": "there is one kind of embedding",
        "use_activation": "there is none: use normalize",
        "mm_processor_kwargs": "the model reads text only",
        "chat_template": NO_TEMPLATES,
        "chat_template_kwargs": "give the text as input",
    }

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), Tag("<texts>")]
        | Annotated[list[int], Field(min_length=1), Tag("<tokens>")]
        | Annotated[
            list[list[int]], Field(min_length=1, max_length=MAX_INPUTS), Tag("<lists of tokens>")
        ],
        Discriminator(
            _kind_of_input,
            custom_error_type="embedding_input",
            custom_error_message="Input should be a text, a list of texts, token ids, or a list of lists of token ids",
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    """Keep this many of the first numbers, scaled to length 1 again if they are to have it."""
    normalize: bool = True
    """Vectors have length 1; false: the length that the pooled hidden states have."""
    embed_dtype: EmbedDtype = "float32"
    """Numbers are rounded to this; with base64 they are stored as it, too."""
    endianness: Literal["native", "little", "big"] = "native"
    """The order of the bytes in base64."""
    user: str | None = Field(None, max_length=1024)
    pooling: Pooling = "mean"
    """How a text's hidden states become one vector: their mean, or the last token's."""
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of a text's tokens; -1: as many as fit."""
    truncation_side: TruncationSide | None = None
    """"left" keeps a text's last tokens (so does null), "right" the first."""
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0

    def to_generation(self) -> GenerationRequest:
        params = SamplingParams(
            max_tokens=1, temperature=0, seed=0, cache_salt=self.cache_salt, priority=self.priority
        )
        return GenerationRequest(
            prompts=to_prompts(self.input, self.add_special_tokens),
            params=params,
            endpoint=self.ENDPOINT,
            pooling=self.pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "left",
            fields=self.FIELDS,
            notes=present(user=self.user),
        )

    def check_model_limits(self, hidden_size: int) -> None:
        check_dimensions(self.dimensions, hidden_size)


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    if dimensions is not None and dimensions > hidden_size:
        raise InvalidRequestError(
            "dimensions", f"is {dimensions}; this model's vectors have {hidden_size}"
        )


class EmbeddingWriter(Writer[EmbeddingsRequest]):
    """Vectors as lists of numbers or in base64; there are no streams."""

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        num_tokens = self.call.usage.prompt_tokens
        return {
            "id": self.request_id,
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
