"""What a request's tools mean for its prompt, its grammar and the reading of its answer, for one
model.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import InvalidRequestError
from quire.frontend import reasoning
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls import (
    deepseek,
    grammars,
    harmony,
    hermes,
    llama3,
    mistral,
    template_needs,
)
from quire.frontend.tool_calls.grammars import CallShape
from quire.frontend.tool_calls.parser import ToolCallParser
from quire.frontend.tool_calls.tools import Tool, check_tools
from quire.sampling_params import StructuredOutput

FormatName = Literal["harmony", "hermes", "llama3", "mistral", "deepseek"]
Choice = Literal["auto", "none", "required"]


def detect_format(template_source: str) -> FormatName | None:
    """The format a chat template teaches; None if it shows tools in one that is not known here."""
    if harmony.is_harmony(template_source):
        return "harmony"
    if deepseek.MARK in template_source:
        return "deepseek"
    if not template_needs.mentions(template_source, "tools"):
        return "hermes"  # the one `describe_tools` teaches
    if mistral.MARK in template_source:
        return "mistral"
    # Qwen3-Coder's is XML
    if hermes.BEGIN in template_source and "<function=" not in template_source:
        return "hermes"
    if llama3.MARK in template_source or (
        "ipython" in template_source and '"parameters"' in template_source
    ):
        return "llama3"
    return None


class ToolSupport:
    """How one model is given tools and how its calls are read. Made once, used by every request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        templates = tokenizer.chat_templates
        self._plain = templates.get("default", "")
        self._source = templates.get("tool_use") or self._plain
        self.format = detect_format(self._source)
        self._special = {
            token.content for token in tokenizer.added_tokens.values() if token.special
        }
        marks = {
            "hermes": hermes.BEGIN,
            "llama3": llama3.MARK,
            "mistral": mistral.MARK,
            "deepseek": deepseek.MARK,
        }
        self.mark = "" if self.format is None else marks.get(self.format, "")
        """What announces a call in this model's text, where a mark does."""
        self.mark_is_special = self.mark in self._special
        """Special tokens are left out of an answer's text and can't be written under a grammar."""
        self.needs_special_mark = self.mark_is_special and self.format != "llama3"
        """A call can't be without its mark; Llama's may be."""
        self.has_channels = self.format == "harmony"
        """Reasoning, calls and content are told apart by what control tokens say, not by tags."""
        self.thinks = not self.has_channels and (
            reasoning.thinks(self._plain) or reasoning.thinks(self._source)
        )
        named = tokenizer.named_tokens
        self._needs = {
            source: template_needs.find_needs(source, named)
            for source in {self._plain, self._source}
            if template_needs.mentions(source, "tool_calls")
        }

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        choice: Choice = "auto",
        name: str | None = None,
        parallel: bool = True,
    ) -> ToolPlan:
        """`name` is the one tool that must be called; else `choice` counts. For chats without tools
        too: earlier calls in `messages` may have to be written out.
        """
        checked = check_tools(tools or ())
        if name is not None and name not in (tool.name for tool in checked):
            raise InvalidRequestError("tool_choice", f"names {name!r}, which is none of the tools")
        if not checked and (choice == "required" or name is not None):
            raise InvalidRequestError(
                "tool_choice", "needs tools to choose from: give some in `tools`"
            )
        without = not checked or (choice == "none" and name is None)
        source = self._plain if without else self._source
        if source in self._needs:
            messages = self._needs[source].suit_messages(messages)
        elif source:
            messages = template_needs.write_out_calls(messages)
        if without:
            return ToolPlan(self, messages, None, (), forced=False, parallel=parallel)
        if self.format is None:
            raise InvalidRequestError(
                "tools", "this model's chat template writes calls in a format not known here"
            )
        if not template_needs.mentions(source, "tools"):
            example = (
                deepseek.example(source) if self.format == "deepseek" else template_needs.EXAMPLE
            )
            messages, tools = template_needs.describe_tools(messages, tools or (), example), None
        elif source in self._needs and tools:
            tools = self._needs[source].suit_tools(tools)
        callable_tools = [tool for tool in checked if name is None or tool.name == name]
        forced = name is not None or choice == "required"
        return ToolPlan(
            self, messages, tools, tuple(callable_tools), forced, parallel and name is None
        )

    def shape(self, forced: bool) -> CallShape:
        """How calls are written; `forced`: behind a prompt that ends with the mark, if that is a
        special token.
        """
        lead = "" if forced and self.needs_special_mark else self.mark
        if self.format == "llama3":
            needs = self._needs.get(self._source)
            several = needs is None or not needs.one_call
            return CallShape("", '{"name": "NAME", "parameters": ', "}", "; ", "", several)
        if self.format == "mistral" and mistral.ARGUMENTS_MARK in self._source:
            middle = "" if mistral.ARGUMENTS_MARK in self._special else mistral.ARGUMENTS_MARK
            return CallShape("", f"{lead}NAME{middle}", "", "", "", several=bool(lead))
        if self.format == "mistral":
            space = "" if f"{mistral.MARK}[" in self._source else " "
            return CallShape(f"{lead}{space}[", '{"name": "NAME", "arguments": ', "}", ", ", "]")
        if self.format == "deepseek":
            begin, end, between, after = (
                deepseek.FENCED if deepseek.is_fenced(self._source) else deepseek.BARE
            )
            return CallShape(lead, begin, end, between, after)
        end = "}" if hermes.END in self._special else "}\n" + hermes.END
        return CallShape(
            "", f'{lead}\n{{"name": "NAME", "arguments": ', end, "\n", "", several=bool(lead)
        )


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """One request's tools."""

    support: ToolSupport
    messages: Sequence[Mapping[str, Any]]
    """What the chat template is given."""
    template_tools: Sequence[Mapping[str, Any]] | None
    """What the chat template is given as tools."""
    tools: tuple[Tool, ...]
    """Those that can be called; none if the answer is to be plain text."""
    forced: bool
    parallel: bool

    def suffix(self, structured: StructuredOutput | None, continues: bool = False) -> str:
        """Control tokens to put behind the prompt: a required call begins there, or an answer in a
        form that no grammar can have follow reasoning. `continues`: the prompt ends inside a
        message already.
        """
        if self.support.has_channels:
            is_alone = (
                structured is not None and not self.tools and not grammars.can_follow(structured)
            )
            return harmony.FINAL if is_alone and not continues else ""
        return self.support.mark if self.forced and self.support.needs_special_mark else ""

    @property
    def needs_special_tokens(self) -> bool:
        """The answer's text must hold special tokens, or its parts can't be told."""
        return self.support.has_channels or (bool(self.tools) and self.support.mark_is_special)

    @property
    def special_mark(self) -> str:
        """What the parser wants to see before each special token."""
        return harmony.SPECIAL_MARK if self.support.has_channels else ""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields that could not be honoured: `strict` where a grammar can't follow the model's own
        calls.
        """
        unheeded = (
            not self.forced
            and self.support.needs_special_mark
            and any(tool.strict for tool in self.tools)
        )
        return ("tools.function.strict",) if unheeded else ()

    def constrain(
        self,
        structured: StructuredOutput | None,
        inside_reasoning: bool = False,
        is_begun: bool = False,
    ) -> StructuredOutput | None:
        """The form the whole answer must take, given the one that its content is to have.

        `inside_reasoning`: the prompt ends inside the model's reasoning, which then comes first.
        `is_begun`: it ends inside a message, or behind the `suffix`.
        """
        if self.support.has_channels:
            return self._constrain_channels(structured, is_begun)
        if self.tools and self.forced:
            shape = self.support.shape(forced=True)
            return grammars.forced_calls(shape, self.tools, self.parallel, inside_reasoning)
        if self.tools and structured is not None:
            if self.support.needs_special_mark or not grammars.is_json(structured):
                raise InvalidRequestError(
                    "tools",
                    "can't be combined with this form of structured output: choose one, or `tool_choice`",
                )
            shape = self.support.shape(forced=False)
            return grammars.calls_or_answer(
                shape, self.tools, self.parallel, structured, inside_reasoning
            )
        if structured is not None:
            return grammars.after_reasoning(structured) if inside_reasoning else structured
        if any(tool.strict for tool in self.tools) and not self.support.needs_special_mark:
            shape = self.support.shape(forced=False)
            if self.support.format == "llama3":
                return grammars.calls_or_text(shape, self.tools, self.parallel)
            return grammars.calls_in_text(shape, self.support.mark, self.tools)
        return None

    def _constrain_channels(
        self, structured: StructuredOutput | None, is_begun: bool
    ) -> StructuredOutput | None:
        if self.tools and (
            (is_begun and self.forced)
            or not (structured is None or self.forced or grammars.can_follow(structured))
        ):
            why = "can't be combined with this form of structured output or with a message that was begun"
            raise InvalidRequestError("tools", why)
        if is_begun or not (
            structured is not None or self.forced or any(tool.strict for tool in self.tools)
        ):
            return structured
        return grammars.in_channels(self.tools, self.forced, structured)

    def explain(self, message: str) -> str:
        """What the error of a grammar that `constrain` made says to whoever wrote the tools."""
        first = message.removeprefix("structured.grammar: ").partition("\n")[0]
        return re.sub(r"^(at )?\d+\(\d+\): ", "", first)

    def new_parser(self, is_begun: bool = False) -> ToolCallParser | None:
        """Reads one answer; None if its text is all content. `is_begun` as in `constrain`."""
        if self.support.has_channels:
            return harmony.HarmonyParser((tool.name for tool in self.tools), is_begun)
        if not self.tools:
            return None
        after_mark = bool(self.suffix(None))
        if self.support.format == "mistral":
            return mistral.MistralParser(after_mark)
        if self.support.format == "deepseek":
            return deepseek.DeepSeekParser(after_mark)
        if self.support.format == "llama3":
            return llama3.Llama3Parser((tool.name for tool in self.tools), self.forced)
        return hermes.HermesParser(after_mark)

    def new_call_id(self) -> str:
        """Unique; Mistral's templates insist on nine letters and digits."""
        if self.support.format == "mistral":
            return "".join(
                secrets.choice(template_needs.ALPHANUMERIC) for _ in range(template_needs.ID_LENGTH)
            )
        return f"call_{secrets.token_hex(12)}"
