"""An engine in a process of its own: how long it takes from nothing to its first token, what it
takes of memory, and nothing of it in anybody else's way. The process may run in another virtual
environment.

Both sides write lines of JSON: first the kind of engine and its setting, answered by the engine's
name, then jobs, answered by their tokens. `python -m quire.tools.bench.engine_process` is the
process's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from quire.errors import QuireError
from quire.tools.bench.jobs import Job
from quire.tools.bench.peers import Answers, Peer, PeerSetting, open_peer


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine to start, and how."""

    kind: str
    """`quire`, or a peer's name."""
    setting: PeerSetting
    options: dict[str, Any] = field(default_factory=dict)
    """For Quire: engine options."""
    python: str = sys.executable
    """The interpreter of the environment it is installed in."""


class TookTooLongError(QuireError):
    """An engine was stopped because it had not answered in time."""


class EngineProcess:
    """The other end of an engine's process; a `Peer` like those that are in ours."""

    def __init__(self, choice: EngineChoice, limit: float | None = None) -> None:
        """Starts it and loads the model. Where loading, or an answer, takes more than `limit`
        seconds, the process is stopped with TookTooLongError, and another started in its place.
        """
        self._choice = choice
        self._limit = limit
        self._running = False
        self.peak_memory: int | None = None
        """Of resident memory, in bytes, from the process's start to its last answer; None where the
        system does not tell.
        """
        self._start()

    def _start(self) -> None:
        choice = self._choice
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed in `close`)
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [choice.python, "-m", "quire.tools.bench.engine_process"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            self._log.close()
            raise QuireError(f"{choice.kind}: {choice.python} can't be started: {error}") from None
        self._running = True
        try:
            order = {
                "kind": choice.kind,
                "setting": asdict(choice.setting),
                "options": choice.options,
            }
            self.name: str = self._ask(order)["name"]
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Job]) -> Answers:
        if not self._running:
            self._start()
        try:
            reply = self._ask({"jobs": [(job.token_ids, job.max_tokens) for job in jobs]})
        except TookTooLongError:
            self._start()  # now, not within the time of whatever comes next
            raise
        self.peak_memory = reply["peak_memory"]
        answers = reply["answers"]
        return answers if isinstance(answers, int) else [tuple(answer) for answer in answers]

    def close(self) -> None:
        """Ends the process."""
        if not self._running:
            return
        self._running = False
        if self._process.stdin is not None:
            # There is no more to do, so it ends by itself; one that has ended already left what it
            # did not read.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            _write(stdin, order)
            # A line is written in one go, so where it has begun its end is near.
            if self._limit is not None and not select.select([stdout], [], [], self._limit)[0]:
                self._process.kill()
                self.close()
                raise TookTooLongError(
                    f"{self._choice.kind} did not answer within {self._limit:g} s"
                )
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._log.seek(0)
            raise QuireError(
                f"the process of {self._choice.kind} ended: {self._log.read()[-2000:].strip()}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise QuireError(reply["error"])
        return reply


def _write(file: IO[str], message: dict[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _open(order: dict[str, Any]) -> Peer:
    setting = PeerSetting(**order["setting"])
    if order["kind"] != "quire":
        return open_peer(order["kind"], setting)
    from quire.process.gc_pauses import no_collections
    from quire.process.preload import load_torch_libraries

    load_torch_libraries()  # as the command line does
    with no_collections():
        from quire.tools.bench.offline import OwnEngine

        return OwnEngine(setting, order["options"])


def _peak_resident() -> int | None:
    # Not getrusage: its peak begins with that of whoever started this process.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _serve(orders: IO[str], replies: IO[str]) -> None:
    try:
        engine = _open(json.loads(orders.readline()))
        _write(replies, {"name": engine.name})
        for line in orders:
            jobs = [
                Job(tuple(prompt), max_tokens) for prompt, max_tokens in json.loads(line)["jobs"]
            ]
            answers = engine.run(jobs)
            _write(replies, {"answers": answers, "peak_memory": _peak_resident()})
    except QuireError as error:
        _write(replies, {"error": str(error)})


def main() -> None:
    # What libraries print must not stand between the answers.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
