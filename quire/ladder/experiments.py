"""What the single ideas buy, each measured where it shows best, on the fastest kernels the machine has."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch

from quire.benchmark.engine_runs import run_one_by_one, run_together, time_to_first_token
from quire.benchmark.jobs import Lengths, random_jobs
from quire.benchmark.measure import Clock, Spread, timed, warm_up
from quire.benchmark.report import Bytes, Cell, Table, factor
from quire.engine.block_pool import BlockPool
from quire.errors import EngineError
from quire.ladder.engines import Engines
from quire.ladder.kv_cache import generate_with_kv_cache
from quire.ladder.naive import generate_naive
from quire.ladder.settings import HELLO, ClimbSettings
from quire.ladder.static_batching import serve_static_batches
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.models.spec import ModelSpec
from quire.outputs import RequestOutput
from quire.runner.kv_cache import bytes_per_block

Generate = Callable[..., list[int]]
SEEN_LATE = "Two steps are in flight at a time here, so who leaves is seen one step later."


def naive_against_cache(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """Answers of growing length to one short prompt. One long answer passes all shorter ones on its way."""
    prompt = llm.engine.tokenizer.encode(HELLO)
    times: dict[str, list[list[float]]] = {"naive": [], "cache": []}
    answers: list[list[int]] = []
    for generate in (generate_naive, generate_with_kv_cache):
        warm_up(partial(generate, llm.engine.decoder, prompt, settings.hello_lengths[-1]), _device(llm))
    for _ in range(settings.repeats):
        for name, generate in (("naive", generate_naive), ("cache", generate_with_kv_cache)):
            answer, marks = _time_marks(generate, llm.engine.decoder, prompt, settings.hello_lengths, clock)
            times[name].append(marks)
            answers.append(answer)
    _check_same("the naive loop and the cached one", answers)
    rows: list[tuple[Cell, ...]] = []
    for i, length in enumerate(settings.hello_lengths):
        naive, cached = (Spread(tuple(marks[i] for marks in times[name]), "s") for name in ("naive", "cache"))
        rows.append((length, naive, cached, cached.per(length, "tok/s"), factor(naive, cached)))
    note = f'"{HELLO}" ({len(prompt)} tokens), greedy, {settings.repeats} repeats, {_kernels(llm)}.'
    columns = ("new tokens", "naive", "KV cache", "KV cache rate", "factor")
    return Table("Naive loop and KV cache", note, columns, tuple(rows))


def cache_by_prompt_length(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """The longer the prompt, the more the naive loop repeats."""
    decoder, new = llm.engine.decoder, settings.prompt_new_tokens
    rows: list[tuple[Cell, ...]] = []
    for length in settings.prompt_lengths:
        job = random_jobs(1, Lengths(length, length), Lengths(new, new), decoder.spec.vocab_size, seed=length)[0]
        for generate in (generate_naive, generate_with_kv_cache):
            warm_up(partial(generate, decoder, job.prompt, new), _device(llm))
        naive: list[float] = []
        cached: list[float] = []
        for _ in range(settings.repeats):
            for generate, times in ((generate_naive, naive), (generate_with_kv_cache, cached)):
                times.append(timed(partial(generate, decoder, job.prompt, new), _device(llm), clock)[0])
        slow, fast = Spread(tuple(naive), "s"), Spread(tuple(cached), "s")
        rows.append((length, slow, fast, factor(slow, fast)))
    note = f"{new} new tokens after random prompts, {settings.repeats} repeats, {_kernels(llm)}."
    columns = ("prompt tokens", "naive", "KV cache", "factor")
    return Table("Cache speed-up by prompt length", note, columns, tuple(rows))


def memory_of_allocations(spec: ModelSpec, engines: Engines, settings: ClimbSettings) -> Table:
    """What is allocated against what is used when nobody knows how long an answer will be."""
    source = random.Random(0)
    longest = settings.max_model_len
    lengths = [source.randint(longest // 16, longest) for _ in range(settings.memory_sequences)]
    per_token = bytes_per_block(spec, 1, engines.dtype)
    used = sum(lengths) * per_token
    rows: list[tuple[Cell, ...]] = [
        _allocation("contiguous, the longest for each", len(lengths) * longest, used, per_token)
    ]
    for block_size in (64, 16):
        pool = BlockPool(1 + sum(-(-length // block_size) for length in lengths))
        blocks = 0
        for length in lengths:
            for _ in range(-(-length // block_size)):
                assert pool.take() is not None
                blocks += 1
        rows.append(_allocation(f"paged, blocks of {block_size}", blocks * block_size, used, per_token))
    note = (
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens; the longest allowed is {longest}. "
        f"A token takes {per_token:,} bytes in {_name(engines)}."
    )
    columns = ("allocation", "allocated", "used", "share used")
    return Table("Memory of contiguous and paged caches", note, columns, tuple(rows))


def batching(llm: LLM, settings: ClimbSettings, clock: Clock) -> Table:
    """Many requests of varied length: one by one, in static batches, and in continuous ones."""
    jobs = random_jobs(
        settings.batch_jobs, settings.batch_prompt, settings.batch_answer, llm.engine.decoder.spec.vocab_size, seed=1
    )
    salts = map("batching {}".format, count())  # every run starts from an empty cache
    ways: dict[str, Callable[[], list[tuple[int, ...]]]] = {
        "one by one": lambda: _tokens(run_one_by_one(llm, jobs, next(salts))),
        f"static batches of {settings.batch_seqs}": lambda: [
            answer.tokens
            for answer in serve_static_batches(llm.engine.decoder, jobs, settings.batch_seqs, max_wait_ms=50)
        ],
        f"continuous, {settings.batch_seqs} at once": lambda: _tokens(run_together(llm, jobs, next(salts))),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    answers: list[list[tuple[int, ...]]] = []
    for run in ways.values():
        warm_up(run, _device(llm))
    for _ in range(settings.batch_repeats):
        for name, run in ways.items():
            seconds, tokens = timed(run, _device(llm), clock)
            times[name].append(seconds)
            answers.append(tokens)
    _check_same("the ways of batching", answers)
    new_tokens = sum(job.new_tokens for job in jobs)
    spreads = {name: Spread(tuple(values), "s") for name, values in times.items()}
    slowest = spreads["one by one"]
    rows = tuple((name, s, s.per(new_tokens, "tok/s"), factor(slowest, s)) for name, s in spreads.items())
    note = (
        f"{len(jobs)} requests at once, prompts of {settings.batch_prompt} tokens, answers of {settings.batch_answer}, "
        f"{new_tokens} new tokens in all, {settings.batch_repeats} repeats, {_kernels(llm)}."
    )
    return Table("Batching", note, ("how", "time", "throughput", "factor"), rows)


def shared_system_prompt(llm: LLM, settings: ClimbSettings) -> Table:
    """Time to first token of requests that begin alike, one after the other."""
    vocab_size = llm.engine.decoder.spec.vocab_size
    first: list[float] = []
    later: list[float] = []
    cached: list[int] = []
    for repeat in range(settings.repeats):
        jobs = random_jobs(
            settings.chat_requests, Lengths(8, 16), Lengths(2, 2), vocab_size, settings.system_tokens, repeat
        )
        warm_up(partial(run_one_by_one, llm, jobs[:1], salt=f"warm-up {repeat}"), _device(llm))
        outputs = run_one_by_one(llm, jobs, salt=f"chat {repeat}")
        first.append(time_to_first_token(outputs[0]))
        later += [time_to_first_token(output) for output in outputs[1:]]
        cached += [output.metrics.cached_tokens for output in outputs[1:]]
    once, again = Spread(tuple(first), "s"), Spread(tuple(later), "s")
    rows: tuple[tuple[Cell, ...], ...] = (
        ("the first", 0, once, ""),
        ("later ones", min(cached), again, factor(once, again)),
    )
    note = (
        f"{settings.chat_requests} requests with {settings.system_tokens} tokens in common and 8 to 16 of their own, "
        f"{settings.repeats} repeats from an empty cache, {_kernels(llm)}."
    )
    columns = ("request", "tokens from the cache", "time to first token", "factor")
    return Table("Time to first token with a shared system prompt", note, columns, rows)


def leaving_early(llm: LLM, settings: ClimbSettings) -> Table:
    """Who computes in each step when one request is shorter than its neighbours and another is waiting."""
    rows, vocab_size = settings.max_num_seqs, llm.engine.decoder.spec.vocab_size
    sizes = [3, *[7] * (rows - 1), 3]
    jobs = [
        random_jobs(1, Lengths(6, 6), Lengths(new, new), vocab_size, seed=seed)[0] for seed, new in enumerate(sizes)
    ]
    log = llm.engine.step_log
    seen = len(log)
    outputs = run_together(llm, jobs, salt="leaving early")
    names = {output.request_id: chr(ord("A") + i) for i, output in enumerate(outputs)}
    entries = [entry.step for entry in list(log)[seen:]]
    table = tuple(
        (
            number,
            " ".join(names[entry.request_id] for entry in step.scheduled),
            # Whoever ran before is told to have ended in our first step.
            " ".join(names[gone.request_id] for gone in step.finished if gone.request_id in names),
            " ".join(names[new.request_id] for new in step.admitted),
            step.num_tokens,
        )
        for number, step in enumerate(entries)
        if step.scheduled
    )
    note = (
        f"{len(jobs)} requests, room for {rows} at once; A and {names[outputs[-1].request_id]} want 3 tokens, "
        "the others 7. Read from the step log."
    )
    if llm.engine.core.depth > 1:
        note += f" {SEEN_LATE}"
    return Table(
        "Sequences that finish early leave at once", note, ("step", "computes", "left", "joined", "tokens"), table
    )


def _time_marks(
    generate: Generate, decoder: Decoder, prompt: Sequence[int], lengths: Sequence[int], clock: Clock
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
        raise EngineError(f"{who} gave different tokens for the same prompts: please report this as a bug")


def _allocation(name: str, tokens: int, used: int, per_token: int) -> tuple[Cell, ...]:
    allocated = tokens * per_token
    return name, Bytes(allocated), Bytes(used), f"{used / allocated:.0%}"


def _kernels(llm: LLM) -> str:
    return f"{llm.engine.decoder.kernels.name} kernels"


def _device(llm: LLM) -> torch.device:
    return llm.engine.decoder.embedding.device


def _name(engines: Engines) -> str:
    return str(engines.dtype).removeprefix("torch.")
