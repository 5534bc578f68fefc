"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from quire.cli import options
from quire.cli.option_groups import FileOptions, with_groups
from quire.cli.run import details
from quire.cli.start import check_can_chat, open_llm, say_started
from quire.cli.terminal import WrappedText, input_prompt, say
from quire.config import cache_dir
from quire.errors import InvalidRequestError, QuireError, reason
from quire.field_checks import Flag, Number, parameters
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

_SETTABLE = {
    name: line.values
    for name, line in parameters(SamplingParams).items()
    if line.cli and isinstance(line.values, Number | Flag)
}
_HELP = """\
/reset            forget the conversation
/system [TEXT]    show or set the system message (and start over)
/params [K=V]...  show or set sampling, such as temperature=0.5
/regenerate       another answer to the last message
/undo             forget the last message and its answer
/save FILE        write the conversation as JSON
/stats            what the last answer cost
/help             this list
/quit             leave (as does Ctrl-D)
A line that ends in \\ goes on in the next; \"\"\" begins and ends a text of many lines.
Ctrl-C stops the answer, not the program."""


@with_groups
def chat(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    prompt: Annotated[
        str | None,
        Option("--prompt", "-p", metavar="TEXT", help="The first message; then it is your turn."),
    ] = None,
    sampling: options.SamplingOptions = options.SamplingOptions(max_tokens=512),  # noqa: B008
    engine: options.EngineOptions = options.EngineOptions(),  # noqa: B008
    settings: FileOptions = FileOptions(),  # noqa: B008
    system: options.System = None,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model. /help lists what you can type besides messages.

    \b
    quire chat
    quire chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
    quire chat --prompt "Tell me a story." --temperature 1 --stop "The end"
    """
    sampling.params()  # wrong ones: before a model is loaded
    check_can_chat(model)
    began = time.monotonic()
    with open_llm(model, **engine.keywords()) as llm:
        say_started(llm, began, verbose)
        say("/help for commands, /quit to leave")
        params = sampling.params(llm.sampling_defaults)
        conversation = Conversation(llm, params, system, verbose)
        if prompt is not None:
            say(f"> {prompt}")
            conversation.answer(prompt)
        conversation.loop()


class Conversation:
    """The messages so far and how to go on from them."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, verbose: bool = False
    ) -> None:
        # a command that only shows its help does without
        from quire.cli.channels import ChannelReader
        from quire.frontend.tool_calls import ToolSupport

        tokenizer = llm.engine.tokenizer
        self._llm = llm
        self._new_reader = partial(ChannelReader, tokenizer, ToolSupport(tokenizer))
        self._params = params
        self._system = system
        self._verbose = verbose
        self._messages: list[dict[str, str]] = []
        self._last: RequestOutput | None = None
        self.reset()

    def reset(self) -> None:
        self._messages = (
            [] if self._system is None else [{"role": "system", "content": self._system}]
        )

    def loop(self) -> None:
        """Reads and answers until the end of input or /quit."""
        while True:
            try:
                text = read_message()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                say("\n(/quit or Ctrl-D to leave)")
                continue
            if text.startswith("/"):
                if self.command(text) == "quit":
                    return
            elif text.strip():
                self.answer(text)

    def answer(self, text: str) -> None:
        """Streams the answer; on Ctrl-C what was said so far stays in the conversation."""
        self._messages.append({"role": "user", "content": text})
        reader, shown = self._new_reader(), WrappedText()
        try:
            request_id = self._llm.add_chat_request(self._messages, self._params)
        except QuireError as error:
            self._messages.pop()
            say(f"error: {error}. /reset starts over.")
            return
        with noticing_interrupts() as interrupted:
            while self._llm.has_work:
                if interrupted.is_set():
                    self._llm.abort(request_id)
                for delta in map(reader.read, self._llm.step()):
                    shown.write(delta.text)
                    self._last = delta.output or self._last
        shown.close()
        if self._last is not None and self._last.finish_reason == "error":
            say(f"error: {self._last.error}")
        if self._verbose and self._last is not None:
            say(details([self._last]))
        self._messages.append({"role": "assistant", "content": reader.content})

    def command(self, line: str) -> str | None:
        """Carries out a /command; returns "quit" for that one."""
        name, _, rest = line[1:].partition(" ")
        if name in ("quit", "exit", "q"):
            return "quit"
        if name == "reset":
            self.reset()
            say("starting over")
        elif name == "system":
            if rest.strip():
                self._system = rest.strip()
                self.reset()
            say(f"system message: {self._system or '(none)'}")
        elif name == "params":
            self._set_params(rest.split())
        elif name == "regenerate":
            self._regenerate()
        elif name == "undo":
            say("forgotten" if self._undo() is not None else "there is nothing to undo")
        elif name == "save":
            self._save(rest.strip())
        elif name == "stats":
            self._show_stats()
        elif name == "help":
            say(_HELP)
        else:
            say(f"there is no /{name}; /help lists what there is")
        return None

    def _undo(self) -> str | None:
        """Forgets the last message of the user and what came after it; returns the message."""
        for place in reversed(range(len(self._messages))):
            if self._messages[place]["role"] == "user":
                text = self._messages[place]["content"]
                del self._messages[place:]
                return text
        return None

    def _regenerate(self) -> None:
        text = self._undo()
        if text is None:
            say("there is no message to answer")
            return
        # The same seed would give the same answer.
        seed = self._params.seed
        self._params = dataclasses.replace(self._params, seed=0 if seed is None else seed + 1)
        self.answer(text)

    def _save(self, file: str) -> None:
        if not file:
            say("error: /save needs the name of a file")
            return
        try:
            path = Path(file).expanduser()
            path.write_text(json.dumps({"messages": self._messages}, ensure_ascii=False, indent=1))
        except OSError as error:
            say(f"error: {file} can't be written: {reason(error)}")
        else:
            say(f"saved to {path}")

    def _set_params(self, settings: list[str]) -> None:
        changes: dict[str, Any] = {}
        try:
            for setting in settings:
                name, equals, value = setting.partition("=")
                if not equals or name not in _SETTABLE:
                    raise InvalidRequestError(
                        setting, f"should be NAME=VALUE with one of {', '.join(_SETTABLE)}"
                    )
                changes[name] = _parse(name, value)
            self._params = dataclasses.replace(self._params, **changes)
        except InvalidRequestError as error:
            say(f"error: {error}")
        say("  ".join(f"{name}={getattr(self._params, name)}" for name in _SETTABLE))

    def _show_stats(self) -> None:
        if self._last is None:
            say("no answer yet")
            return
        metrics = self._last.metrics
        total = metrics.finished - metrics.arrival
        lines = [
            f"prompt {metrics.num_prompt_tokens} tokens, {metrics.cached_tokens} of them from the cache",
            f"answer {metrics.num_output_tokens} tokens in {total:.2f} s, ended by {self._last.finish_reason}",
        ]
        if metrics.time_to_first_token is not None:
            lines.append(f"first token after {metrics.time_to_first_token:.3f} s")
        if metrics.time_per_output_token:
            lines.append(f"then {1 / metrics.time_per_output_token:.1f} tokens/s")
        say("\n".join(lines))


@contextlib.contextmanager
def noticing_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event instead of breaking into the step that is being computed; a second one
    breaks in.
    """
    interrupted = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
        # Not `say`: a handler may come in the midst of what writes.
        os.write(2, b"\n(stopping the answer; Ctrl-C again leaves the program)\n")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def read_message() -> str:
    """A message from the terminal: a line, lines joined by a trailing backslash, or lines between
    triple quotes.
    """
    line = _read_line("> ")
    if line.strip().startswith('"""'):
        lines = [line.strip()[3:]]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(_read_line(". "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_read_line(". "))
    return "\n".join(lines)


def _read_line(prompt: str) -> str:
    if sys.stdin.isatty():
        with _history():
            return input(input_prompt(prompt))
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Gives input() editing, and what was typed in sessions before; keeps what is typed now."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = cache_dir() / "chat_history"
    if not readline.get_current_history_length():
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def _parse(name: str, value: str) -> Any:
    values = _SETTABLE[name]
    if isinstance(values, Flag):
        return {"true": True, "false": False}.get(
            value.lower(), value
        )  # the check says what it must be
    assert isinstance(values, Number)
    try:
        return values.kind(value)
    except ValueError:
        raise InvalidRequestError(name, f"must be a number, not {value!r}") from None
