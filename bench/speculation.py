"""Guesses and checks: what they gain, what they cost, and that they change nothing.

    python bench/speculation.py                                  # all tables, SmolLM2 on this machine
    python bench/speculation.py copy loss --device cuda --model Qwen/Qwen3-8B
    python bench/speculation.py equal --requests 1000

Ratios are medians of one run, with and without guesses in turn, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs where nothing is installed

from quire import LLM, RequestOutput, SamplingParams
from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.speculate.adaptive import StepCosts
from quire.speculate.speculator import Speculator
from quire.step import ScheduledRequest, Step, StepLogEntry, StepResult
from tests.speculate.every_kind import TEXT, answers, essence, num_accepted

QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for learning to cook.",
    "Explain what a computer virus is, in simple words.",
    "Write a short letter to a friend who has moved away.",
)


@contextmanager
def engines(options: argparse.Namespace, *speculations: str, **more: Any) -> Iterator[dict[str, LLM]]:
    """The same model with each kind of speculation."""
    common = {"device": options.device, "max_model_len": 2048, "kv_cache_memory": options.kv_cache_memory} | more
    opened: dict[str, LLM] = {}
    try:
        for one in speculations:
            opened[one] = LLM(options.model, speculation=one, **common)
        yield opened
    finally:
        for llm in opened.values():
            llm.close()


def decode_seconds(outputs: list[RequestOutput]) -> float:
    """From the first token of all to the last, over the tokens that came in between."""
    metrics = [output.metrics for output in outputs]
    first = max(one.first_token for one in metrics if one.first_token is not None)
    tokens = sum(one.num_output_tokens - 1 for one in metrics)
    return (max(one.finished for one in metrics) - first) / max(tokens, 1)


def compare(llms: dict[str, LLM], ask: Callable[[LLM], list[RequestOutput]], rounds: int) -> dict[str, float]:
    """Median seconds per token of each engine, in turn; the answers must be the same."""
    times: dict[str, list[float]] = {name: [] for name in llms}
    for number in range(rounds + 1):
        found = {}
        for name, llm in llms.items():
            outputs = ask(llm)
            found[name] = [output.token_ids for output in outputs]
            if number:  # the first round records steps and fills caches
                times[name].append(decode_seconds(outputs))
            drafted, accepted = num_accepted(outputs)
        assert len(set(map(str, found.values()))) == 1, "answers differ"
    print(f"    {drafted} guesses, {accepted} right (the last of {', '.join(llms)})")
    return {name: statistics.median(values) for name, values in times.items()}


def _chat(asked: list[list[dict[str, str]]], params: SamplingParams, llm: LLM) -> list[RequestOutput]:
    return llm.chat(asked, params, progress=False)


def _generate(prompts: list[list[int]], params: SamplingParams, llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts, params, progress=False)


def table_equal(options: argparse.Namespace) -> None:
    """Requests of every kind with every drafter: how many answers differ from those without guesses."""
    count, longest = options.requests, 24
    # Weights in 4 bits are no quicker draft of weights that are stored in 4 bits: there, both are expanded.
    drafters = {"ngram": "auto", f"draft:{options.draft or options.model}": "auto", "self": "none"}
    expected: dict[str, list[Any]] = {}
    for name, quantization in drafters.items():
        with engines(options, "off", name, max_model_len=512, quantization=quantization) as llms:
            if quantization not in expected:
                expected[quantization] = essence(answers(llms["off"], 1, count, longest))
            # Whatever this machine's other work makes of the times: guesses that have a chance are made.
            with patch.object(StepCosts, "observe", lambda costs, entry: setattr(costs, "least_chance", 0.3)):
                outputs = answers(llms[name], 1, count, longest)
            pairs = zip(essence(outputs), expected[quantization], strict=True)
            differ = sum(one != two for one, two in pairs)
            drafted, accepted = num_accepted(outputs)
            print(f"  {name}: {differ} of {count} differ; {drafted} guesses, {accepted} of them right", flush=True)
            if differ:
                sys.exit(1)


def table_copy(options: argparse.Namespace) -> None:
    """The answer repeats the prompt."""
    texts = [TEXT, TEXT.replace("lighthouse", "bridge").replace("morning", "evening")]
    message = "Repeat the following text exactly, word for word:\n\n"
    with engines(options, "off", "ngram") as llms:
        for batch in options.batches:
            asked = [[{"role": "user", "content": message + texts[i % 2]}] for i in range(batch)]
            params = SamplingParams(temperature=0, max_tokens=96)
            found = compare(llms, partial(_chat, asked, params), options.rounds)
            print(f"  batch {batch}: {found['off'] * 1e3:.2f} -> {found['ngram'] * 1e3:.2f} ms/token, "
                  f"{found['off'] / found['ngram']:.2f} x")  # fmt: skip


def table_self(options: argparse.Namespace) -> None:
    """4-bit weights draft for the full ones, ordinary questions, one at a time."""
    with engines(options, "off", "self", quantization="none") as llms:
        for temperature in (0.0, 0.7):
            ratios = []
            for question in QUESTIONS:
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=80)
                asked = [{"role": "user", "content": question}]
                found = compare(llms, partial(_chat, [asked], params), options.rounds)
                ratios.append(found["off"] / found["self"])
            print(f"  temperature {temperature}: {statistics.median(ratios):.2f} x")


def table_loss(options: argparse.Namespace) -> None:
    """Answers that can't be guessed: random tokens at a high temperature."""
    with engines(options, "off", "ngram") as llms:
        vocab_size = llms["off"].engine.decoder.spec.vocab_size
        for batch in options.batches:
            rng = random.Random(batch)
            prompts = [[rng.randrange(vocab_size) for _ in range(64)] for _ in range(batch)]
            params = SamplingParams(temperature=1.5, seed=1, max_tokens=64, ignore_eos=True)
            found = compare(llms, partial(_generate, prompts, params), options.rounds)
            print(f"  batch {batch}: {found['off'] / found['ngram'] - 1:+.1%}")


