"""`quire batch`: answers a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from quire.cli import options
from quire.cli.option_groups import FileOptions, with_groups
from quire.cli.serve import check_installed
from quire.cli.terminal import say
from quire.errors import QuireError
from quire.frontend.progress import BatchBar

if TYPE_CHECKING:
    from quire.server.batches.run import BatchJob, BatchSummary, Report

_SOME_FAILED = 3
"""Exit code: all requests are answered, some of them with errors."""


@with_groups
def batch(
    requests: Annotated[
        Path,
        Argument(
            metavar="REQUESTS",
            help="Requests in OpenAI's batch format: .jsonl, or .parquet with pyarrow.",
        ),
    ],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Answers, .jsonl or .parquet; default: REQUESTS.answers.jsonl.",
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    served_model_name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="What requests call the model. Repeat for several."),
    ] = None,
    seed: options.Seed = 0,
    concurrency: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Requests under way; default: twice --max-num-seqs."),
    ] = None,
    replicas: Annotated[int, Option(min=1, metavar="N", help="Engines that share the work.")] = 1,
    ray: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help='Run the engines on this Ray cluster: "auto", or the address of its head.',
        ),
    ] = None,
    any_order: Annotated[
        bool,
        Option("--any-order", help="Write answers as they come; custom_id says which is which."),
    ] = False,
    restart: Annotated[
        bool, Option("--restart", help="Begin anew, whatever an earlier run has done.")
    ] = False,
    engine: options.EngineOptions = options.EngineOptions(),  # noqa: B008
    settings: FileOptions = FileOptions(),  # noqa: B008
) -> None:
    """Answer a file of requests, in its order.

    Chats, completions and embeddings, one per line.

    A run that was interrupted, even killed, resumes where it stopped when the same command is given
    again, and the file comes out as if nothing had happened. A request that fails has its error on
    its line; then the exit code is 3, and 1 if not all could be answered.

    \b
    quire batch requests.jsonl -o answers.jsonl
    quire batch requests.jsonl --model Qwen/Qwen3-32B --tensor-parallel-size 4
    quire batch requests.jsonl --served-model-name my-model --any-order
    quire batch requests.jsonl --model Qwen/Qwen3-8B --replicas 8 --ray auto

    \b
    A line of REQUESTS (docs/batches.md has more):
    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [...]}}
    """
    if any_order and ray is not None:
        raise QuireError(
            "--any-order: with --ray answers are written in the order of the requests; leave one of the two out"
        )
    check_installed("quire batch")
    from quire.server.batches.run import BatchJob, run_batch

    answers = output if output is not None else requests.parent / f"{requests.stem}.answers.jsonl"
    job = BatchJob(
        requests,
        answers,
        model,
        engine.keywords(),
        tuple(served_model_name or ()),
        seed,
        concurrency,
        restart,
        any_order,
        replicas,
    )
    try:
        with BatchBar() as bar:
            summary = (
                run_batch(job, bar.report) if ray is None else _run_on_ray(job, bar.report, ray)
            )
    except KeyboardInterrupt:
        say("interrupted; the same command resumes where this stopped")
        raise typer.Exit(130) from None
    rate = (
        f", {summary.num_tokens / max(summary.seconds, 1e-9):.1f} tokens/s"
        if summary.num_tokens
        else ""
    )
    resumed = f" ({summary.resumed} by an earlier run)" if summary.resumed else ""
    failed = f", {summary.failed} of them with errors" if summary.failed else ""
    say(f"{answers}: {summary.done} requests answered{resumed}{failed}{rate}")
    if summary.failed:
        raise typer.Exit(_SOME_FAILED)


def _run_on_ray(job: BatchJob, report: Report, address: str) -> BatchSummary:
    """The same on the machines of a cluster, by Ray Data; the files stay here."""
    try:
        from quire.cluster.ray_batch import cluster_at
    except ImportError as error:
        raise QuireError(f"--ray needs {error.name}: pip install 'quire[ray]'") from None
    from quire.server.batches.run import run_batch

    with cluster_at(address) as answer_all:
        return run_batch(job, report, answer_all)
