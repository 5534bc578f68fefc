"""From what a client sent to token ids: chat templates, tokenizing, and what tools mean for all
that.

Everything here may take long for a long prompt, and runs in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.reasoning import opens_reasoning
from quire.frontend.resolve import resolve_tokens
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import ToolPlan, ToolSupport
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.server.calls.generation import (
    ChatPrompt,
    GenerationRequest,
    NamedTool,
    Prompt,
    TextPrompt,
)
from quire.server.errors import ContextLengthError
from quire.server.link.messages import Ready

MAX_CHARS = 1024 * 1024
"""Of a text that has to be tokenized to know how long it is."""
_PROBE = 8
"""Characters per token of the context that are tokenized to see whether a text is far too long."""
_SLACK = 64
"""The beginning of a text may have a few tokens more than the whole has there."""
_MOST_TEMPLATE_KWARGS = 256


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt ready for the engine."""

    token_ids: tuple[int, ...]
    text: str | None
    """If it came as text."""
    continues: bool
    """The answer goes on with the prompt's text; in a chat it is a new turn."""
    params: SamplingParams
    resolved: ResolvedTokens
    plan: ToolPlan | None = None
    """For a chat."""
    inside_reasoning: bool = False
    """The prompt ends where the model has begun to think."""
    is_begun: bool = False
    """The prompt ends inside a message of the assistant's: its last one, or one that control tokens
    have begun.
    """
    ignored: tuple[str, ...] = ()
    """Fields that turned out to mean nothing to this model."""
    is_clamped: bool = False
    """`max_tokens` was more than the context has room for; now it is what there is room for."""


