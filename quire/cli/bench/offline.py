"""`quire bench throughput`, `latency` and `compare`: the engine in this process, alone or next to another one."""

from __future__ import annotations

from typing import Annotated

from typer import Option

import quire.cli.bench.options as shared
from quire.cli import options


def throughput(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kernels: shared.Kernels = "auto",
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
    quire bench throughput --model Qwen/Qwen3-0.6B --device cuda --requests 256 --max-num-seqs 256
    """
    from quire.bench.jobs import Lengths
    from quire.bench.offline import measure_throughput, open_engine
    from quire.bench.report import Report

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    engine = {"device": device, "dtype": dtype, "quantization": quantization, "kernels": kernels}
    with open_engine(model, num_requests, prompts, answers, max_num_seqs, **engine) as (llm, jobs, facts):
        report = Report("Throughput", facts, (measure_throughput(llm, jobs, repeats),))
    shared.deliver(report, markdown, json_file)


def latency(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kernels: shared.Kernels = "auto",
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
    quire bench latency --prompt-tokens 1000 --new-tokens 16 --dtype float32
    """
    from quire.bench.jobs import Lengths
    from quire.bench.offline import measure_latency, open_engine
    from quire.bench.report import Report

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    engine = {"device": device, "dtype": dtype, "quantization": quantization, "kernels": kernels}
    with open_engine(model, num_requests, prompts, answers, max_num_seqs=1, **engine) as (llm, jobs, facts):
        report = Report("Latency", facts, (measure_latency(llm, jobs, repeats),))
    shared.deliver(report, markdown, json_file)


def compare(
    peer: Annotated[str, Option(metavar="transformers|llama-cpp|vllm|openai-url", help="The engine to compare with.")],
    url: Annotated[
        str | None, Option(metavar="URL", help="For openai-url: where it listens, with /v1 at the end.")
    ] = None,
    peer_batch: Annotated[
        int, Option(metavar="N", min=1, help="How many requests the peer gets at once, if it can't tell itself.")
    ] = 8,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    num_requests: shared.Requests = 16,
    prompt_tokens: shared.PromptTokens = "50-150",
    new_tokens: shared.NewTokens = "16-64",
    max_num_seqs: shared.MaxNumSeqs = 64,
    repeats: shared.Repeats = 3,
    markdown: shared.MarkdownFile = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Run the same requests through Quire and another engine, in turn, and print the ratio.

    Peers are not installed with Quire; one that is missing says what to install.

    \b
    quire bench compare --peer transformers
    quire bench compare --peer llama-cpp --requests 4
    quire bench compare --peer openai-url --url http://localhost:8000/v1 --peer-batch 32
    """
    from quire.bench.jobs import Lengths
    from quire.bench.offline import compare as run_both
    from quire.bench.offline import open_engine
    from quire.bench.peers import PeerSetting, open_peer
    from quire.bench.report import Report
    from quire.runner.device import pick_device, pick_dtype

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    where = pick_device(device)
    setting = PeerSetting(model, where, pick_dtype(dtype, where), peer_batch, prompts.high + answers.high, url)
    other = open_peer(peer, setting)  # first: if it is missing, nothing was loaded in vain
    engine = {"device": device, "dtype": dtype, "quantization": quantization}
    with open_engine(model, num_requests, prompts, answers, max_num_seqs, **engine) as (llm, jobs, facts):
        report = Report(f"Quire and {peer}", facts, (run_both(llm, other, jobs, repeats),))
    shared.deliver(report, markdown, json_file)
