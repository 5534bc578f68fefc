"""Quire and other engines on the same work, side by side: prompts, single answers, many requests at
once, requests that begin alike, and how quickly and in how much memory an engine starts.

All engines take turns, so that a busy moment of the machine hits all alike, and every pass has
prompts of its own: a peer may keep prefixes, too, and can't be asked to forget them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import eq, truediv
from typing import Any

import torch

from quire.backends.select import pick_device
from quire.checkpoints.sources import resolve
from quire.frontend.progress import BenchmarkBar
from quire.models.load import open_model
from quire.runner.dtypes import pick_dtype
from quire.tools.bench.engine_process import EngineChoice, EngineProcess, TookTooLongError
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.machine import instruction_sets, report_facts
from quire.tools.bench.measure import Clock
from quire.tools.bench.peers import Answers, Peer, PeerSetting, check_peer, open_peer
from quire.tools.bench.report import EMPTY, Bytes, Cell, Factor, Report, Row, Table
from quire.tools.bench.spread import Spread

OWN = "quire"
_REMOTE = "openai-url"
"""The peer that is a server somewhere and not a process of ours."""
_FIRST_PROMPT, _FIRST_ANSWER = 128, 32
"""What a fresh process is asked for: the first token after a prompt, then an answer to another."""
_CUT = "took too long"


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that are answered in one go."""

    name: str
    count: int
    prompt: Lengths
    new: Lengths
    shared: int = 0
    """How many tokens all prompts have in common at their beginning."""
    figure: str = "output"
    """What is told: `output` tokens per second, `prompt` tokens per second, or the `time`."""
    without: str | None = None
    """The workload before it that this one begins with; its time is not counted."""

    def draw(self, source: TokenSource) -> list[Job]:
        return random_jobs(self.count, self.prompt, self.new, source, self.shared)

    @property
    def max_tokens(self) -> int:
        """Of the longest request."""
        return self.shared + self.prompt.high + self.new.high


def _one(name: str, new: int, figure: str, without: str | None = None) -> Workload:
    return Workload(name, 1, Lengths(512, 512), Lengths(new, new), figure=figure, without=without)


PREFILL = _one("prompt of 512 tokens", 1, "prompt")
STANDARD = (
    PREFILL,
    _one("decode, one request", 129, "output", without=PREFILL.name),
    Workload("32 requests at once", 32, Lengths(100, 300), Lengths(64, 128)),
    Workload(
        "16 with a common 512 tokens",
        16,
        Lengths(32, 32),
        Lengths(32, 32),
        shared=512,
        figure="time",
    ),
)
"""What serves one user, many, and many with the same instructions."""


@dataclass(frozen=True, slots=True)
class Starts:
    """What fresh processes of an engine needed."""

    first_token: Spread
    """Seconds from the start of the process to the first token of a first request."""
    peak_memory: int | None
    """Bytes, with one request."""


def start_engines(
    choices: Mapping[str, EngineChoice],
    vocab_size: int,
    repeats: int,
    stack: ExitStack,
    clock: Clock = time.perf_counter,
    limit: float | None = None,
) -> tuple[dict[str, Peer], dict[str, Starts]]:
    """Each engine's process, started `repeats` times in turn; the last one of each stays until
    `stack` is closed. None may think longer than `limit` seconds about anything.
    """
    source = TokenSource(0, vocab_size)
    engines: dict[str, Peer] = {}
    seconds: dict[str, list[float]] = {kind: [] for kind in choices}
    memory: dict[str, int | None] = {}
    with BenchmarkBar(repeats * len(choices)) as bar:
        for repeat in range(repeats):
            for kind, choice in choices.items():
                bar.begin(f"starting {kind}, pass {repeat + 1}")
                first, whole = (
                    Job(source.draw(_FIRST_PROMPT), count) for count in (1, _FIRST_ANSWER)
                )
                began = clock()
                process = EngineProcess(choice, limit)
                with ExitStack() as until_done:
                    until_done.push(process)
                    process.run([first])
                    seconds[kind].append(clock() - began)
                    process.run([whole])
                    memory[kind] = process.peak_memory
                    if repeat == repeats - 1:
                        engines[kind] = process
                        stack.push(until_done.pop_all())
                bar.advance()
    return engines, {kind: Starts(Spread.of(seconds[kind]), memory[kind]) for kind in choices}


