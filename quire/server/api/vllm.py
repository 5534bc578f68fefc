"""What vLLM's users and SageMaker ask for beside the APIs: /ping, /load, /server_info, /invocations
and /v1/chat/completions/batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from quire import __version__
from quire.errors import InvalidRequestError
from quire.server.api.body import MAX_MESSAGES, Body
from quire.server.api.chat import ChatCompletionRequest, ChatWriter
from quire.server.api.completions import MAX_PROMPTS, CompletionRequest, CompletionWriter
from quire.server.api.embeddings import EmbeddingsRequest, EmbeddingWriter
from quire.server.api.endpoint import answer, cancel_on_disconnect, convert, endpoint, parse_body
from quire.server.api.information import health
from quire.server.api.writer import prompt_logprobs_body
from quire.server.calls.generation import GenerationEvent, GenerationRequest
from quire.server.errors import ApiError
from quire.server.http_responses import JsonResponse
from quire.server.service import get_service


class BatchedChatRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch: vLLM's way to ask for answers to several conversations at
    once.
    """

    ENDPOINT: ClassVar[str] = "/v1/chat/completions/batch"
    messages: list[
        Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    ] = Field(  # type: ignore[assignment]
        min_length=1, max_length=MAX_PROMPTS
    )
    """Conversations."""

    def conversations(self) -> list[list[dict[str, Any]]]:
        return self.messages

    def to_generation(self) -> GenerationRequest:
        for field, value in (("stream", self.stream), ("tools", self.tools)):
            if value:
                raise InvalidRequestError(
                    field, "is not supported for batches: use /v1/chat/completions"
                )
        return super().to_generation()


class BatchedChatWriter(ChatWriter):
    """One choice for each conversation, in their order. What is said of a prompt is said with its
    choice.
    """

    STREAMS = False

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        body = self.body
        call = self.call
        whole = super().whole(events)
        del whole["prompt_logprobs"], whole["prompt_token_ids"]
        for choice in whole["choices"]:
            number = choice["index"] // call.request.params.n
            if body.prompt_logprobs is not None:
                found = call.prompt_logprobs(number)
                choice["prompt_logprobs"] = prompt_logprobs_body(found, body.prompt_logprobs)
            if body.return_token_ids:
                choice["prompt_token_ids"] = call.prompts[number].token_ids
        return whole


router = endpoint(
    BatchedChatRequest,
    BatchedChatWriter,
    "create_chat_batch",
    "Answers to several conversations.",
    "vLLM",
)
_APIS = {
    "messages": (ChatCompletionRequest, ChatWriter),
    "prompt": (CompletionRequest, CompletionWriter),
    "input": (EmbeddingsRequest, EmbeddingWriter),
}
"""By the field that only one of them has."""


@router.api_route("/ping", methods=["GET", "POST"], tags=["vLLM"])
async def ping(request: Request) -> Response:
    """The same as /health."""
    return await health(request)


@router.get("/load", tags=["vLLM"])
async def load(request: Request) -> Response:
    """How many answers are being computed or wait."""
    return JsonResponse({"server_load": get_service(request).admission.num_answers})


@router.get("/server_info", tags=["vLLM"])
async def server_info(request: Request) -> Response:
    """The settings that clients may want to know: none that says where something lies, and no keys."""
    service = get_service(request)
    config = service.config
    ready = service.ready
    settings: Mapping[str, Any] = {
        "served_model_names": config.model_names,
        "max_model_len": ready.max_model_len,
        "max_num_seqs": ready.max_num_seqs,
        "block_size": ready.block_size,
        "num_blocks": ready.num_blocks,
        "bytes_per_block": ready.bytes_per_block,
        "vocab_size": ready.vocab_size,
        "hidden_size": ready.hidden_size,
        "policy": ready.policy,
        "system_fingerprint": ready.fingerprint,
        "max_queued_requests": config.max_queued_requests,
        "max_queued_tokens": config.max_queued_tokens,
        "request_seconds": config.request_seconds,
        "queue_seconds": config.queue_seconds,
    }
    return JsonResponse({"version": __version__, "config": settings})


@router.post("/invocations", tags=["vLLM"])
@cancel_on_disconnect
async def invocations(request: Request) -> Response:
    """SageMaker's one address for all: what is asked for is told by the field `messages`, `prompt`
    or `input`.
    """
    fields = (await convert(request, parse_body, await request.body(), Body)).model_extra or {}
    for name, (kind, writer) in _APIS.items():
        if name in fields:
            return await answer(request, kind, writer)  # type: ignore[arg-type]
    message = (
        "the body needs messages (a chat), prompt (a text to continue) or input (a text to embed)"
    )
    raise ApiError(400, message, code="missing_required_parameter")
