"""Promises of time: gaps between tokens with a target and without, and what a flood does to others.

    python -m quire.tools.bench.gpu.promises  # Qwen3-8B's shape, 30 ms, prompts of 8,000 tokens
    python -m quire.tools.bench.gpu.promises --only flood --seconds 6 --budget 65  # about a minute
    python -m quire.tools.bench.gpu.promises --device cpu --model smollm2 --max-num-seqs 8 --short 16-48 --long 800 \\
        --answer 24 --target 0 --seconds 25  # a target of two full decode steps
    python -m quire.tools.bench.gpu.promises --shape tiny --device cpu --long 64 --seconds 1  # to try it

Requests come at random at 60, 80 and 95% of what the engine can do (measured first, without a
target, all requests at once); one prompt in ten is long. The same requests are sent with the target
and without, to the same runner with the same CUDA graphs.

The flood: three tenants together send at 60% of what the engine can do, a fourth 20 times its quarter
at once. First-token times of the three under `fair` with the target, with and without the flood; and
under `fcfs` without a target, until nobody cares any more (then "at least").

With targets and shares the scheduler has more to do: how much of the time it took is printed with each
line, and in the end its time per step with them by that without (quire.tools.bench.engine.scheduler).

All in all it takes at most `--budget` seconds: requests come for a shorter time where that is little. What fails is
printed, and the rest goes on. Weights are random unless `--model` names real ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.assemble import Engine, assemble, build_engine
from quire.backends.select import pick_device, select_kernels
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import EngineCore, Scheduler
from quire.runner.dtypes import pick_dtype
from quire.step import RequestUpdate, Step, StepResult
from quire.tools.bench.engine.scheduler import print_comparisons
from quire.tools.bench.machine import report_facts, this_command
from quire.tools.bench.open_loop import Arrival, Mix, Played, percentile, play
from quire.tools.bench.random_engine import random_decoder
from quire.tools.bench.shapes import CONFIGS, spec_of

LOADS = (0.6, 0.8, 0.95)
FLOOD = 20
"""Times its share, which is a quarter."""
OTHERS = ("a", "b", "c")
OTHERS_LOAD = 0.6
PATIENCE = 2.0
"""How long requests are waited for at most, by how long they come."""
_PARTS = {"token-times": 13.0, "flood": 7.0}
"""What each part takes at most, by how long requests come: six times twice that for token times, three times for
the flood, and what is learnt before.
"""
_SHORTEST = 1.0
"""Seconds in which requests come, however little is left."""


class MeasuredScheduler(Scheduler):
    """Notes how long it takes itself, and in how many of the steps with a target that gave way."""

    seconds = 0.0
    num_promised = 0
    num_gave_way = 0

    def schedule(self, now: float, held: frozenset[int] = frozenset()) -> Step:
        began = time.perf_counter()
        step = super().schedule(now, held)
        self.seconds += time.perf_counter() - began
        if step.promise is not None:
            self.num_promised += 1
            self.num_gave_way += step.promise.gave_way is not None
        return step

    def describe(self) -> str:
        """What it has learnt, and how often that did not suffice."""
        times = self.step_times
        if times is None:
            return "no target"
        base, token = times.seconds(0, 0.0), times.seconds(1, 0.0)
        return (
            f"a step takes {1e3 * base:.1f} ms, {1e3 * (token - base):.3f} ms for each token and "
            f"{1e6 * (times.seconds(0, 1e3) - base):.3f} us for each pair; {times.aim:.2f} of the target is "
            f"planned; in {self.num_gave_way} of {self.num_promised} steps with prompts a target gave way"
        )

    def commit(self, step: Step, result: StepResult, now: float) -> list[RequestUpdate]:
        began = time.perf_counter()
        updates = super().commit(step, result, now)
        self.seconds += time.perf_counter() - began
        return updates


def play_measured(core: EngineCore, *what: Any) -> tuple[Played, float]:
    """The part of the time that the scheduler took, too."""
    scheduler = core.scheduler
    assert isinstance(scheduler, MeasuredScheduler)
    before = scheduler.seconds
    played = play(core, *what)
    return played, (scheduler.seconds - before) / played.seconds


def open_engine(options: argparse.Namespace, longest: int) -> Engine:
    found = pick_device(options.device)
    device, dtype = found.torch_device, pick_dtype(options.dtype, found)
    config = EngineConfig(
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=longest,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory=options.kv_cache_memory,
        prefix_caching=False,  # schedulers take turns with the same blocks
    )
    if options.model:
        engine = build_engine(resolve(options.model), config)
    else:
        spec = replace(spec_of(options.shape), max_position=longest)
        kernels = select_kernels(device, dtype, "auto")
        decoder = random_decoder(spec, kernels, dtype, device, max_position=longest)
        engine = assemble(decoder, config, name=options.shape)
    print(engine.description, flush=True)
    # one graph is captured after each step
    play(engine.core, [Arrival(0.0, "", [1] * 16, graph_steps(options.max_num_seqs))])
    return engine


def graph_steps(max_num_seqs: int) -> int:
    """Steps after which all CUDA graphs of decodes are captured."""
    return 64 + max_num_seqs // 16


def core_with(engine: Engine, **changes: Any) -> EngineCore:
    """The engine with another scheduler. Only one of them may have requests at a time."""
    plain = engine.core
    config = replace(plain.scheduler.config, **changes)
    assert not config.prefix_caching
    return EngineCore(MeasuredScheduler(config), plain.runner, plain.depth, clock=time.monotonic)


def compare_token_times(
    plain: EngineCore, promised: EngineCore, mix: Mix, capacity: float, options: argparse.Namespace
) -> None:
    target = promised.scheduler.config.target_token_time
    assert target is not None
    for load in LOADS:
        arrivals = mix.arrivals(load * capacity, options.seconds, seed=int(100 * load))
        limit = PATIENCE * options.seconds
        without, plain_share = play_measured(plain, arrivals, None, limit)
        within, share = play_measured(promised, arrivals, None, limit)
        print(
            f"{load:.0%} of capacity, {len(arrivals)} requests: 99th percentile of token gaps "
            f"{percentile(within.gaps, 0.99) / target:.2f} x target "
            f"({percentile(without.gaps, 0.99) / target:.2f} x without), "
            f"throughput {within.tokens_per_second / without.tokens_per_second:.2f} x, "
            f"median of first tokens {_median_first(within):.3f} s ({_median_first(without):.3f} s), "
            f"scheduler {share:.2%} of the time ({plain_share:.2%}), "
            f"sender {(within.sender + without.sender) / (within.seconds + without.seconds):.2%}",
            flush=True,
        )
    if isinstance(promised.scheduler, MeasuredScheduler):
        print(f"learnt: {promised.scheduler.describe()}", flush=True)


def _median_first(played: Played) -> float:
    return statistics.median(played.first_tokens(("",)))


def compare_floods(
    fair: EngineCore, fcfs: EngineCore, mix: Mix, capacity: float, options: argparse.Namespace
) -> None:
    seconds = options.seconds
    arrivals = mix.arrivals(OTHERS_LOAD * capacity, seconds, seed=4, tenants=OTHERS)
    count = int(FLOOD * capacity / 4 * seconds)
    flood = mix.at_once(count, seed=5, tenant="flood")
    limit = PATIENCE * seconds
    print(f"{len(arrivals)} requests of three tenants beside {count} at once of another:")
    if not arrivals:
        raise RuntimeError("no request came in this time: --seconds must be more")
    usual = percentile(play(fair, arrivals, OTHERS, limit).first_tokens(OTHERS), 0.95)
    print(f"alone: 95th percentile of first-token times {1e3 * usual:.0f} ms", flush=True)
    for name, core in (("fair", fair), ("fcfs", fcfs)):
        played = play(core, [*flood, *arrivals], OTHERS, limit)
        found = percentile(played.first_tokens(OTHERS), 0.95)
        least = "at least " if played.seconds >= limit else ""
        print(
            f"{name}: {least}{1e3 * found:.0f} ms, {least}{found / usual:.2f} x without the flood",
            flush=True,
        )


def attempt(what: str, part: Callable[[], None]) -> bool:
    """Whether a part went well; if not, says why, and the next one may begin."""
    try:
        part()
    except Exception:
        print(f"{what} failed:\n{traceback.format_exc()}", flush=True)
        return False
    return True


def lengths(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition("-")
    return int(shortest), int(longest or shortest)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(CONFIGS), default="qwen3-8b")
    parser.add_argument("--model", help="real weights instead: a name or a folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--kv-cache-memory", help="default: the engine's own choice")
    parser.add_argument("--short", type=lengths, default=(100, 500), help="prompt tokens, A-B")
    parser.add_argument("--long", type=int, default=8000, help="tokens of one prompt in ten")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument(
        "--target", type=float, default=0.03, help="seconds; 0: two full decode steps"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="how long requests come")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds that all may take")
    parser.add_argument("--only", choices=list(_PARTS))
    options = parser.parse_args(arguments)
    began = time.monotonic()
    longest_answer = max(options.answer, graph_steps(options.max_num_seqs))
    engine = open_engine(options, max(options.long, options.short[1], 16) + longest_answer)
    for name, value in report_facts(engine.decoder.device, this_command()).items():
        print(f"{name}: {value}")
    mix = Mix(options.short, options.long, options.answer, engine.decoder.spec.vocab_size)
    plain = core_with(engine)
    play(plain, mix.at_once(10, seed=1))  # what is done once
    full = play(plain, mix.at_once(2 * options.max_num_seqs, seed=2))
    capacity = 2 * options.max_num_seqs / full.seconds
    target = options.target or 2 * statistics.median(full.gaps)
    print(
        f"capacity {capacity:.2f} requests a second, target {1e3 * target:.1f} ms, "
        f"median step of a full batch {1e3 * statistics.median(full.gaps):.1f} ms, "
        f"{time.monotonic() - began:.0f} s so far",
        flush=True,
    )
    left = options.budget - (time.monotonic() - began)
    parts = _PARTS[options.only] if options.only else sum(_PARTS.values())
    if left < parts * options.seconds:
        options.seconds = max(_SHORTEST, left / parts)
        print(f"requests come for {options.seconds:.1f} s: {left:.0f} s of the budget are left")

    def token_times() -> None:
        promised = core_with(engine, target_token_time=target)
        play(promised, mix.arrivals(0.8 * capacity, options.seconds / 2, seed=3))  # it learns
        compare_token_times(plain, promised, mix, capacity, options)

    def floods() -> None:
        fair = core_with(engine, policy="fair", target_token_time=target)
        play(fair, mix.arrivals(0.8 * capacity, options.seconds / 2, seed=3, tenants=OTHERS))
        compare_floods(fair, plain, mix, capacity, options)

    done = [
        options.only == "flood" or attempt("token times", token_times),
        options.only == "token-times" or attempt("the flood", floods),
        attempt("the scheduler", lambda: print_comparisons(options.max_num_seqs, 200)),
    ]
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