def compare_engines(
    model: str,
    peers: Mapping[str, str],
    workloads: Sequence[Workload],
    repeats: int,
    device: str,
    dtype: str,
    options: dict[str, Any],
    peer_batch: int,
    url: str | None,
    limit: float | None = None,
) -> Report:
    """Starts Quire (with further engine `options`) and `peers`, each with the interpreter it is
    installed for (empty: ours), and compares them. A measure that takes longer than `limit` seconds
    is cut, and the table says so.
    """
    for kind in peers:
        check_peer(kind, url if kind == _REMOTE or _REMOTE not in peers else None)
    where, source = pick_device(device), resolve(model)
    files = open_model(source.path)
    files.checkpoint.close()
    vocab_size = files.spec.vocab_size
    number_format = str(pick_dtype(dtype, where)).removeprefix("torch.")
    longest = max(_FIRST_PROMPT + _FIRST_ANSWER, *(workload.max_tokens for workload in workloads))
    setting = PeerSetting(
        model,
        str(source.path),
        str(where),
        number_format,
        torch.get_num_threads(),
        peer_batch,
        longest,
    )
    engines: dict[str, Peer] = {}
    if _REMOTE in peers:
        engines[_REMOTE] = open_peer(_REMOTE, replace(setting, url=url))
    choices = {
        kind: EngineChoice(kind, setting, python=python or sys.executable)
        for kind, python in peers.items()
        if kind != _REMOTE
    }
    # last: on a GPU it takes what the others leave
    choices[OWN] = EngineChoice(OWN, setting, options)
    facts = report_facts(where.torch_device) | {"instruction sets": instruction_sets()}
    with ExitStack() as stack:
        started, starts = start_engines(choices, vocab_size, repeats, stack, limit=limit)
        engines |= started
        table = compare(engines, workloads, vocab_size, repeats, starts, limit=limit)
    names = {kind: engine.name for kind, engine in engines.items()}
    return Report(f"Quire and {', '.join(peers)}", facts | names, (table,))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One workload's run through one engine."""

    seconds: float
    prompt_tokens: int
    answers: Answers

    @property
    def output_tokens(self) -> int:
        return self.answers if isinstance(self.answers, int) else sum(map(len, self.answers))


_Passes = dict[tuple[str, str], list[_Pass]]
"""By engine and workload; one that took too long has none."""


def compare(
    engines: Mapping[str, Peer],
    workloads: Sequence[Workload],
    vocab_size: int,
    repeats: int,
    starts: Mapping[str, Starts] | None = None,
    clock: Clock = time.perf_counter,
    limit: float | None = None,
) -> Table:
    """Quire (the engine called "quire") and its peers, one line for each workload. `limit` is what
    their processes were started with.
    """
    peers = [kind for kind in engines if kind != OWN]
    order = [OWN, *peers]
    passes = _run({kind: engines[kind] for kind in order}, workloads, vocab_size, repeats, clock)
    rows: list[Row] = []
    for workload in workloads:
        cells = {kind: _figure(workload, passes, kind) for kind in order}
        medians = {kind: cell.median for kind, cell in cells.items() if isinstance(cell, Spread)}
        rows.append(
            _row(workload.name, order, cells, medians, less_is_better=workload.figure == "time")
        )
    if starts:
        first = {kind: start.first_token for kind, start in starts.items()}
        medians = {kind: spread.median for kind, spread in first.items()}
        rows.append(_row("start to first token", order, first, medians, less_is_better=True))
        memory = {
            kind: start.peak_memory
            for kind, start in starts.items()
            if start.peak_memory is not None
        }
        sizes = {kind: Bytes(size) for kind, size in memory.items()}
        rows.append(_row("peak memory, one request", order, sizes, memory, less_is_better=True))
    rows.append(
        (
            "answers that agree",
            EMPTY,
            *(_agreement(passes, kind) for kind in peers),
            *[EMPTY] * len(peers),
        )
    )
    columns = ("what", *order, *(f"over {kind}" for kind in peers))
    note = _note(workloads, repeats, bool(starts))
    if any(_CUT in row for row in rows):
        note += f" What {_CUT} was stopped after {limit:g} s (--limit)."
    return Table("Comparison", note, columns, tuple(rows))


