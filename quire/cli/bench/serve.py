"""`quire bench serve`: measure any server that has OpenAI's API.

Options have the names of `vllm bench serve` where it has the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from quire.cli.bench.options import deliver
from quire.cli.option_groups import with_groups
from quire.cli.options import SentOptions, given_parameters
from quire.cli.terminal import say
from quire.errors import InvalidRequestError, QuireError

_KEY = Option(
    metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="If the server wants one."
)


@with_groups
def serve(
    base_url: Annotated[str, Option(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    backend: Annotated[
        str, Option(metavar="openai|openai-chat", help="Completions, or chat completions.")
    ] = "openai",
    endpoint: Annotated[
        str | None, Option(metavar="PATH", help="Default: the backend's own.")
    ] = None,
    model: Annotated[
        str | None, Option("--model", "-m", metavar="M", help="Default: the server's first.")
    ] = None,
    api_key: Annotated[str | None, _KEY] = None,
    dataset_name: Annotated[
        str,
        Option(metavar="random|prefix_repetition|custom", help="What to ask; custom: from a file."),
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        Option(metavar="FILE", help='For custom: lines like {"prompt": "…", "output_tokens": 9}.'),
    ] = None,
    num_prompts: Annotated[int, Option(min=1, metavar="N", help="How many requests.")] = 100,
    request_rate: Annotated[
        str,
        Option(
            metavar="R,…",
            help="Requests a second; inf: all at once. Several: one run each, with --goodput.",
        ),
    ] = "inf",
    burstiness: Annotated[
        float,
        Option(metavar="B", help="1: Poisson arrivals; less: in bursts; more: evenly spread."),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, Option(metavar="N", help="Requests under way at a time.")
    ] = None,
    random_input_len: Annotated[
        int, Option(metavar="N", help="Prompt tokens (of words: about).")
    ] = 128,
    random_output_len: Annotated[int, Option(metavar="N", help="New tokens.")] = 128,
    random_range_ratio: Annotated[
        float, Option(metavar="R", help="Lengths vary from 1-R to 1+R times the above.")
    ] = 0.0,
    random_prefix_len: Annotated[
        int, Option(metavar="N", help="Tokens all prompts begin with.")
    ] = 0,
    prefix_repetition_prefix_len: Annotated[
        int, Option(metavar="N", help="Tokens of a shared prefix.")
    ] = 256,
    prefix_repetition_suffix_len: Annotated[
        int, Option(metavar="N", help="Tokens after it.")
    ] = 256,
    prefix_repetition_num_prefixes: Annotated[
        int, Option(metavar="N", help="How many prefixes.")
    ] = 10,
    prefix_repetition_output_len: Annotated[int, Option(metavar="N", help="New tokens.")] = 128,
    custom_output_len: Annotated[
        int, Option(metavar="N", help="New tokens where the file says nothing.")
    ] = 256,
    vocab_size: Annotated[
        int | None,
        Option(metavar="N", help="Send random token ids below N, not words: lengths are exact."),
    ] = None,
    sampling: SentOptions = SentOptions(),  # noqa: B008
    extra_body: Annotated[
        str, Option(metavar="JSON", help="Further fields of each request.")
    ] = "{}",
    goodput: Annotated[
        list[str] | None,
        Option(
            metavar="NAME:MS", help="ttft, tpot, itl (P99) or e2el a good request keeps. Repeat."
        ),
    ] = None,
    percentile_metrics: Annotated[
        str, Option(metavar="NAMES", help="What the table shows.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, Option(metavar="P,…", help="Percentiles to compute.")
    ] = "99",
    num_warmups: Annotated[
        int, Option(min=0, metavar="N", help="Requests sent before, not counted.")
    ] = 0,
    seed: Annotated[int, Option(metavar="S", help="Of prompts and arrivals.")] = 0,
    result_file: Annotated[
        Path | None, Option(metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    save_detailed: Annotated[
        bool, Option("--save-detailed", help="With every request's times.")
    ] = False,
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="Draw latencies: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Send a server requests and measure what its clients see, in the terms of `vllm bench serve`.

    \b
    quire bench serve --num-prompts 64 --max-concurrency 32 --ignore-eos
    quire bench serve --request-rate 1,2,4,8 --goodput ttft:500 --goodput itl:50 \\
        --result-file run.json --plot run.png
    """
    import asyncio

    from quire.tools.bench.jobs import (
        Lengths,
        TokenSource,
        check_least,
        file_jobs,
        prefix_jobs,
        random_jobs,
    )
    from quire.tools.bench.machine import report_facts
    from quire.tools.bench.plot import check_plotting, plot_rates, plot_requests
    from quire.tools.bench.serve.figures import Metrics, RateResult, rates_report, serving_report
    from quire.tools.bench.serve.load import Load, measure_server

    prompts = Lengths.around("--random-input-len", random_input_len, random_range_ratio)
    answers = Lengths.around("--random-output-len", random_output_len, random_range_ratio)
    check_least("--random-prefix-len", random_prefix_len, 0)
    prefixes = {
        "num_prefixes": prefix_repetition_num_prefixes,
        "prefix_len": prefix_repetition_prefix_len,
        "suffix_len": prefix_repetition_suffix_len,
        "output_len": prefix_repetition_output_len,
    }
    for name, value in prefixes.items():
        check_least(f"--prefix-repetition-{name.replace('_', '-')}", value)
    check_least("--custom-output-len", custom_output_len)
    source = TokenSource(seed, vocab_size)
    if dataset_name == "random":
        jobs = random_jobs(num_prompts, prompts, answers, source, random_prefix_len)
    elif dataset_name == "prefix_repetition":
        jobs = prefix_jobs(num_prompts, source, **prefixes)
    elif dataset_name != "custom":
        message = f"must be one of random, prefix_repetition, custom, not {dataset_name!r}"
        raise InvalidRequestError("--dataset-name", message)
    elif dataset_path is None:
        raise InvalidRequestError("--dataset-path", "says which file --dataset-name custom reads")
    else:
        jobs = file_jobs(dataset_path, num_prompts, custom_output_len)
    rates = _rates(request_rate)
    sent = given_parameters(sampling)
    ignore_eos = sent.pop("ignore_eos", False)
    temperature = sent.pop("temperature", None)
    extra = sent | _json_object(extra_body)
    load = Load(
        backend,
        endpoint,
        model,
        rates[0],
        burstiness,
        max_concurrency,
        ignore_eos,
        temperature,
        extra,
        seed,
    )
    metrics = Metrics.parse(goodput or (), percentile_metrics, metric_percentiles)
    if len(rates) > 1 and (not metrics.goodput or save_detailed):
        raise InvalidRequestError(
            "--request-rate", "of several needs --goodput, and goes without --save-detailed"
        )
    if save_detailed and result_file is None:
        raise InvalidRequestError("--save-detailed", "needs --result-file")
    if plot is not None:
        check_plotting()
    facts = report_facts() | {"server": base_url}
    if len(rates) > 1:
        runs = []
        for rate in rates:
            say(f"{rate:g} requests a second …")
            load, results, duration = asyncio.run(
                measure_server(
                    base_url, api_key, replace(load, request_rate=rate), jobs, num_warmups
                )
            )
            runs.append(RateResult(rate, results, duration))
        deliver(rates_report(facts, load, dataset_name, runs, metrics), None, result_file)
        if plot is not None:
            shares = [(run.rate, run.good_share(metrics)) for run in runs]
            plot_rates(plot, f"{load.model} at {base_url}", shares)
        return
    load, results, duration = asyncio.run(
        measure_server(base_url, api_key, load, jobs, num_warmups)
    )
    report = serving_report(facts, load, dataset_name, results, duration, metrics, save_detailed)
    deliver(report, None, result_file)
    if not any(result.is_success for result in results):
        raise QuireError(f"no request succeeded; the first failed so: {results[0].error}")
    if plot is not None:
        plot_requests(plot, f"{load.model} at {base_url}", results)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    several = len(rates) > 1
    if not rates or any(not rate > 0 or (several and math.isinf(rate)) for rate in rates):
        raise InvalidRequestError(
            "--request-rate", f"must be inf or numbers above 0 like 1,2,4, not {text[:200]!r}"
        )
    return rates


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError("--extra-body", f"must be a JSON object, not {text[:200]!r}")
    return value