class PromptEncoder:
    """Encodes prompts for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tools = ToolSupport(tokenizer)
        self._templates: dict[bool, ChatTemplate] = {}
        self._lock = threading.Lock()
        lengths = (len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        self._longest_token = max(lengths, default=1)

    def encode(self, request: GenerationRequest, prompt: Prompt, limits: Ready) -> EncodedPrompt:
        """Raises InvalidRequestError for what can't be answered."""
        params = request.params
        params.check_token_ids(limits.vocab_size)
        if request.max_context is not None:
            if request.max_context > limits.max_model_len:
                message = f"is {request.max_context}, and the model's context is {limits.max_model_len} tokens"
                raise InvalidRequestError("options.num_ctx", message)
            limits = msgspec.structs.replace(limits, max_model_len=request.max_context)
        truncate = request.truncate_prompt_tokens
        if truncate == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens", "must be -1 or at least 1: nothing would be left"
            )
        field = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if isinstance(prompt, ChatPrompt):
            encoded = self._encode_chat(request, prompt, limits)
        elif isinstance(prompt, TextPrompt):
            if not prompt.text.strip():
                raise InvalidRequestError("prompt", "is empty: it needs some text")
            self._check_length("prompt", prompt.text, limits, truncate is not None)
            ids = self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            encoded = EncodedPrompt(tuple(ids), prompt.text, True, params, ResolvedTokens())
        else:
            if truncate is None:  # what is too long need not be looked at
                _check_context(
                    field, len(prompt.token_ids), params.max_tokens, limits.max_model_len
                )
            _check_ids(prompt.token_ids, limits.vocab_size)
            encoded = EncodedPrompt(prompt.token_ids, None, True, params, ResolvedTokens())
        if truncate is not None:
            room = limits.max_model_len - (params.max_tokens or 1)
            keep = max(1, room) if truncate == -1 else truncate
            if keep < len(encoded.token_ids):  # its text is no longer what is answered
                kept = (
                    encoded.token_ids[-keep:]
                    if request.truncation_side == "left"
                    else encoded.token_ids[:keep]
                )
                encoded = replace(encoded, token_ids=kept, text=None)
        room = limits.max_model_len - len(encoded.token_ids)
        if (
            request.clamp_max_tokens
            and params.max_tokens is not None
            and params.max_tokens > room > 0
        ):
            encoded = replace(
                encoded, params=replace(encoded.params, max_tokens=room), is_clamped=True
            )
        _check_context(
            field, len(encoded.token_ids), encoded.params.max_tokens, limits.max_model_len
        )
        return replace(encoded, resolved=resolve_tokens(encoded.params, self.tokenizer))

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """A chat's tokens alone, for counting."""
        for text in _texts(prompt.messages):
            self.check_size("messages", text)
        return self._render(prompt, self.tools.plan(prompt.messages, prompt.tools))

    def _encode_chat(
        self, request: GenerationRequest, prompt: ChatPrompt, limits: Ready
    ) -> EncodedPrompt:
        for text in _texts(prompt.messages):
            self._check_length("messages", text, limits, request.truncate_prompt_tokens is not None)
        choice = request.tool_choice
        plan = self.tools.plan(
            prompt.messages,
            prompt.tools,
            "auto" if isinstance(choice, NamedTool) else choice,
            choice.name if isinstance(choice, NamedTool) else None,
            request.parallel_tool_calls,
        )
        ids = self._render(prompt, plan)
        if all(not text.strip() for text in _texts(prompt.messages)):
            raise InvalidRequestError("messages", "say nothing: at least one needs some text")
        suffix = plan.suffix(request.params.structured, prompt.continue_final_message)
        is_begun = prompt.continue_final_message or bool(suffix)
        if suffix:
            ids += self.tokenizer.encode(suffix, add_special_tokens=False, allow_special=True)
        inside = self.tools.thinks and opens_reasoning(self.tokenizer, ids)
        params = replace(
            request.params, structured=plan.constrain(request.params.structured, inside, is_begun)
        )
        if plan.needs_special_tokens:
            params = replace(params, skip_special_tokens=False)
        source = self._template(plan.template_tools is not None).source
        unused = [
            f"chat_template_kwargs.{name}"
            for name in prompt.template_kwargs or {}
            if name not in source
        ]
        ignored = [request.fields.get(name, name) for name in (*plan.ignored, *unused)]
        return EncodedPrompt(
            tuple(ids),
            None,
            prompt.continue_final_message,
            params,
            ResolvedTokens(),
            plan,
            inside,
            is_begun,
            tuple(ignored),
        )

    def _render(self, prompt: ChatPrompt, plan: ToolPlan) -> list[int]:
        template = self._template(plan.template_tools is not None)
        if len(prompt.template_kwargs or ()) > _MOST_TEMPLATE_KWARGS:
            raise InvalidRequestError(
                "chat_template_kwargs", f"has more than {_MOST_TEMPLATE_KWARGS} entries"
            )
        if prompt.documents and "documents" not in template.source:
            raise InvalidRequestError(
                "documents", "this model's chat template has no place for them"
            )
        if prompt.continue_final_message and prompt.add_generation_prompt:
            message = "begins no new message: set add_generation_prompt to false"
            raise InvalidRequestError("continue_final_message", message)
        options: dict[str, Any] = {
            "tools": plan.template_tools,
            "documents": prompt.documents,
            "add_generation_prompt": prompt.add_generation_prompt,
            "template_kwargs": prompt.template_kwargs,
        }
        ids = template.encode_chat(self.tokenizer, plan.messages, **options)
        if prompt.continue_final_message:
            return self._reopen(ids, template.render(plan.messages, **options), plan.messages)
        return ids

    def _reopen(
        self, ids: list[int], rendered: str, messages: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Takes away what the template puts behind the last message."""
        content = messages[-1].get("content") if messages else None
        where = (
            rendered.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
        )
        if where < 0 or not isinstance(content, str):
            raise InvalidRequestError("continue_final_message", "needs a last message with text")
        ending = rendered[where + len(content.strip()) :].lstrip()
        end_ids = self.tokenizer.encode(ending, add_special_tokens=False, allow_special=True)
        if not end_ids:
            return ids
        if end_ids[0] not in self.tokenizer.special_token_ids or ids[-len(end_ids) :] != end_ids:
            raise InvalidRequestError(
                "continue_final_message", "is not possible with this model's chat template"
            )
        return ids[: -len(end_ids)]

    def _template(self, for_tools: bool) -> ChatTemplate:
        with self._lock:
            if for_tools not in self._templates:
                self._templates[for_tools] = ChatTemplate.from_tokenizer(self.tokenizer, for_tools)
            return self._templates[for_tools]

    def check_size(self, field: str, text: str) -> None:
        """Refuses what would take too long to tokenize."""
        if len(text) > MAX_CHARS:
            raise InvalidRequestError(
                field, f"has {len(text)} characters; at most {MAX_CHARS} are accepted"
            )

    def _check_length(self, field: str, text: str, limits: Ready, will_be_cut: bool) -> None:
        """What is certainly too long for the context is not worth tokenizing in full."""
        if will_be_cut:
            self.check_size(field, text)
            return
        if len(text) <= _PROBE * limits.max_model_len:
            return
        # Usual text fills the context long before the probe ends; what doesn't may be of very long
        # tokens.
        least = len(self.tokenizer.encode_plain(text[: _PROBE * limits.max_model_len]))
        if least <= limits.max_model_len + _SLACK:
            self.check_size(field, text)
            least = len(text) // self._longest_token
        if least > limits.max_model_len:
            what = f"has at least {least} tokens"
            raise _too_long(field, what, limits.max_model_len, "shorten it or have it truncated")


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The texts in messages and in calls of tools; those that are malformed are found later."""
    for message in messages:
        content = _get(message, "content")
        calls = _get(message, "tool_calls")
        texts = [_get(part, "text") for part in content] if isinstance(content, list) else [content]
        texts += (
            [_get(_get(call, "function"), "arguments") for call in calls]
            if isinstance(calls, list)
            else []
        )
        yield from (text for text in texts if isinstance(text, str))


def _get(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise InvalidRequestError("prompt", "is empty: it needs at least one token")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            "prompt", f"token id {wrong} is out of vocabulary: ids are 0 to {vocab_size - 1}"
        )


def _check_context(field: str, num_prompt: int, max_tokens: int | None, max_model_len: int) -> None:
    if not num_prompt:
        raise InvalidRequestError(field, "is empty: it needs at least one token")
    if num_prompt + 1 > max_model_len:
        what = f"has {num_prompt} tokens and needs room for one more"
        raise _too_long(field, what, max_model_len, "shorten it or have it truncated")
    if max_tokens is not None and num_prompt + max_tokens > max_model_len:
        what = f"is {max_tokens} and the prompt has {num_prompt} tokens"
        raise _too_long(
            "max_tokens",
            what,
            max_model_len,
            "lower it, or shorten the prompt or have it truncated",
        )


def _too_long(field: str, what: str, max_model_len: int, advice: str) -> ContextLengthError:
    return ContextLengthError(
        field, f"{what}, but the model's context is {max_model_len} tokens: {advice}"
    )
