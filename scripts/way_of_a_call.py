"""Which files of the server a streamed call crosses: `python scripts/way_of_a_call.py`.

A server with one engine and no other HTTP processes answers one streamed call, and `sys.setprofile`
sees every function that is called in both of its processes.

The rule: on its way down the request changes its form and its process (its bytes come and are read,
they become a checked body, a request of any API, tokens, a message, bytes in a socket; in the
engine's process a message again, requests of the engine, which its core takes). A function of
`quire/server` is on the way if it is on the call stack at one of these moments. So is it on the way
up, where a token in the middle of an answer leaves the engine in a message and becomes text, an
event's bytes, and bytes in the client's connection. What else is called meanwhile (limits, metrics,
records, fields of a body) is asked in passing: it returns before the request goes on. Those
functions are counted apart.

Where a process is left or a form made is told by functions of others (uvicorn, pydantic, msgspec,
asyncio, `quire/frontend`, `quire/engine`), so nothing here knows how the server is divided.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SERVER = f"{ROOT}/quire/server/"
_VARIABLE = "QUIRE_WAY_FOLDER"
_NUM_TOKENS = 64
_OPTIONS = {"stream": True, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "temperature": 0}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is a quire?"}],
        **_OPTIONS,
    },
    "/v1/completions": {"prompt": "A quire is", **_OPTIONS},
}
_MIDDLE = (6, 16)
"""Between the arrivals of these events only tokens in the middle are on their way."""
_PATIENCE = 120.0
_LOOP = "asyncio/events.py"
"""Where stacks begin: whoever runs the loop is not on the way of what happens in it."""
_C_FUNCTIONS = ("encode", "decode", "json_encode", "send", "recv")


class Moment(NamedTuple):
    """When a request, or what came of it, takes another form or changes its process."""

    name: str
    function: str
    """As Python calls it."""
    where: str
    """The end of its file, or the library whose C function it is."""


DOWN_HTTP = (
    Moment("its bytes come", "on_body", "uvicorn/protocols/http/httptools_impl.py"),
    Moment("they are read", "receive", "uvicorn/protocols/http/httptools_impl.py"),
    Moment("a checked body", "model_validate", "pydantic/main.py"),
    Moment("a request of any API", "GenerationRequest", "dataclass"),
    Moment("tokens", "encode", "quire/frontend/tokenizer.py"),
    Moment("a message", "Encoder.encode", "msgspec"),
    Moment("bytes in a socket", "write", "asyncio/selector_events.py"),
)
DOWN_ENGINE = (
    Moment("bytes from a socket", "socket.recv", "socket"),
    Moment("a message again", "Decoder.decode", "msgspec"),
    Moment("requests of the engine", "make_requests", "quire/engine/request.py"),
    Moment("the core takes them", "add_requests", "quire/engine/core.py"),
)
UP_ENGINE = (
    Moment("a step's tokens in a message", "Encoder.encode", "msgspec"),
    Moment("bytes in a socket", "socket.send", "socket"),
)
UP_HTTP = (
    Moment("bytes from a socket", "data_received", "quire/server"),
    Moment("a message again", "Decoder.decode", "msgspec"),
    Moment("text", "push", "quire/frontend/detokenizer.py"),
    Moment("an event's bytes", "json_encode", "msgspec"),
    Moment("bytes in the connection", "write", "asyncio/selector_events.py"),
)


@dataclass(frozen=True)
class Way:
    """One direction."""

    moments: dict[str, list[str]]
    """The functions that are on the stack at each, as `file:function`, the outermost first."""
    passing: frozenset[str]
    """Functions that are called between the first and the last moment, and are on no stack."""

    @property
    def files(self) -> list[str]:
        """In the order in which they are crossed."""
        stacks = self.moments.values()
        return list(dict.fromkeys(one.partition(":")[0] for stack in stacks for one in stack))

    @property
    def passing_files(self) -> list[str]:
        return sorted({one.partition(":")[0] for one in self.passing} - set(self.files))


# In the server's processes


class _Recorder:
    """Writes a line for each call of a function of the server and for each moment."""

    def __init__(self, folder: Path, kind: str) -> None:
        path = folder / f"{kind}-{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        moments = DOWN_HTTP + UP_HTTP if kind == "http" else DOWN_ENGINE + UP_ENGINE
        self._names = {(one.function, one.where) for one in moments}
        self._functions = {one.function for one in moments}
        self._places: dict[CodeType, str | None] = {}

    def start(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            place = self._place(code)
            if place is not None:
                self._write("call", [place])
            name = code.co_name
            if name == "__init__" and code.co_filename == "<string>":
                self._note(frame, type(frame.f_locals.get("self")).__name__, "dataclass")
            elif name in self._functions:
                self._note(frame, name, code.co_filename)
        elif event == "c_call" and argument.__name__ in _C_FUNCTIONS:
            owner = argument.__self__
            if isinstance(owner, ModuleType):
                self._note(frame, argument.__name__, owner.__name__.partition(".")[0])
            else:
                name = f"{type(owner).__name__}.{argument.__name__}"
                self._note(frame, name, type(owner).__module__.partition(".")[0])

    def _note(self, frame: FrameType, name: str, file: str) -> None:
        for function, where in self._names:
            is_here = file == where or file.endswith(f"/{where}") or f"{where}/" in file
            if function != name or not is_here:
                continue
            stack = []
            caller: FrameType | None = frame
            while caller is not None and not caller.f_code.co_filename.endswith(_LOOP):
                place = self._place(caller.f_code)
                if place is not None:
                    stack.append(place)
                caller = caller.f_back
            self._write(f"{function} {where}", stack[::-1])

    def _place(self, code: CodeType) -> str | None:
        """`file:function`; None if it is none of the server's."""
        if code not in self._places:
            file = code.co_filename
            place = f"{file.removeprefix(_SERVER)}:{code.co_qualname}"
            self._places[code] = place if file.startswith(_SERVER) else None
        return self._places[code]

    def _write(self, what: str, places: list[str]) -> None:
        os.write(self._file, json.dumps([time.monotonic(), what, places]).encode() + b"\n")


