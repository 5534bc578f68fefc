"""Draft tokens and their checks: what they gain and what they cost.

    python -m quire.tools.bench.engine.speculation  # all tables, SmolLM2 on this machine
    python -m quire.tools.bench.engine.speculation copy loss --device cuda --model Qwen/Qwen3-8B
    python -m quire.tools.bench.engine.speculation check loss --device cuda --shape qwen3-8b  # random weights

Ratios are medians of one run, with and without draft tokens in turn, so that whatever else the machine
does hits both. The last lines are all figures as a Markdown table, each beside its goal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from quire import LLM, RequestOutput, SamplingParams
from quire.assemble import Engine, assemble
from quire.backends.select import pick_device, select_kernels
from quire.config import EngineConfig
from quire.process.gc_pauses import full_collections_put_off
from quire.runner.dtypes import pick_dtype
from quire.speculate.adaptive import MAX_DRAFT_TOKENS
from quire.speculate.speculator import Speculator
from quire.step import ScheduledRequest, Step
from quire.tools.bench.engine.drafted_scheduler import DraftedScheduler
from quire.tools.bench.machine import report_facts, this_command
from quire.tools.bench.random_engine import random_decoder
from quire.tools.bench.report import Row, Table, cell_text
from quire.tools.bench.shapes import CONFIGS, spec_of
from quire.tools.bench.spread import Spread

TEXT, STORY = Path(__file__).with_name("copied_texts.txt").read_text().strip().split("\n---\n")
"""A few sentences, and the beginning of a story."""
MAX_MODEL_LEN = 2048
WARM_UP = 3
"""Rounds that do not count: they fill caches, and record steps of each size, which differ from
round to round.
"""
QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for learning to cook.",
    "Explain what a computer virus is, in simple words.",
    "Write a short letter to a friend who has moved away.",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One ratio, from every round, and what it should be."""

    table: str
    what: str
    ratios: Spread
    goal: float | None = None
    at_most: bool = False
    detail: str = ""

    def row(self) -> Row:
        if self.goal is None:
            return self.table, self.what, self.ratios, "", "", self.detail
        is_met = (
            self.ratios.median <= self.goal if self.at_most else self.ratios.median >= self.goal
        )
        goal = f"{'≤' if self.at_most else '≥'} {self.goal:.2f} ×"
        return self.table, self.what, self.ratios, goal, "yes" if is_met else "no", self.detail


Figures = Iterator[Figure]


@contextmanager
def engines(
    options: argparse.Namespace, *speculations: str, **more: Any
) -> Iterator[dict[str, LLM]]:
    """The same model with each kind of speculation; with a `--shape`, one of random weights."""
    device = pick_device(options.device).torch_device
    seqs, memory = (256, "8GiB") if device.type == "cuda" else (64, "1GiB")
    common = {
        "device": options.device,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max([seqs, *(options.batches or ())]),
        "kv_cache_memory": options.kv_cache_memory or memory,
    } | more
    opened: dict[str, LLM] = {}
    build = None if options.shape is None else _random_builder(options.shape, options.device)
    try:
        for one in speculations:
            if build is None:
                opened[one] = LLM(options.model, speculation=one, **common)
            else:
                with patch("quire.llm.resolve"), patch("quire.llm.build_engine", build):
                    opened[one] = LLM(options.shape, speculation=one, **common)
            if device.type == "cuda":  # a graph is captured after each of the first steps
                warm_up = SamplingParams(temperature=1.5, seed=1, max_tokens=128, ignore_eos=True)
                opened[one].generate([[5] * 64] * 8, warm_up, progress=False)
        yield opened
    finally:
        for llm in opened.values():
            llm.close()


def _random_builder(shape: str, wanted: str) -> Callable[..., Engine]:
    """What stands for `build_engine`: all engines have the same random weights."""
    found = pick_device(wanted)
    device, dtype = found.torch_device, pick_dtype("auto", found)
    kernels = select_kernels(device, dtype)
    decoder = random_decoder(spec_of(shape), kernels, dtype, device, max_position=MAX_MODEL_LEN)

    def build(_source: object, config: EngineConfig, _progress: object, listeners: Any) -> Engine:
        # Each lets go of its own at the end.
        return assemble(copy(decoder), config, name=shape, listeners=listeners)

    return build


