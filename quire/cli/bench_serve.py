"""`quire bench serve`: measure any server that has OpenAI's API."""

from __future__ import annotations

import json
import math
from typing import Any

from quire.cli import bench_serve_options as options
from quire.errors import InvalidRequestError


def serve(
    base_url: options.BaseUrl = "http://127.0.0.1:8000",
    backend: options.Backend = "openai",
    endpoint: options.Endpoint = None,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    dataset_name: options.DatasetName = "random",
    dataset_path: options.DatasetPath = None,
    num_prompts: options.NumPrompts = 100,
    request_rate: options.RequestRate = math.inf,
    burstiness: options.Burstiness = 1.0,
    max_concurrency: options.MaxConcurrency = None,
    random_input_len: options.RandomInputLen = 128,
    random_output_len: options.RandomOutputLen = 128,
    random_range_ratio: options.RandomRangeRatio = 0.0,
    random_prefix_len: options.RandomPrefixLen = 0,
    prefix_repetition_prefix_len: options.PrefixRepetitionPrefixLen = 256,
    prefix_repetition_suffix_len: options.PrefixRepetitionSuffixLen = 256,
    prefix_repetition_num_prefixes: options.PrefixRepetitionNumPrefixes = 10,
    prefix_repetition_output_len: options.PrefixRepetitionOutputLen = 128,
    custom_output_len: options.CustomOutputLen = 256,
    vocab_size: options.VocabSize = None,
    ignore_eos: options.IgnoreEos = False,
    temperature: options.Temperature = None,
    extra_body: options.ExtraBody = "{}",
    goodput: options.Goodput = None,
    percentile_metrics: options.PercentileMetrics = "ttft,tpot,itl,e2el",
    metric_percentiles: options.MetricPercentiles = "99",
    num_warmups: options.NumWarmups = 0,
    seed: options.Seed = 0,
    result_file: options.ResultFile = None,
    save_detailed: options.SaveDetailed = False,
    plot: options.Plot = None,
) -> None:
    """Send a server requests and measure what its clients see, in the terms of `vllm bench serve`.

    \b
    quire bench serve --num-prompts 64 --max-concurrency 32 --ignore-eos
    quire bench serve --request-rate 4 --goodput ttft:500 --goodput tpot:50 --result-file run.json --plot run.png
    """
    from quire.bench_serve.measuring import Load
    from quire.bench_serve.report import parse_goodput
    from quire.bench_serve.run import Output, run
    from quire.bench_serve.workloads import Lengths, PrefixLengths, TokenSource, make_jobs

    jobs = make_jobs(
        dataset_name,
        num_prompts,
        TokenSource(seed, vocab_size),
        Lengths(random_input_len, random_output_len, random_range_ratio, random_prefix_len),
        PrefixLengths(
            prefix_repetition_prefix_len,
            prefix_repetition_suffix_len,
            prefix_repetition_num_prefixes,
            prefix_repetition_output_len,
        ),
        dataset_path,
        custom_output_len,
    )
    load = Load(
        backend=backend,
        endpoint=endpoint,
        model=model,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra_body=_json_object(extra_body),
        seed=seed,
    )
    output = Output(
        goodput=parse_goodput(goodput or ()),
        shown=[name.strip() for name in percentile_metrics.split(",")],
        percentiles=_percentiles(metric_percentiles),
        result_file=result_file,
        save_detailed=save_detailed,
        plot=plot,
    )
    run(base_url, api_key, load, jobs, output, dataset_name, num_warmups)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError("--extra-body", f"must be a JSON object, not {text!r}")
    return value


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise InvalidRequestError("--metric-percentiles", f"must be numbers from 0 to 100 like 50,99, not {text!r}")
    return values