def _serve(fields: dict[str, Any]) -> int:
    """This process becomes the server."""
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    # asyncio's own loop: its transports are Python, so it is seen when they write
    from quire.server.config import ServerConfig
    from quire.server.run import serve

    _Recorder(Path(os.environ[_VARIABLE]), "http").start()
    return serve(ServerConfig(**fields))


def _compute() -> int:
    """This process becomes the engine's."""
    from quire.server.link.engine_process import main

    _Recorder(Path(os.environ[_VARIABLE]), "engine").start()
    return main()


# Outside of them


def trace(model: str, path: str = "/v1/chat/completions", **engine: Any) -> tuple[Way, Way]:
    """The way of a streamed call down and up, through a server of this model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        fields = {
            "model": model,
            "port": port,
            "engine_module": "scripts.way_of_a_call",
            "engine": engine,
            "log_level": "error",
        }
        environment = {**os.environ, _VARIABLE: name, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "scripts.way_of_a_call", "--serve", json.dumps(fields)]
        server = os.posix_spawn(sys.executable, command, environment)
        try:
            _wait_until_open(port, server)
            body = {**_BODIES[path], "logit_bias": {_token(port): 100}}
            _call(port, path, body)  # what is done once is done
            asked, arrivals = _call(port, path, body)
        finally:
            for which in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, which)
                time.sleep(0.2)
            os.waitpid(server, 0)
        http, computed = (_read(folder.glob(f"{kind}-*")) for kind in ("http", "engine"))
    first, last = (arrivals[number] for number in _MIDDLE)
    down, left = _down(http, DOWN_HTTP, asked)
    further, taken = _down(computed, DOWN_ENGINE, left)
    calls = _calls(http, asked, left) | _calls(computed, left, taken)
    up = _up(computed, UP_ENGINE, first, last) | {
        f"{name} ": stack for name, stack in _up(http, UP_HTTP, first, last).items()
    }
    heard = _calls(http, first, last) | _calls(computed, first, last)
    return (
        _way({**down, **{f"{name} ": stack for name, stack in further.items()}}, calls),
        _way(up, heard),
    )


def _way(moments: dict[str, list[str]], calls: frozenset[str]) -> Way:
    on_the_way = {one for stack in moments.values() for one in stack}
    return Way(moments, calls - on_the_way)


_Line = tuple[float, str, list[str]]


def _read(files: Iterable[Path]) -> list[_Line]:
    lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    return sorted(json.loads(line) for line in lines)


def _calls(lines: list[_Line], begin: float, end: float) -> frozenset[str]:
    return frozenset(
        places[0] for when, what, places in lines if what == "call" and begin <= when <= end
    )


def _down(
    lines: list[_Line], moments: Iterable[Moment], begin: float
) -> tuple[dict[str, list[str]], float]:
    """The stack at each moment, the first of its kind after the one before; and when the last was."""
    found = {}
    for moment in moments:
        wanted = f"{moment.function} {moment.where}"
        begin, _, found[moment.name] = next(
            line for line in lines if line[1] == wanted and line[0] > begin
        )
    return found, begin


def _up(
    lines: list[_Line], moments: Iterable[Moment], begin: float, end: float
) -> dict[str, list[str]]:
    """All functions on the stacks at each moment: tokens are many."""
    found: dict[str, list[str]] = {}
    for moment in moments:
        wanted = f"{moment.function} {moment.where}"
        stacks = [places for when, what, places in lines if what == wanted and begin <= when <= end]
        if not stacks:
            raise SystemExit(f"no function was seen for: {moment.name}")
        found[moment.name] = list(dict.fromkeys(one for stack in stacks for one in stack))
    return found


def _wait_until_open(port: int, server: int) -> None:
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
        ):
            return
        if os.waitpid(server, os.WNOHANG)[0]:
            raise SystemExit("the server did not start")
        time.sleep(0.05)
    raise SystemExit("the server does not answer")


def _token(port: int) -> int:
    """One that is a word: every token of the answer brings text."""
    with _post(port, "/tokenize", {"prompt": "a", "add_special_tokens": False}) as response:
        token: int = json.load(response)["tokens"][-1]
        return token


def _post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request)


def _call(port: int, path: str, body: dict[str, Any]) -> tuple[float, list[float]]:
    """When a streamed call was sent, and when each of its events came."""
    asked = time.monotonic()
    with _post(port, path, body) as response:
        arrivals = [time.monotonic() for line in response if line.startswith(b"data: ")]
    return asked, arrivals


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--path", default="/v1/chat/completions", choices=list(_BODIES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return _serve(json.loads(options.serve))
    for title, way in zip(("down", "up"), trace(options.model, options.path), strict=True):
        print(f"{title}: {len(way.files)} files of quire/server: {', '.join(way.files)}")
        for name, stack in way.moments.items():
            print(f"  {name.strip()}: {' > '.join(stack)}")
        others = ", ".join(way.passing_files)
        print(f"  asked in passing: {len(way.passing)} functions, also of {others}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_compute() if _VARIABLE in os.environ and "--serve" not in sys.argv else main())
