"""`quire bench throughput` and `quire bench latency`: the engine alone."""

from __future__ import annotations

from quire.cli import options
from quire.cli.bench_options import (
    JsonFile,
    Kernels,
    MarkdownFile,
    MaxNumSeqs,
    NewTokens,
    PromptTokens,
    Repeats,
    Requests,
    deliver,
)


def throughput(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: Kernels = "auto",
    num_requests: Requests = 32,
    prompt_tokens: PromptTokens = "100-300",
    new_tokens: NewTokens = "64-128",
    max_num_seqs: MaxNumSeqs = 64,
    repeats: Repeats = 3,
    markdown: MarkdownFile = None,
    json_file: JsonFile = None,
) -> None:
    """How many tokens a second come out when many requests come in at once.

    \b
    quire bench throughput
    quire bench throughput --requests 8 --prompt-tokens 32 --new-tokens 16 --repeats 1
    quire bench throughput --model Qwen/Qwen3-0.6B --device cuda --requests 256 --max-num-seqs 256
    """
    from quire.benchmark.jobs import Lengths, random_jobs
    from quire.benchmark.machine import report_facts
    from quire.benchmark.report import Report
    from quire.benchmark.throughput import measure_throughput
    from quire.llm import LLM

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    with LLM(
        model,
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_num_seqs=max_num_seqs,
        max_model_len=prompts.high + answers.high,
        max_batched_tokens=max(512, max_num_seqs),
    ) as llm:
        decoder = llm.engine.decoder
        facts = report_facts(decoder.embedding.device) | {"model": llm.description}
        jobs = random_jobs(num_requests, prompts, answers, decoder.spec.vocab_size)
        table = measure_throughput(llm, jobs, repeats)
    deliver(Report("Throughput", facts, (table,)), markdown, json_file)


def latency(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: Kernels = "auto",
    num_requests: Requests = 4,
    prompt_tokens: PromptTokens = "128",
    new_tokens: NewTokens = "64",
    repeats: Repeats = 3,
    markdown: MarkdownFile = None,
    json_file: JsonFile = None,
) -> None:
    """How long a request takes that has the engine for itself.

    \b
    quire bench latency
    quire bench latency --prompt-tokens 1000 --new-tokens 16 --dtype float32
    """
    from quire.benchmark.jobs import Lengths, random_jobs
    from quire.benchmark.machine import report_facts
    from quire.benchmark.report import Report
    from quire.benchmark.throughput import measure_latency
    from quire.llm import LLM

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    longest = prompts.high + answers.high
    with LLM(model, device=device, dtype=dtype, kernels=kernels, max_num_seqs=1, max_model_len=longest) as llm:
        decoder = llm.engine.decoder
        facts = report_facts(decoder.embedding.device) | {"model": llm.description}
        jobs = random_jobs(num_requests, prompts, answers, decoder.spec.vocab_size)
        table = measure_latency(llm, jobs, repeats)
    deliver(Report("Latency", facts, (table,)), markdown, json_file)
