"""Chat messages to the prompt a model was trained on, through the template that came with the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

import jinja2

from quire.errors import InvalidRequestError, TemplateError
from quire.frontend import template_sandbox as sandbox
from quire.frontend.call_form import CallForm, find_call_form
from quire.frontend.control_tokens import ControlTokens, Placeholders, holds
from quire.frontend.earlier_reasoning import named_thinking, says_thinking
from quire.frontend.messages import ROLES, Message, check_list, check_messages, plain_data
from quire.frontend.template_limits import TemplateLimitError, limited
from quire.frontend.tokenizer import Tokenizer

_MAX_SOURCE = 1024 * 1024
# The fields of an assistant's message that the model wrote token by token.
_OWN_WORDS = ("content", "reasoning", "reasoning_content", "thinking")
_PROBE = "what is said in this role"
_MOST_OWN_ROLES = 64


class ChatOptions(TypedDict, total=False):
    """What a template may be given beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    """Whether the prompt ends with the beginning of an answer; it does if nothing is said."""
    template_kwargs: Mapping[str, Any] | None


class ChatTemplate:
    """One model's chat template, compiled once and then used for every request.

    `render` gives the text, exactly as transformers would. `encode_chat` gives the token ids, equal
    to those of transformers as long as no string of the request holds a control token's text; where
    one does, that text is encoded as plain text (see `control_tokens.py`).
    """

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template is longer than {_MAX_SOURCE} characters")
        self.source = source
        self._named_tokens = dict(named_tokens or {})
        self._knows_developer = "developer" in source
        self._says_thinking = says_thinking(source)
        self._kept: tuple[Tokenizer, ControlTokens] | None = None
        self._call_form: CallForm | None = None
        self._own_roles: set[str] = set()
        """Roles of clients' own that the template is known to show."""
        try:
            self._template = sandbox.BoundedEnvironment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template, line {error.lineno}: {error.message}"
            ) from None
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise TemplateError(
                f"the chat template can't be compiled: {type(error).__name__}"
            ) from None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, for_tools: bool = False) -> ChatTemplate:
        """The model's own template: for requests with tools its `tool_use` one, if it has such a
        one.
        """
        templates = tokenizer.chat_templates
        source = (templates.get("tool_use") if for_tools else None) or templates.get("default")
        if source is None:
            raise TemplateError(
                "this model has no chat template; give it a raw prompt instead of messages (--raw on the command line)"
            )
        return cls(source, tokenizer.named_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """The prompt as text. To look at: never encode it with special tokens allowed; see
        `encode_chat`.
        """
        return self._render(self._check(messages, options), options)

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """The prompt as token ids, in which every control token is the template's own."""
        request = self._check(messages, options)
        control = self._control_tokens(tokenizer)
        if not holds(request, control.pattern):
            rendered = self._render(request, options)
            return tokenizer.encode(rendered, add_special_tokens=False, allow_special=True)
        placeholders = Placeholders(control, request, self.source)
        hidden = {
            name: placeholders.hide(value, control.pattern) for name, value in request.items()
        }
        for index, message in enumerate(request["messages"]):
            for name in _OWN_WORDS if message["role"] == "assistant" else ():
                if name in message:
                    hidden["messages"][index][name] = placeholders.hide(
                        message[name], control.special_pattern
                    )
        rendered = self._render(hidden, options)
        # Stretches with placeholders are encoded as plain text, everything between two of them in
        # one go.
        ids: list[int] = []
        done = 0
        for start, end in control.stretches(rendered):
            restored = placeholders.restore(rendered[start:end])
            if restored is not None:
                ids += tokenizer.encode(
                    rendered[done:start], add_special_tokens=False, allow_special=True
                )
                ids += tokenizer.encode_plain(*restored, continues=start > 0)
                done = end
        return ids + tokenizer.encode(rendered[done:], add_special_tokens=False, allow_special=True)

    def _control_tokens(self, tokenizer: Tokenizer) -> ControlTokens:
        """The same for every request of a tokenizer, so the last answer is kept."""
        kept = self._kept
        if kept is None or kept[0] is not tokenizer:
            kept = self._kept = (
                tokenizer,
                ControlTokens(tokenizer.added_tokens.values(), self.source),
            )
        return kept[1]

    def _form_of_calls(self) -> CallForm:
        """Found when the first calls are to be shown."""
        if self._call_form is None:
            nothing = {"tools": None, "documents": None}
            self._call_form = find_call_form(
                lambda trial: self._render({"messages": trial, **nothing}, {})
            )
        return self._call_form

    def _check(self, messages: object, options: ChatOptions) -> dict[str, Any]:
        checked = check_messages(messages, self._knows_developer)
        if self._says_thinking:
            checked = named_thinking(checked)
        self._check_roles(checked)
        if any("tool_calls" in message for message in checked):
            checked = self._form_of_calls().suit(checked)
        request = {
            "messages": checked,
            "tools": check_list(options.get("tools"), "tools"),
            "documents": check_list(options.get("documents"), "documents"),
        }
        extra = plain_data(options.get("template_kwargs") or {}, "chat_template_kwargs")
        if not isinstance(extra, dict):
            raise InvalidRequestError("chat_template_kwargs", "must be an object")
        for name in extra:
            if name in request or name in self._named_tokens or name == "add_generation_prompt":
                raise InvalidRequestError(f"chat_template_kwargs.{name}", "is set by Quire itself")
        return request | extra

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Refuses a role of the client's own where the template would leave out what is said in it."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role in ROLES or role in self._own_roles:
                continue
            trial = [{"role": "user", "content": "a"}, {"role": role, "content": _PROBE}]
            try:
                is_shown = _PROBE in self._render(
                    {"messages": trial, "tools": None, "documents": None}, {}
                )
            except TemplateError:
                is_shown = False
            if not is_shown:
                why = "this model's chat template leaves out messages of it"
                raise InvalidRequestError(
                    f"messages[{index}].role", f"{role!r} is not supported: {why}"
                )
            if len(self._own_roles) < _MOST_OWN_ROLES:
                self._own_roles.add(role)

    def _render(self, request: Mapping[str, Any], options: ChatOptions) -> str:
        begins_answer = options.get("add_generation_prompt", True)
        variables = {**self._named_tokens, **request, "add_generation_prompt": begins_answer}
        try:
            with limited():
                return sandbox.concat(self._template.generate(variables), "prompt")
        except sandbox.TemplateRefusalError as error:
            raise TemplateError(f"the chat template refused the messages: {error}") from None
        except TemplateLimitError as error:
            raise TemplateError(f"the chat template was stopped: it {error}") from None
        except RecursionError:
            raise TemplateError(
                "the chat template was stopped: it calls itself too deeply"
            ) from None
        except Exception as error:  # a template can fail in any way its expressions can
            raise TemplateError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from None


class ChatTemplates:
    """A tokenizer's chat templates, compiled when they are first used: models may have one of their
    own for tools.
    """

    def __init__(self) -> None:
        self._compiled: dict[bool, ChatTemplate] = {}

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        """The prompt a conversation becomes."""
        for_tools = tools is not None
        if for_tools not in self._compiled:
            self._compiled[for_tools] = ChatTemplate.from_tokenizer(tokenizer, for_tools)
        return self._compiled[for_tools].encode_chat(tokenizer, messages, tools=tools)
