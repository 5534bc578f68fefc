"""The options of `quire bench serve`; names are those of `vllm bench serve` where it has the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KEY_VARIABLE = "OPENAI_API_KEY"

BaseUrl = Annotated[str, typer.Option(metavar="URL", help="The server.")]
Backend = Annotated[str, typer.Option(metavar="openai|openai-chat", help="Completions, or chat completions.")]
Endpoint = Annotated[str | None, typer.Option(metavar="PATH", help="Default: the backend's own.")]
Model = Annotated[str | None, typer.Option("--model", "-m", metavar="M", help="Default: the server's first.")]
ApiKey = Annotated[
    str | None, typer.Option(metavar="KEY", envvar=KEY_VARIABLE, show_envvar=True, help="If the server wants one.")
]
DatasetName = Annotated[
    str, typer.Option(metavar="random|prefix_repetition|custom", help="What to ask; custom: from a file.")
]
DatasetPath = Annotated[
    Path | None, typer.Option(metavar="FILE", help='For custom: lines like {"prompt": "…", "output_tokens": 9}.')
]
NumPrompts = Annotated[int, typer.Option(min=1, metavar="N", help="How many requests.")]
RequestRate = Annotated[float, typer.Option(metavar="R", help="Requests a second; inf: all at once.")]
Burstiness = Annotated[
    float, typer.Option(metavar="B", help="1: Poisson arrivals; less: in bursts; more: evenly spread.")
]
MaxConcurrency = Annotated[int | None, typer.Option(metavar="N", help="Requests under way at a time.")]
RandomInputLen = Annotated[int, typer.Option(metavar="N", help="Prompt tokens (of words: about).")]
RandomOutputLen = Annotated[int, typer.Option(metavar="N", help="New tokens.")]
RandomRangeRatio = Annotated[float, typer.Option(metavar="R", help="Lengths vary from 1-R to 1+R times the above.")]
RandomPrefixLen = Annotated[int, typer.Option(metavar="N", help="Tokens all prompts begin with.")]
PrefixRepetitionPrefixLen = Annotated[int, typer.Option(metavar="N", help="Tokens of a shared prefix.")]
PrefixRepetitionSuffixLen = Annotated[int, typer.Option(metavar="N", help="Tokens after it.")]
PrefixRepetitionNumPrefixes = Annotated[int, typer.Option(metavar="N", help="How many prefixes.")]
PrefixRepetitionOutputLen = Annotated[int, typer.Option(metavar="N", help="New tokens.")]
CustomOutputLen = Annotated[int, typer.Option(metavar="N", help="New tokens where the file says nothing.")]
VocabSize = Annotated[
    int | None, typer.Option(metavar="N", help="Send random token ids below N, not words: lengths are exact.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="Default: the server's.")]
ExtraBody = Annotated[str, typer.Option(metavar="JSON", help="Further fields of each request.")]
Goodput = Annotated[
    list[str] | None, typer.Option(metavar="NAME:MS", help="ttft, tpot or e2el a good request keeps. Repeat.")
]
PercentileMetrics = Annotated[str, typer.Option(metavar="NAMES", help="What the table shows.")]
MetricPercentiles = Annotated[str, typer.Option(metavar="P,…", help="Percentiles to compute.")]
NumWarmups = Annotated[int, typer.Option(min=0, metavar="N", help="Requests sent before, not counted.")]
Seed = Annotated[int, typer.Option(metavar="S", help="Of prompts and arrivals.")]
ResultFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")]
SaveDetailed = Annotated[bool, typer.Option("--save-detailed", help="With every request's times.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw latencies: .png, .svg or .pdf.")]
