"""`quire bench compare`: Quire next to other engines."""

from __future__ import annotations

from typing import Annotated

from typer import Option

import quire.cli.bench.options as shared
from quire.cli import options
from quire.cli.option_groups import with_groups


@with_groups
def compare(
    peer: Annotated[
        list[str],
        Option(
            metavar="transformers|llama-cpp|openvino|vllm|openai-url",
            help="The engine to compare with. Repeat. NAME=PYTHON: it is installed for another interpreter.",
        ),
    ],
    url: Annotated[
        str | None,
        Option(metavar="URL", help="For openai-url: where it listens, with /v1 at the end."),
    ] = None,
    peer_batch: Annotated[
        int,
        Option(
            metavar="N",
            min=1,
            help="How many requests the peer gets at once, if it can't tell itself.",
        ),
    ] = 8,
    model: options.ModelByPlace = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    num_requests: Annotated[
        int | None,
        Option(
            "--requests", metavar="N", min=1, help="How many requests at once, and nothing else."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, Option(metavar="N|LOW-HIGH", help="With --requests: how long prompts are.")
    ] = "",
    new_tokens: Annotated[
        str, Option(metavar="N|LOW-HIGH", help="With --requests: how many follow.")
    ] = "",
    max_num_seqs: shared.MaxNumSeqs = 64,
    repeats: shared.Repeats = 3,
    limit: Annotated[
        float,
        Option(
            metavar="SECONDS",
            min=1,
            help="The most that one measure of one engine may take before it is cut.",
        ),
    ] = 300,
    markdown: shared.MarkdownFile = None,
    json_file: shared.JsonFile = None,
) -> None:
    """Run the same requests through Quire and other engines, in turn, and print the ratios.

    Prompts, single answers, many requests at once, requests that begin alike, start-up and memory;
    with --requests only requests of the given lengths. Each engine runs in a process of its own.
    Peers are not installed with Quire; one that is missing says what to install. An engine that
    takes longer than --limit for a measure is stopped and started again, and the table says which
    measure that was.

    \b
    quire bench compare --peer llama-cpp --peer openvino=peers/openvino/bin/python
    quire bench compare --peer transformers --requests 16 --prompt-tokens 50-150 --new-tokens 16-64
    quire bench compare --peer openai-url --url http://localhost:8000/v1 --peer-batch 32
    """
    from quire.errors import InvalidRequestError
    from quire.tools.bench.comparison import STANDARD, Workload, compare_engines
    from quire.tools.bench.jobs import Lengths

    workloads: tuple[Workload, ...] = STANDARD
    if num_requests is not None:
        prompts = Lengths.parse("--prompt-tokens", prompt_tokens or "50-150")
        answers = Lengths.parse("--new-tokens", new_tokens or "16-64")
        workloads = (Workload(f"{num_requests} requests at once", num_requests, prompts, answers),)
    elif prompt_tokens or new_tokens:
        raise InvalidRequestError(
            "--requests", "must say how many requests there are of --prompt-tokens, --new-tokens"
        )
    peers = {kind: python for kind, _, python in (name.partition("=") for name in peer)}
    own = {
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max(512, max_num_seqs),
        "quantization": quantization,
    }
    report = compare_engines(
        model, peers, workloads, repeats, device, dtype, own, peer_batch, url, limit
    )
    shared.deliver(report, markdown, json_file)
