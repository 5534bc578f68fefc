"""`quire bench throughput` and `latency`: the engine in this process."""

from __future__ import annotations

import quire.cli.bench.options as shared
from quire.cli import options
from quire.cli.option_groups import with_groups


@with_groups
def throughput(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    kernels: options.Kernels = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    num_requests: shared.Requests = 32,
    prompt_tokens: shared.PromptTokens = "100-300",
    new_tokens: shared.NewTokens = "64-128",
    max_num_seqs: shared.MaxNumSeqs = 64,
    repeats: shared.Repeats = 3,
    markdown: shared.MarkdownFile = None,
    json_file: shared.JsonFile = None,
) -> None:
    """How many tokens a second come out when many requests come in at once.

    \b
    quire bench throughput
    quire bench throughput --requests 8 --prompt-tokens 32 --new-tokens 16 --repeats 1
    quire bench throughput Qwen/Qwen3-0.6B --device cuda --requests 256 --max-num-seqs 256
    quire bench throughput Qwen/Qwen3-32B --tensor-parallel-size 4 --requests 256
    """
    from quire.tools.bench.jobs import Lengths
    from quire.tools.bench.offline import measure_throughput, open_engine
    from quire.tools.bench.report import Report

    prompts, answers = (
        Lengths.parse("--prompt-tokens", prompt_tokens),
        Lengths.parse("--new-tokens", new_tokens),
    )
    engine = {"device": device, "dtype": dtype, "quantization": quantization, "kernels": kernels}
    more = {"kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": tensor_parallel_size}
    with open_engine(model, num_requests, prompts, answers, max_num_seqs, **engine, **more) as (
        llm,
        jobs,
        facts,
    ):
        report = Report("Throughput", facts, (measure_throughput(llm, jobs, repeats),))
    shared.deliver(report, markdown, json_file)


@with_groups
def latency(
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    kernels: options.Kernels = "auto",
    tensor_parallel_size: options.TensorParallelSize = 1,
    num_requests: shared.Requests = 4,
    prompt_tokens: shared.PromptTokens = "128",
    new_tokens: shared.NewTokens = "64",
    repeats: shared.Repeats = 3,
    markdown: shared.MarkdownFile = None,
    json_file: shared.JsonFile = None,
) -> None:
    """How long a request takes that has the engine for itself.

    \b
    quire bench latency
    quire bench latency --quantization none
    quire bench latency --prompt-tokens 4000 --device cpu --kv-cache-dtype int8
    quire bench latency --prompt-tokens 1000 --new-tokens 16 --dtype float32
    """
    from quire.tools.bench.jobs import Lengths
    from quire.tools.bench.offline import measure_latency, open_engine
    from quire.tools.bench.report import Report

    prompts, answers = (
        Lengths.parse("--prompt-tokens", prompt_tokens),
        Lengths.parse("--new-tokens", new_tokens),
    )
    engine = {"device": device, "dtype": dtype, "quantization": quantization, "kernels": kernels}
    more = {"kv_cache_dtype": kv_cache_dtype, "tensor_parallel_size": tensor_parallel_size}
    with open_engine(model, num_requests, prompts, answers, max_num_seqs=1, **engine, **more) as (
        llm,
        jobs,
        facts,
    ):
        report = Report("Latency", facts, (measure_latency(llm, jobs, repeats),))
    shared.deliver(report, markdown, json_file)
