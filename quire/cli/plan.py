"""`quire plan`: does it fit, and how fast will it be?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from quire.cli import options
from quire.cli.option_groups import ByPlace, with_groups
from quire.config import Duration
from quire.errors import InvalidRequestError

_DRAWN = 256
"""Requests, where ranges are given and not how many."""


@with_groups
def plan(
    model: Annotated[
        str,
        Option("--model", "-m", metavar="M", help="Another way to name it."),
        ByPlace("A config.json, a folder with one, a .gguf file or a model that is here."),
    ] = options.DEFAULT_MODEL,
    gpu: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="h200, h100, b200, a100, l40s, l4, rtx4090, rtx3090; default: here.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, Option(metavar="N", min=1, max=1024, help="How many of them; default: one.")
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        Option(
            metavar="N",
            min=1,
            max=64,
            help="Divide the model among so many of them; the others repeat that.",
        ),
    ] = 1,
    input_tokens: Annotated[
        str,
        Option("--input", metavar="N", help="Tokens of a prompt, or a range of them: 100-1024."),
    ] = "1000",
    output_tokens: Annotated[
        str, Option("--output", metavar="N", help="Tokens of an answer, or a range.")
    ] = "250",
    requests: Annotated[
        int | None,
        Option(
            metavar="N",
            min=1,
            max=100_000,
            help="So many come all at once: how long until all are answered?",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Such requests from a file: a line each, the tokens of prompt and answer.",
        ),
    ] = None,
    rate: Annotated[
        float | None, Option(metavar="R", min=1e-6, help="Requests a second that come.")
    ] = None,
    ttft: Annotated[
        float | None, Option(metavar="S", min=0.0, help="Seconds to the first token, as wanted.")
    ] = None,
    target_token_time: Annotated[
        str | None,
        Option(metavar="T", help="A token for every answer in this time, such as 40ms: its price."),
    ] = None,
    json_output: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Tell whether a model fits a device, and how fast it will be.

    In which formats, how many requests at once, what to change; a config.json is enough. The exit
    status is 1 if it does not fit, or the rate or the target is too high.

    \b
    quire plan smollm2
    quire plan Qwen3-8B/config.json --gpu h200 --input 2000 --output 500 --rate 5 --ttft 0.5
    quire plan Qwen3-8B/config.json --gpu h200 --requests 256 --input 100-1024 --output 100-1024
    quire plan Qwen3-8B/config.json --gpu h200 --input 8000 --output 500 --target-token-time 30ms
    quire plan --model config.json --gpu l4 --gpus 4 --json
    quire plan Qwen3-32B/config.json --gpu h100 --gpus 4 --tensor-parallel-size 2
    """
    from quire.tools.bench.jobs import Lengths
    from quire.tools.plan.devices import named_device, this_device
    from quire.tools.plan.estimate import ExpectedLoad, estimate, serve
    from quire.tools.plan.forms import forms_of
    from quire.tools.plan.model import open_planned
    from quire.tools.plan.report import Findings, as_json, print_plan
    from quire.tools.plan.token_time import plan_target
    from quire.tools.plan.workload import draw_jobs, read_jobs

    planned = open_planned(model)
    device = this_device() if gpu is None else named_device(gpu)
    prompts, answers = (
        Lengths.parse("--input", input_tokens),
        Lengths.parse("--output", output_tokens),
    )
    if workload is not None:
        if requests is not None:
            raise InvalidRequestError(
                "--requests", "is not given beside --workload, which has its own number of them"
            )
        load = ExpectedLoad.of_jobs(read_jobs(workload), rate, ttft)
    elif requests is not None or prompts.low < prompts.high or answers.low < answers.high:
        load = ExpectedLoad.of_jobs(draw_jobs(requests or _DRAWN, prompts, answers), rate, ttft)
    else:
        load = ExpectedLoad(prompts.mean, answers.mean, rate, ttft)
    engines = _num_engines(gpus, tensor_parallel_size, device.is_gpu)
    forms = forms_of(planned, device, tensor_parallel_size)
    found = [estimate(planned, device, form, load, engines) for form in forms]
    fitting = next((one for one in found if one.fits), None)
    serving = (
        serve(planned, device, fitting, load, engines)
        if fitting is not None and rate is not None
        else None
    )
    seconds = (
        None
        if target_token_time is None
        else Duration().check("--target-token-time", target_token_time)
    )
    target = (
        plan_target(planned, device, fitting, load, seconds)
        if fitting is not None and seconds is not None
        else None
    )
    findings = Findings(planned, device, engines, load, found, serving, target, seconds)
    if json_output:
        print(json.dumps(as_json(findings), indent=1))
    else:
        print_plan(findings)
    is_kept = seconds is None or target is not None
    if fitting is None or not is_kept or (serving is not None and not serving.is_possible):
        raise typer.Exit(1)


def _num_engines(gpus: int | None, ranks: int, on_gpu: bool) -> int:
    """How many times the whole model is there."""
    if ranks > 1 and not on_gpu:
        raise InvalidRequestError(
            "--tensor-parallel-size", "is planned for GPUs: on a CPU, ranks share its cores"
        )
    count = ranks if gpus is None else gpus
    if count % ranks:
        raise InvalidRequestError(
            "--gpus", f"{count} are not divisible by --tensor-parallel-size {ranks}"
        )
    return count // ranks