def table_check(options: argparse.Namespace) -> None:
    """A step that checks guesses, in plain steps."""
    with engines(options, "ngram") as llms:
        runner, number = llms["ngram"].engine.runner, 10**6
        llms["ngram"].generate([[5] * 64] * 8, SamplingParams(max_tokens=2), progress=False)
        for batch in (1, 4, 8):
            times: dict[int, list[float]] = {}
            for _ in range(options.rounds * 5):
                for guesses in (0, 1, 3, 5, 7, 15):
                    scheduled = tuple(
                        ScheduledRequest(f"r{row}", row, 40, 1 + guesses, True, (), (7,) * guesses)
                        for row in range(batch)
                    )
                    began = time.perf_counter()
                    runner.submit(Step(number, 0.0, scheduled)).result()
                    times.setdefault(guesses, []).append(time.perf_counter() - began)
            plain = statistics.median(times[0])
            ratios = ", ".join(f"{k}: {statistics.median(v) / plain:.2f} x" for k, v in times.items() if k)
            print(f"  batch {batch}, guesses per request: {ratios} (plain {plain * 1e3:.2f} ms)")


def table_scheduler(options: argparse.Namespace) -> None:
    """The engine's own time per step with 256 requests and a model that costs nothing."""
    for name, speculator, period in (
        ("without", None, 0),
        ("off", Speculator(50_000), 0),
        ("ngram, nothing to guess", Speculator(50_000, ngrams=True), 0),
        ("ngram, all right", Speculator(50_000, ngrams=True), 40),
        ("ngram, all 15 guesses always", Speculator(50_000, ngrams=True, adaptive=False), 40),
    ):
        config = SchedulerConfig(num_blocks=40_000, max_num_seqs=256, max_batched_tokens=8192, max_model_len=4096)
        scheduler = Scheduler(config, guess=None if speculator is None else speculator.guess)
        rng = random.Random(1)
        for i in range(256):
            prompt = [position % period if period else rng.randrange(50_000) for position in range(500 + i % 16)]
            scheduler.add(make_requests(f"r{i}", prompt, SamplingParams(max_tokens=2000), i)[0], 0.0)
        times, tokens = [], 0
        for number in range(60):
            began = time.perf_counter()
            step = scheduler.schedule(float(number))
            scheduled = time.perf_counter()
            result = _fake(step, period, rng)
            drawn = time.perf_counter()
            scheduler.commit(step, result, number + 0.5)
            if speculator is not None:
                speculator.observe(StepLogEntry(step, result, None, number + 0.5 + 1e-4 * step.num_tokens))
            if number > 20:
                times.append(time.perf_counter() - drawn + scheduled - began)
                tokens += sum(map(len, result.tokens.values()))
        print(f"  {name}: {statistics.median(times) * 1e3:.2f} ms a step, {sum(times) / tokens * 1e6:.2f} us a token")


def _fake(step: Step, period: int, rng: random.Random) -> StepResult:
    tokens = {}
    for one in step.scheduled:
        if one.samples:
            first = one.start + one.num_tokens - len(one.guesses)
            drawn = [(first + i) % period if period else rng.randrange(50_000) for i in range(1 + len(one.guesses))]
            right = next((i for i, guess in enumerate(one.guesses) if guess != drawn[i]), len(one.guesses))
            tokens[one.request_id] = tuple(drawn[: right + 1])
    return StepResult(step.step_id, tokens)


TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "scheduler": table_scheduler,
    "check": table_check,
    "copy": table_copy,
    "loss": table_loss,
    "self": table_self,
    "equal": table_equal,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="which ones; all of them by default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", help="equal: the draft model; by default the model drafts for itself")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-memory", default="1GiB")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    for name in options.tables or TABLES:
        print(f"{name}: {(TABLES[name].__doc__ or '').splitlines()[0]}")
        TABLES[name](options)


if __name__ == "__main__":
    main()
