"""An engine in a process of its own: how long it takes from nothing to its first token, what it
takes of memory, and nothing of it in anybody else's way. The process may run in another virtual
environment.

First it is told the kind of engine and its setting, and answers with the engine's name; then jobs,
and it answers with their tokens. `python -m quire.tools.bench.engine_process` is the process's
side.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from quire.errors import QuireError
from quire.process.child import Child, ParentLines, end_with_parent
from quire.process.granted import peak_resident
from quire.tools.bench.jobs import Job
from quire.tools.bench.peers import Answers, Peer, PeerSetting, open_peer

_EXIT_SECONDS = 10.0


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
        self._child: Child | None = None
        self.peak_memory: int | None = None
        """Of resident memory, in bytes, from the process's start to its last answer; None where the
        system does not tell.
        """
        self._start()

    def _start(self) -> None:
        choice = self._choice
        try:
            self._child = Child(
                "quire.tools.bench.engine_process",
                python=choice.python,
                leads_group=True,
                errors="kept",
            )
        except OSError as error:
            raise QuireError(f"{choice.kind}: {choice.python} can't be started: {error}") from None
        order = {
            "kind": choice.kind,
            "setting": asdict(choice.setting),
            "options": choice.options,
        }
        try:
            self.name: str = self._ask(self._child, order)["name"]
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Job]) -> Answers:
        if self._child is None:
            self._start()
        assert self._child is not None
        order = {"jobs": [(job.token_ids, job.max_tokens) for job in jobs]}
        try:
            reply = self._ask(self._child, order)
        except TookTooLongError:
            self._start()  # now, not within the time of whatever comes next
            raise
        self.peak_memory = reply["peak_memory"]
        answers = reply["answers"]
        return answers if isinstance(answers, int) else [tuple(answer) for answer in answers]

    def close(self) -> None:
        """Ends the process: there is no more to do, so it ends by itself, or is killed."""
        if self._child is not None:
            self._child.close(_EXIT_SECONDS)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, child: Child, order: dict[str, Any]) -> dict[str, Any]:
        kind = self._choice.kind
        try:
            reply: dict[str, Any] = child.ask(order, self._limit)
        except TimeoutError:
            child.kill()
            self.close()
            raise TookTooLongError(f"{kind} did not answer within {self._limit:g} s") from None
        except ConnectionError:
            raise QuireError(f"the process of {kind} ended: {child.last_words()}") from None
        if "error" in reply:
            raise QuireError(reply["error"])
        return reply


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


def main() -> None:
    end_with_parent()
    parent = ParentLines()
    orders = iter(parent)
    try:
        engine = _open(next(orders))
        parent.answer({"name": engine.name})
        for order in orders:
            jobs = [Job(tuple(prompt), max_tokens) for prompt, max_tokens in order["jobs"]]
            parent.answer({"answers": engine.run(jobs), "peak_memory": peak_resident()})
    except QuireError as error:
        parent.answer({"error": str(error)})


if __name__ == "__main__":
    main()