def num_accepted(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """(drafted, accepted) tokens of all answers."""
    metrics = [one.metrics for output in outputs for one in output.completions]
    return sum(one.drafted_tokens for one in metrics), sum(one.accepted_tokens for one in metrics)


def decode(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[list[int]], float, list[RequestOutput], list[int]]:
    """The answers, seconds per token from when each has begun to when the last has ended, and
    tokens of each step.
    """
    tokens: dict[str, list[int]] = {llm.add_request(prompt, params): [] for prompt in prompts}
    outputs: list[RequestOutput] = []
    began: float | None = None
    steps: list[int] = []
    with full_collections_put_off():  # as `LLM.generate` does
        while len(outputs) < len(prompts):
            deltas = llm.step()
            if began is not None:
                steps.append(sum(len(delta.token_ids) for delta in deltas))
            for delta in deltas:
                tokens[delta.request_id] += delta.token_ids
                outputs += [delta.output] if delta.output is not None else []
            if began is None and all(tokens.values()):
                began = time.perf_counter()
    assert began is not None
    return list(tokens.values()), (time.perf_counter() - began) / max(sum(steps), 1), outputs, steps


@dataclass(frozen=True, slots=True)
class Speedup:
    """Two engines with the same work in turn."""

    ratios: Spread
    """How many times quicker the second one was, in each round."""
    medians: tuple[float, float]
    """Seconds per token."""
    drafted: int
    accepted: int
    steps: tuple[int, ...] = ()
    """How many tokens came of each step of the last round with draft tokens."""

    @property
    def detail(self) -> str:
        slow, fast = (1e3 * median for median in self.medians)
        share = (
            f"{self.accepted / self.drafted:.0%} of {self.drafted:,} draft tokens right"
            if self.drafted
            else "no draft tokens"
        )
        steps = (
            f"; steps of {', '.join(map(str, self.steps))} tokens"
            if 0 < len(self.steps) <= 20
            else ""
        )
        return f"{slow:.2f} → {fast:.2f} ms/token, {share}{steps}"


def compare(
    llms: dict[str, LLM], prompts: Sequence[list[int]], params: SamplingParams, rounds: int
) -> Speedup:
    """Without and with draft tokens, in turn; the answers must be the same."""
    times: dict[str, list[float]] = {name: [] for name in llms}
    drafted = accepted = 0
    steps: dict[str, list[int]] = {}
    for number in range(WARM_UP + rounds):
        found = {}
        for name in sorted(llms, reverse=number % 2 == 0):  # who is first has no advantage
            found[name], seconds, outputs, steps[name] = decode(llms[name], prompts, params)
            if number >= WARM_UP:
                times[name].append(seconds)
                counts = num_accepted(outputs)
                drafted, accepted = drafted + counts[0], accepted + counts[1]
        assert len(set(map(str, found.values()))) == 1, "answers differ"
    plain, speculated = times.values()
    ratios = Spread.of((one / two for one, two in zip(plain, speculated, strict=True)), "×")
    medians = statistics.median(plain), statistics.median(speculated)
    return Speedup(ratios, medians, drafted, accepted, tuple(steps[list(llms)[1]]))


def compare_steps(
    llms: dict[str, LLM], prompts: Sequence[list[int]], params: SamplingParams, rounds: int
) -> Speedup:
    """The same step by step in turn, by the medians of steps: where there are no draft tokens, and a
    step takes as long as the one before, it sees far smaller differences. Not with steps in flight:
    they would wait for each other's.
    """
    medians: dict[str, list[float]] = {name: [] for name in llms}
    drafted = accepted = 0
    for number in range(rounds + 1):
        times: dict[str, list[float]] = {name: [] for name in llms}
        begun: dict[str, int] = {}
        for name, llm in llms.items():
            begun |= {f"{name} {llm.add_request(prompt, params)}": 0 for prompt in prompts}
        while any(llm.has_work for llm in llms.values()):
            for name, llm in llms.items():
                began = time.perf_counter()
                deltas = llm.step()
                seconds = time.perf_counter() - began
                if deltas and all(begun.values()):
                    times[name].append(seconds / sum(len(delta.token_ids) for delta in deltas))
                for delta in deltas:
                    begun[f"{name} {delta.request_id}"] += len(delta.token_ids)
                    if delta.output is not None:
                        counts = num_accepted([delta.output])
                        drafted, accepted = drafted + counts[0], accepted + counts[1]
        for name, values in times.items():
            medians[name] += [statistics.median(values)] * (number > 0)
    plain, speculated = medians.values()
    ratios = Spread.of((one / two for one, two in zip(plain, speculated, strict=True)), "×")
    return Speedup(
        ratios, (statistics.median(plain), statistics.median(speculated)), drafted, accepted
    )


def table_copy(options: argparse.Namespace) -> Figures:
    """The answer repeats the prompt: a few sentences, or the beginning of a story."""
    message = "Repeat the following text exactly, word for word:\n\n"
    goals = {1: 2.2, 32: 1.3}
    with engines(options, "off", "ngram") as llms:
        for text in (TEXT, STORY):
            texts = text, text.replace("lighthouse", "bridge").replace("morning", "evening")
            asked = [[{"role": "user", "content": message + text}] for text in texts]
            prompts = [llms["off"].encode_chat(one) for one in asked]
            for batch in options.batches or goals:
                params = SamplingParams(temperature=0, max_tokens=96)
                found = compare(
                    llms, [prompts[i % 2] for i in range(batch)], params, options.rounds
                )
                what = f"batch {batch}, prompts of {len(prompts[0])}"
                yield Figure("copy", what, found.ratios, goals.get(batch), detail=found.detail)


def table_self(options: argparse.Namespace) -> Figures:
    """4-bit weights draft for the full ones, ordinary questions, one at a time."""
    with engines(options, "off", "self", quantization="none") as llms:
        for temperature in (0.0, 0.7):
            ratios: list[float] = []
            medians, drafted, accepted = [], 0, 0
            for question in QUESTIONS:
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=64)
                prompt = llms["off"].encode_chat([{"role": "user", "content": question}])
                found = compare(llms, [prompt], params, max(options.rounds // 2, 1))
                ratios += found.ratios.values
                medians.append(found.medians)
                drafted, accepted = drafted + found.drafted, accepted + found.accepted
            plain, speculated = (statistics.median(values) for values in zip(*medians, strict=True))
            detail = Speedup(Spread.of(ratios), (plain, speculated), drafted, accepted).detail
            yield Figure(
                "self", f"temperature {temperature}", Spread.of(ratios, "×"), 1.5, detail=detail
            )


def table_loss(options: argparse.Namespace) -> Figures:
    """Answers that can't be speculated: random tokens at a high temperature."""
    with engines(
        options, "off", "ngram", max_num_seqs=max([256, *(options.batches or ())])
    ) as llms:
        vocab_size = llms["off"].engine.decoder.spec.vocab_size
        is_gpu = llms["off"].engine.decoder.device.type == "cuda"
        for batch in options.batches or (1, 32, 256):
            rng = random.Random(batch)
            # With many requests a CPU takes tenths of a second for a step.
            length, count = (65, 64) if is_gpu or batch <= 64 else (17, 16)
            prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]
            params = SamplingParams(temperature=1.5, seed=1, max_tokens=count, ignore_eos=True)
            rounds = options.rounds * (4 if batch == 1 else 1)  # they are short, and differ most
            found = (compare if is_gpu else compare_steps)(llms, prompts, params, rounds)
            yield Figure("loss", f"batch {batch}", found.ratios, 0.98, detail=found.detail)


def table_check(options: argparse.Namespace) -> Figures:
    """A step that checks draft tokens, in plain steps."""
    with engines(options, "ngram") as llms:
        engine, numbers = llms["ngram"].engine, (0, 1, 3, 5, 7, 15, 31)
        # Requests that have ended leave rows and blocks behind, which is all that these steps need.
        llms["ngram"].generate(
            [[5] * 64] * 8, SamplingParams(max_tokens=2, ignore_eos=True), progress=False
        )
        for batch in (1, 4, 8):
            times: dict[int, list[float]] = {count: [] for count in numbers}
            for number in range(options.rounds * 3 + 1):
                for count in numbers:
                    seconds = _check_seconds(engine, batch, count)
                    if number:  # the first round records steps
                        times[count].append(seconds)
            plain = statistics.median(times[0])
            for count in numbers[1:]:
                ratios = Spread.of(
                    (one / zero for one, zero in zip(times[count], times[0], strict=True)), "×"
                )
                detail = f"{1e3 * plain:.2f} → {1e3 * statistics.median(times[count]):.2f} ms"
                goal = 1.15 if count == 5 else None
                yield Figure(
                    "check", f"batch {batch}, {count} draft tokens each", ratios, goal, True, detail
                )


def _check_seconds(engine: Engine, batch: int, count: int) -> float:
    """Of a step that checks so many draft tokens for each of so many requests, with as many in flight as
    in the engine.
    """
    scheduled = tuple(
        ScheduledRequest(f"r{row}", row, 40, 1 + count, True, (), (7,) * count)
        for row in range(batch)
    )
    is_gpu = engine.decoder.device.type == "cuda"
    in_flight: deque[Any] = deque()
    began, repeats = time.perf_counter(), 10 if is_gpu else 1
    for number in range(repeats):
        in_flight.append(engine.runner.submit(Step(10**6 + number, 0.0, scheduled)))
        if len(in_flight) == engine.core.depth:
            in_flight.popleft().result()
    while in_flight:
        in_flight.popleft().result()
    return (time.perf_counter() - began) / repeats


def table_scheduler(options: argparse.Namespace) -> Figures:
    """The engine's own time per token with 256 requests and a model that costs nothing."""
    variants = (
        DraftedScheduler("without", None, 0),
        DraftedScheduler("off", Speculator(50_000), 0),
        DraftedScheduler("ngram, nothing to draft", Speculator(50_000, ngrams=True), 0),
        DraftedScheduler(
            "ngram, 9 of 10 tokens as expected", Speculator(50_000, ngrams=True), 40, 0.1
        ),
        DraftedScheduler("ngram, all right", Speculator(50_000, ngrams=True), 40),
        DraftedScheduler(
            f"ngram, all {MAX_DRAFT_TOKENS} draft tokens always",
            Speculator(50_000, ngrams=True, adaptive=False),
            40,
        ),
    )
    with full_collections_put_off():  # as the engine does
        for number in range(20 + 20 * options.rounds):
            for variant in variants:  # in turn, so that what else the machine does hits all
                variant.step(number)
    today = variants[0]
    for variant in variants[1:]:
        each, steps = (
            [1e6 * t / n for t, n in zip(one.times, one.tokens, strict=True)]
            for one in (today, variant)
        )
        ratios = Spread.of((two / one for one, two in zip(each, steps, strict=True)), "×")
        times = [1e3 * statistics.median(one.times) for one in (today, variant)]
        tokens = statistics.median(variant.tokens)
        detail = f"{times[0]:.2f} → {times[1]:.2f} ms a step of 256 → {tokens:,.0f} tokens"
        yield Figure("scheduler", variant.name, ratios, 1.5, True, detail)


TABLES: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "scheduler": table_scheduler,
    "check": table_check,
    "copy": table_copy,
    "loss": table_loss,
    "self": table_self,
}
_WITH_RANDOM_WEIGHTS = ("scheduler", "check", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables", nargs="*", choices=[[], *TABLES], help="which ones; all of them by default"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--shape",
        choices=list(CONFIGS),
        help=f"random weights of this shape instead of a model: for {', '.join(_WITH_RANDOM_WEIGHTS)}",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-memory", help="of each engine; default: 1GiB, on a GPU 8GiB")
    parser.add_argument(
        "--batches", type=int, nargs="*", help="copy, loss; default: those of the goals"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="some that do not count come before them"
    )
    options = parser.parse_args()
    chosen = options.tables or (TABLES if options.shape is None else _WITH_RANDOM_WEIGHTS)
    for name in chosen:
        if options.shape is not None and name not in _WITH_RANDOM_WEIGHTS:
            parser.error(f"{name} needs a real model: its answers are not those of random weights")
    facts = report_facts(pick_device(options.device).torch_device, this_command())
    rows: list[Row] = []
    for name in chosen:
        print(f"{name}: {(TABLES[name].__doc__ or '').splitlines()[0]}", flush=True)
        for figure in TABLES[name](options):
            rows.append(figure.row())
            print("  " + " | ".join(map(cell_text, rows[-1][1:])), flush=True)
    table = Table("Speculation", "", ("table", "", "ratio", "goal", "met", ""), tuple(rows))
    print(
        "", *(f"{name}: {value}" for name, value in facts.items()), "", *table.markdown(), sep="\n"
    )


if __name__ == "__main__":
    main()
