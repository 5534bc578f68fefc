"""What the single ideas buy, each measured where it shows best, on the fastest kernels the machine
has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.errors import EngineError
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.outputs import RequestOutput
from quire.runner.kv_cache import token_bytes
from quire.sampling_params import SamplingParams
from quire.tools.bench.jobs import Job, Lengths, random_jobs
from quire.tools.bench.ladder.settings import ClimbSettings
from quire.tools.bench.measure import Clock, in_turn, warm_up
from quire.tools.bench.offline import (
    device_of,
    run_one_by_one,
    run_together,
    time_to_first_token,
    token_source,
)
from quire.tools.bench.report import Bytes, Factor, Row, Table
from quire.tools.bench.spread import Spread
from quire.tools.ladder.contiguous import ContiguousCache
from quire.tools.ladder.kv_cache import generate_with_kv_cache
from quire.tools.ladder.naive import generate_naive
from quire.tools.ladder.static_batching import serve_static_batches

Generate = Callable[..., list[int]]
HELLO = "Hello, I am a language model"
SEEN_LATE = "Two steps are in flight at a time here, so who leaves is seen one step later."
_LOOPS: dict[str, Generate] = {"naive": generate_naive, "cache": generate_with_kv_cache}


def naive_against_cache(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """Answers of growing length to one short prompt. One long answer passes all shorter ones on its
    way.
    """
    prompt, lengths = llm.engine.tokenizer.encode(HELLO), settings.hello_lengths
    times: dict[str, list[list[float]]] = {"naive": [], "cache": []}
    answers: list[list[int]] = []
    for generate in _LOOPS.values():
        warm_up(partial(generate, llm.engine.decoder, prompt, lengths[-1]), device_of(llm))
    for _ in range(settings.repeats):
        for name, generate in _LOOPS.items():
            answer, marks = _time_marks(generate, llm.engine.decoder, prompt, lengths, clock)
            times[name].append(marks)
            answers.append(answer)
    _check_same("the naive loop and the cached one", answers)
    rows: list[Row] = []
    for i, length in enumerate(lengths):
        naive, cached = (Spread.of(marks[i] for marks in each) for each in times.values())
        each = naive.each(length), cached.each(length)
        rows.append((length, naive, cached, cached.per(length), Factor.of(naive, cached), *each))
    note = f'"{HELLO}" ({len(prompt)} tokens), greedy, {settings.repeats} repeats, {_kernels(llm)}.'
    columns = (
        "new tokens",
        "naive",
        "KV cache",
        "KV cache rate",
        "factor",
        "naive per token",
        "KV cache per token",
    )
    return Table("Naive loop and KV cache", note, columns, tuple(rows))


def cache_by_prompt_length(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """The longer the prompt, the more the naive loop repeats."""
    new = settings.prompt_new_tokens
    rows: list[Row] = []
    for length in settings.prompt_lengths:
        prompt = _job(llm, length, new, seed=length).token_ids
        ways: dict[str, Callable[[], list[int]]] = {
            name: partial(generate, llm.engine.decoder, prompt, new)
            for name, generate in _LOOPS.items()
        }
        for run in ways.values():
            warm_up(run, device_of(llm))
        (naive, _), (cached, _) = in_turn(ways, settings.repeats, device_of(llm), clock).values()
        rows.append((length, naive, cached, Factor.of(naive, cached)))
    note = f"{new} new tokens after random prompts, {settings.repeats} repeats, {_kernels(llm)}."
    columns = ("prompt tokens", "naive", "KV cache", "factor")
    return Table("Cache speed-up by prompt length", note, columns, tuple(rows))


def memory_of_allocations(decoder: Decoder, settings: ClimbSettings) -> Table:
    """What is allocated against what is used when nobody knows how long an answer will be: a
    contiguous cache is made, and the engine's scheduler gives blocks to the same sequences.
    """
    source = random.Random(0)
    longest = settings.max_model_len
    lengths = [source.randint(longest // 16, longest) for _ in range(settings.memory_sequences)]
    per_token = token_bytes(decoder.spec, 1, decoder.dtype)
    used = sum(lengths) * per_token
    allocated = {
        "contiguous, the longest for each": ContiguousCache(
            decoder, len(lengths), longest
        ).num_bytes
    }
    for size in (64, 16):
        allocated[f"paged, blocks of {size}"] = (
            _blocks_taken(lengths, longest, size) * size * per_token
        )
    rows = tuple(
        (name, Bytes(taken), Bytes(used), f"{used / taken:.0%}")
        for name, taken in allocated.items()
    )
    dtype = str(decoder.dtype).removeprefix("torch.")
    note = (
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens; the longest allowed is {longest}. "
        f"A token takes {per_token:,} bytes in {dtype}. Allocated: by a contiguous cache, and by the block pool."
    )
    return Table(
        "Memory of contiguous and paged caches",
        note,
        ("allocation", "allocated", "used", "share used"),
        rows,
    )


def _blocks_taken(lengths: Sequence[int], longest: int, block_size: int) -> int:
    """Blocks that the scheduler gives to prompts of these lengths when all run at once."""
    most = len(lengths) * -(-longest // block_size)
    config = SchedulerConfig(
        num_blocks=1 + most,
        max_num_seqs=len(lengths),
        max_batched_tokens=sum(lengths),
        max_model_len=longest + 1,
        block_size=block_size,
        prefix_caching=False,
    )
    scheduler = Scheduler(config)
    for number, length in enumerate(lengths):
        for request in make_requests(
            str(number), [number] * length, SamplingParams(max_tokens=1), 0
        ):
            scheduler.add(request, 0.0)
    step = scheduler.schedule(0.0)
    assert len(step.scheduled) == len(lengths)
    return most - step.num_free_blocks


def batching(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """Many requests of varied length: one by one, in static batches, and in continuous ones."""
    decoder, size = llm.engine.decoder, settings.batch_seqs
    jobs = random_jobs(
        settings.batch_jobs, settings.batch_prompt, settings.batch_answer, token_source(llm, seed=1)
    )

    def static() -> list[tuple[int, ...]]:
        prompts, new = [job.token_ids for job in jobs], [job.max_tokens for job in jobs]
        answers = serve_static_batches(
            decoder, prompts, new, [0.0] * len(jobs), size, max_wait_ms=50
        )
        return [answer.tokens for answer in answers]

    salts = map("batching {}".format, count())  # every run starts from an empty cache
    ways: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "one by one": lambda: _tokens(run_one_by_one(llm, jobs, next(salts))),
        f"static batches of {size}": static,
        f"continuous, {size} at once": lambda: _tokens(run_together(llm, jobs, next(salts))),
    }
    for run in ways.values():
        warm_up(run, device_of(llm))
    found = in_turn(ways, settings.batch_repeats, device_of(llm), clock)
    _check_same(
        "the ways of batching", [answer for _, answers in found.values() for answer in answers]
    )
    new_tokens = sum(job.max_tokens for job in jobs)
    slowest = found["one by one"][0]
    rows = tuple(
        (name, time, time.per(new_tokens), Factor.of(slowest, time))
        for name, (time, _) in found.items()
    )
    note = (
        f"{len(jobs)} requests at once, prompts of {settings.batch_prompt} tokens, answers of {settings.batch_answer}, "
        f"{new_tokens} new tokens in all, {settings.batch_repeats} repeats, {_kernels(llm)}."
    )
    return Table("Batching", note, ("how", "time", "throughput", "factor"), rows)


def shared_system_prompt(llm: LLM, settings: ClimbSettings) -> Table:
    """Time to first token of requests that begin alike, one after the other."""
    first: list[RequestOutput] = []
    later: list[RequestOutput] = []
    for repeat in range(settings.repeats):
        own, new, source = Lengths(8, 16), Lengths(2, 2), token_source(llm, repeat)
        jobs = random_jobs(settings.chat_requests, own, new, source, settings.system_tokens)
        warm_up(partial(run_one_by_one, llm, jobs[:1], salt=f"warm-up {repeat}"), device_of(llm))
        outputs = run_one_by_one(llm, jobs, salt=f"chat {repeat}")
        first.append(outputs[0])
        later += outputs[1:]
    once, again = (Spread.of(map(time_to_first_token, outputs)) for outputs in (first, later))
    cached = min(output.metrics.cached_tokens for output in later)
    rows: tuple[Row, ...] = (
        ("the first", 0, once, ""),
        ("later ones", cached, again, Factor.of(once, again)),
    )
    note = (
        f"{settings.chat_requests} requests with {settings.system_tokens} tokens in common and 8 to 16 of their own, "
        f"{settings.repeats} repeats from an empty cache, {_kernels(llm)}."
    )
    columns = ("request", "tokens from the cache", "time to first token", "factor")
    return Table("Time to first token with a shared system prompt", note, columns, rows)


def leaving_early(llm: LLM, settings: ClimbSettings) -> Table:
    """Who computes in each step when one request is shorter than its neighbours and another is
    waiting.
    """
    room = settings.max_num_seqs
    jobs = [_job(llm, 6, new, seed) for seed, new in enumerate([3, *[7] * (room - 1), 3])]
    log = llm.engine.step_log
    seen = len(log)
    outputs = run_together(llm, jobs, salt="leaving early")
    names = {output.request_id: chr(ord("A") + i) for i, output in enumerate(outputs)}
    rows = tuple(
        (
            number,
            " ".join(names[entry.request_id] for entry in step.scheduled),
            # Whoever ran before is told to have ended in our first step.
            " ".join(names[gone.request_id] for gone in step.finished if gone.request_id in names),
            " ".join(names[new.request_id] for new in step.admitted),
            step.num_tokens,
        )
        for number, step in enumerate(entry.step for entry in list(log)[seen:])
        if step.scheduled
    )
    note = (
        f"{len(jobs)} requests, room for {room} at once; A and {names[outputs[-1].request_id]} want 3 tokens, "
        "the others 7. Read from the step log."
    )
    if llm.engine.core.depth > 1:
        note += f" {SEEN_LATE}"
    columns = ("step", "computes", "left", "joined", "tokens")
    return Table("Sequences that finish early leave at once", note, columns, rows)


def _job(llm: LLM, prompt: int, new: int, seed: int) -> Job:
    return random_jobs(1, Lengths(prompt, prompt), Lengths(new, new), token_source(llm, seed))[0]


def _time_marks(
    generate: Generate,
    decoder: Decoder,
    prompt: Sequence[int],
    lengths: Sequence[int],
    clock: Clock,
) -> tuple[list[int], list[float]]:
    """An answer of the last length, and when each length was reached."""
    marks: list[float] = []
    length = 0
    start = clock()

    def note(_: int) -> None:
        nonlocal length
        length += 1
        if length in lengths:
            marks.append(clock() - start)

    return generate(decoder, prompt, lengths[-1], note), marks


def _tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def _check_same(who: str, answers: Sequence[object]) -> None:
    if any(answer != answers[0] for answer in answers):
        raise EngineError(
            f"{who} gave different tokens for the same prompts: please report this as a bug"
        )


def _kernels(llm: LLM) -> str:
    return f"{llm.engine.decoder.kernels.name} kernels"
