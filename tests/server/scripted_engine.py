"""An engine process without a model: it starts at once and gives made-up tokens, so that every
fault can be tried at every phase. The file named by QUIRE_TEST_FAULT says what it does next:
`loading` (goes on loading), `slow 0.1` (takes so many seconds for a step), `exit`, `fatal`, `hang`,
`nonsense`. A prompt of more than LONG_PROMPT tokens has no answer before the file says `release`.
`say 5 7 9` has every answer consist of these tokens, of which the last ends it. QUIRE_TEST_CONTEXT
is the longest a request may be, in tokens.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

from quire.observe.step_log import StepSummary
from quire.process.child import end_with_parent, ignore_terminal_signals
from quire.server.link import messages
from quire.server.link.channel import BlockingChannel
from quire.step import RequestMetrics, RequestUpdate, TokenLogprob

LONG_PROMPT = 50
PAUSE = 20
"""Milliseconds between two tokens, if it is told nothing else."""


class ScriptedEngine:
    """Speaks the engine's part."""

    def __init__(self, channel: BlockingChannel) -> None:
        self._order = Path(os.environ["QUIRE_TEST_FAULT"])
        self._channel = channel
        self._running: dict[str, messages.AddRequest] = {}
        self._counts: dict[str, int] = {}
        self._scripts: dict[str, list[int]] = {}

    def run(self) -> None:
        self._send(messages.Loading())
        self._order.with_suffix(".here").write_text(str(os.getpid()))
        while self._obey() == "loading":
            time.sleep(PAUSE / 1000)
        context = int(os.environ.get("QUIRE_TEST_CONTEXT", "1024"))
        self._send(messages.Ready(10_000, 8, context, 16, 64, 16, "fcfs", "fp"))
        had_work = False
        while True:
            out = messages.Updates(num_free_blocks=64)
            order = self._obey()
            pause = 1000 * float(order.partition(" ")[2]) if order.startswith("slow") else PAUSE
            if not self._running:
                self._channel.flush()  # what a reader that lagged has left
                self._channel.wait(PAUSE / 1000)
            elif not self._scripts:
                time.sleep(pause / 1000)
            while (data := self._channel.receive(0.0)) is not None:
                self._take(messages.decode_command(data), out)
                had_work = True
            for name, request in list(self._running.items()):
                if name in self._scripts:
                    out.add_updates([self._say(name, request, self._scripts[name])])
                elif len(request.prompt_token_ids) <= LONG_PROMPT or order == "release":
                    out.add_updates([self._advance(name, request)])
            if self._running or had_work:
                out.steps = [StepSummary(0, 0.0, 0, 0, 0, len(self._running), 64, 0, 0.0)]
                self._send(out)
            had_work = bool(self._running)

    def _take(self, command: messages.Command, out: messages.Updates) -> None:
        if isinstance(command, messages.AddRequest):
            n = command.params.get("n", 1)
            names = (
                [command.request_id] if n == 1 else [f"{command.request_id}/{i}" for i in range(n)]
            )
            if command.resume is not None:
                names = list(command.resume.outputs)
            self._counts.update(dict.fromkeys(names, 0))
            if command.resume is not None:  # it counts on where another one was
                self._counts.update(
                    {name: len(tokens) for name, tokens in command.resume.outputs.items()}
                )
            self._running.update(dict.fromkeys(names, command))
            order = self._order.read_text() if self._order.exists() else ""
            if order.startswith("say"):
                self._scripts.update({name: list(map(int, order.split()[1:])) for name in names})
            out.accepted.append(command.request_id)
            out.started.extend(names)
        elif isinstance(command, messages.Abort):
            for name, request in list(self._running.items()):
                if request.request_id in command.request_ids:
                    del self._running[name]
        elif isinstance(command, messages.End):
            self._running.pop(command.name, None)
        elif isinstance(command, messages.Describe):
            self._send(messages.Described(command.ticket, {"request_id": command.request_id}))

    def _advance(self, name: str, request: messages.AddRequest) -> RequestUpdate:
        self._counts[name] += 1
        count = self._counts[name]
        if count < request.params.get("max_tokens", 16) and request.pooling is None:
            return RequestUpdate(name, (count,))
        del self._running[name]
        metrics = RequestMetrics(
            name, 0.0, 0.0, 0.0, 1.0, len(request.prompt_token_ids), count, 0, 0, 0, 0
        )
        if request.pooling is not None:
            return RequestUpdate(name, (), "stop", metrics=metrics, pooled=b"\0" * 32)
        return RequestUpdate(name, (count,), "length", metrics=metrics)

    def _say(self, name: str, request: messages.AddRequest, script: list[int]) -> RequestUpdate:
        """Two more tokens of the script."""
        begin = self._counts[name]
        most = request.params.get("max_tokens") or len(script)
        tokens = tuple(script[begin : min(begin + 2, most)])
        self._counts[name] = count = begin + len(tokens)
        is_scored = request.params.get("logprobs") is not None
        scores = tuple(TokenLogprob(token, -1.0, 1, ()) for token in tokens) if is_scored else ()
        if count < min(most, len(script)):
            return RequestUpdate(name, tokens, logprobs=scores)
        del self._running[name], self._scripts[name]
        metrics = RequestMetrics(
            name, 0.0, 0.0, 0.0, 1.0, len(request.prompt_token_ids), count, 0, 0, 0, 0
        )
        if count < len(script):
            return RequestUpdate(name, tokens, "length", metrics=metrics, logprobs=scores)
        return RequestUpdate(
            name, tokens, "stop", stop_token_id=tokens[-1], metrics=metrics, logprobs=scores
        )

    def _obey(self) -> str:
        order = self._order.read_text() if self._order.exists() else ""
        if order in ("exit", "fatal", "hang", "nonsense"):
            self._order.unlink()  # not to be obeyed again by the next one
        match order:
            case "exit":
                os._exit(3)
            case "fatal":
                self._send(messages.Fatal("it can't go on"))
                time.sleep(0.1)
                os._exit(1)
            case "hang":
                time.sleep(600)
            case "nonsense":
                self._channel.send_bytes(b"\xc1")
        return order

    def _send(self, event: messages.Event) -> None:
        self._channel.send(event)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    ignore_terminal_signals()
    end_with_parent()
    channel = BlockingChannel.to_parent()
    channel.receive()
    ScriptedEngine(channel).run()