def _run(
    engines: Mapping[str, Peer],
    workloads: Sequence[Workload],
    vocab_size: int,
    repeats: int,
    clock: Clock,
) -> _Passes:
    passes: _Passes = {(kind, workload.name): [] for kind in engines for workload in workloads}
    with BenchmarkBar(1 + repeats * len(workloads) * len(engines)) as bar:
        bar.begin("warming up")
        for engine in engines.values():
            with suppress(TookTooLongError):  # its measures will tell
                engine.run(workloads[-1].draw(TokenSource(0, vocab_size))[:2])
        bar.advance()
        for repeat in range(repeats):
            for number, workload in enumerate(workloads):
                jobs = workload.draw(TokenSource(1 + repeat * len(workloads) + number, vocab_size))
                prompt_tokens = sum(len(job.prompt) for job in jobs)
                for kind, engine in engines.items():
                    bar.begin(f"{kind}: {workload.name}, pass {repeat + 1}")
                    found = passes[kind, workload.name]
                    if len(found) == repeat:  # it was never cut
                        began = clock()
                        try:
                            answers = engine.run(jobs)
                            found.append(_Pass(clock() - began, prompt_tokens, answers))
                        except TookTooLongError:
                            found.clear()
                    bar.advance()
    return passes


def _figure(workload: Workload, passes: _Passes, kind: str) -> Spread | str:
    found = passes[kind, workload.name]
    if not found or (workload.without and not passes[kind, workload.without]):
        return _CUT
    if workload.figure == "time":
        return Spread.of(each.seconds for each in found)
    if workload.figure == "prompt":
        return Spread.of((each.prompt_tokens / each.seconds for each in found), "tok/s")
    if workload.without is None:
        return Spread.of((each.output_tokens / each.seconds for each in found), "tok/s")
    pairs = list(zip(found, passes[kind, workload.without], strict=True))
    tokens = [whole.output_tokens - part.output_tokens for whole, part in pairs]
    seconds = [max(whole.seconds - part.seconds, 1e-9) for whole, part in pairs]
    return Spread.of(map(truediv, tokens, seconds), "tok/s")


def _agreement(passes: _Passes, peer: str) -> str:
    """How many of a peer's answers are ours, token by token."""
    same: list[bool] = []
    for (kind, workload), found in passes.items():
        if kind == peer and found and passes[OWN, workload]:
            for theirs, ours in zip(found, passes[OWN, workload], strict=True):
                if isinstance(theirs.answers, list) and isinstance(ours.answers, list):
                    same += map(eq, theirs.answers, ours.answers)
    return f"{sum(same)} of {len(same)}" if same else "not told"


def _row(
    name: str,
    order: Sequence[str],
    cells: Mapping[str, Cell],
    values: Mapping[str, float],
    less_is_better: bool,
) -> Row:
    """A measure of every engine that has it, then how many times better ours is than each peer's."""
    ratios: list[Cell] = []
    for kind in order[1:]:
        if OWN not in values or kind not in values:
            ratios.append(EMPTY)
        elif less_is_better:
            ratios.append(Factor(values[kind] / values[OWN]))
        else:
            ratios.append(Factor(values[OWN] / values[kind]))
    return (name, *(cells.get(kind, EMPTY) for kind in order), *ratios)


def _note(workloads: Sequence[Workload], repeats: int, with_starts: bool) -> str:
    parts = []
    for workload in workloads:
        shared = f" after {workload.shared} in common" if workload.shared else ""
        what = {
            "output": "output tokens per second",
            "prompt": "prompt tokens per second",
            "time": "time for all",
        }
        less = f", less the time of the {workload.without}" if workload.without else ""
        parts.append(
            f"{workload.name}: {workload.count} × {workload.prompt} prompt tokens{shared}, {workload.new} new ones, "
            f"{what[workload.figure]}{less}"
        )
    if with_starts:
        parts.append(
            f"start: a fresh process to the first token after {_FIRST_PROMPT}, and the most memory it held until it "
            f"had also given {_FIRST_ANSWER} tokens after {_FIRST_PROMPT} others"
        )
    return (
        f"{'; '.join(parts)}. Greedy, end tokens ignored. Medians of {repeats} interleaved passes, each with prompts "
        "of its own, the lowest and highest in brackets. Over: how many times better quire is. Answers agree where "
        "every token does; engines that round differently part at near ties."
    )
