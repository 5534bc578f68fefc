"""`quire bench compare`: Quire next to another engine."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli import options
from quire.cli.bench_options import (
    JsonFile,
    MarkdownFile,
    MaxNumSeqs,
    NewTokens,
    PromptTokens,
    Repeats,
    Requests,
    deliver,
)


def compare(
    peer: Annotated[
        str, typer.Option(metavar="transformers|llama-cpp|vllm|openai-url", help="The engine to compare with.")
    ],
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="For openai-url: where it listens, with /v1 at the end.")
    ] = None,
    peer_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many requests the peer gets at once, if it can't tell itself.")
    ] = 8,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    num_requests: Requests = 16,
    prompt_tokens: PromptTokens = "50-150",
    new_tokens: NewTokens = "16-64",
    max_num_seqs: MaxNumSeqs = 64,
    repeats: Repeats = 3,
    markdown: MarkdownFile = None,
    json_file: JsonFile = None,
) -> None:
    """Run the same requests through Quire and another engine, in turn, and print the ratio.

    Peers are not installed with Quire; one that is missing says what to install.

    \b
    quire bench compare --peer transformers
    quire bench compare --peer llama-cpp --requests 4
    quire bench compare --peer openai-url --url http://localhost:8000/v1 --peer-batch 32
    """
    from quire.benchmark.compare import compare as run_both
    from quire.benchmark.jobs import Lengths, random_jobs
    from quire.benchmark.machine import report_facts
    from quire.benchmark.peers import PeerSetting, open_peer
    from quire.benchmark.report import Report
    from quire.llm import LLM
    from quire.runner.device import pick_device, pick_dtype

    prompts, answers = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--new-tokens", new_tokens)
    longest = prompts.high + answers.high
    where = pick_device(device)
    setting = PeerSetting(model, where, pick_dtype(dtype, where), peer_batch, longest, url)
    other = open_peer(peer, setting)  # first: if it is missing, nothing was loaded in vain
    with LLM(
        model,
        device=device,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        max_batched_tokens=max(512, max_num_seqs),
    ) as llm:
        facts = report_facts(where) | {"model": llm.description}
        jobs = random_jobs(num_requests, prompts, answers, llm.engine.decoder.spec.vocab_size)
        table = run_both(llm, other, jobs, repeats)
    deliver(Report(f"Quire and {peer}", facts, (table,)), markdown, json_file)
