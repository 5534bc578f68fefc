"""POST /tokenize and /detokenize"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.server.api.body import NO_TEMPLATES, Body, body_schema
from quire.server.api.endpoint import cancel_on_disconnect, ignored_header, read_body
from quire.server.calls.generation import ChatPrompt
from quire.server.http_responses import LargeJsonResponse
from quire.server.service import GenerationService, get_service, renamed

router = APIRouter()
_T = TypeVar("_T", bound="TokenizeRequest | DetokenizeRequest")


class TokenizeRequest(Body):
    """POST /tokenize"""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"chat_template": NO_TEMPLATES}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest), tags=["tokens"])
@cancel_on_disconnect
async def tokenize(request: Request) -> Response:
    """The tokens of a text (`prompt`) or of a conversation (`messages`)."""
    body, service = await _read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "give either prompt or messages")
    if body.prompt is not None:
        service.encoder.check_size("prompt", body.prompt)
        ids = await service.in_thread(
            _encode, service.tokenizer, body.prompt, body.add_special_tokens
        )
    else:
        begins = body.add_generation_prompt
        continues = body.continue_final_message
        prompt = ChatPrompt(
            body.messages or [], body.tools, None, body.chat_template_kwargs, begins, continues
        )
        ids = await service.in_thread(service.encoder.encode_chat, prompt)

    def make() -> dict[str, Any]:
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.ready.max_model_len,
            "tokens": ids,
        }
        answer["token_strs"] = None
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.id_to_token(one) for one in ids]
        return answer

    return await service.in_thread(
        LargeJsonResponse.of, make, ignored_header(request.state.ignored)
    )


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest), tags=["tokens"])
@cancel_on_disconnect
async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    body, service = await _read(request, DetokenizeRequest)
    try:
        text = await service.in_thread(
            service.tokenizer.decode, body.tokens, body.skip_special_tokens
        )
    except InvalidRequestError as error:
        raise renamed(error, {"token_ids": "tokens"}) from None
    headers = ignored_header(request.state.ignored)
    return await service.in_thread(LargeJsonResponse.of, lambda: {"prompt": text}, headers)


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Special tokens in a text are text, but a text that is nothing else asks for the id of one:
    lm-eval finds the end of answers by it.
    """
    if not add_special_tokens:
        for token_id, token in tokenizer.added_tokens.items():
            if token.special and token.content == text:
                return [token_id]
    return tokenizer.encode(text, add_special_tokens)


async def _read(request: Request, kind: type[_T]) -> tuple[_T, GenerationService]:
    body = await read_body(request, kind)
    service = get_service(request)
    service.check_model(body.model)
    return body, service
