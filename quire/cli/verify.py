"""`quire verify`: is it exact, here and with this model?"""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer import Argument, Option

from quire.cli import options
from quire.cli.option_groups import MODEL_HELP, chosen_model
from quire.errors import InvalidRequestError
from quire.frontend.progress import TimeBar


def verify(
    model: Annotated[str | None, Argument(metavar="[MODEL]", help=MODEL_HELP)] = None,
    seconds: Annotated[
        float, Option(metavar="S", min=1.0, help="How long to try, loading not counted.")
    ] = 60.0,
    seed: Annotated[
        int, Option(metavar="S", min=0, max=2**31, help="Another seed draws other requests.")
    ] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    devices: Annotated[
        int,
        Option(
            metavar="N",
            min=2,
            help="Divide the model among so many: GPUs of their own, or processes.",
        ),
    ] = 2,
    url: Annotated[
        str | None,
        Option(
            "--url", metavar="URL", help="Try a server with OpenAI's API instead, from outside."
        ),
    ] = None,
    served: Annotated[
        str | None,
        Option(
            "--model", "-m", metavar="M", help="Another way to name it; with --url: its name there."
        ),
    ] = None,
    api_key: Annotated[
        str | None, Option(metavar="KEY", help="With --url; default: the variable OPENAI_API_KEY.")
    ] = None,
    concurrency: Annotated[
        int, Option(metavar="N", min=2, help="With --url: requests at once in a crowd.")
    ] = 16,
    json_output: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Prove that answers depend on nothing but the request, on this machine and with this model.

    Requests of all kinds are run alone, then together, in other orders, in chunks, preempted,
    swapped out, from the prefix cache, drafted, and so on; their tokens and logprobs are compared
    bit for bit. The exit status is 0 if nothing differs and everything was tried, else 1; a
    difference is shown with the smallest requests that have it.

    \b
    quire verify smollm2
    quire verify Qwen/Qwen3-0.6B --device cuda --seconds 300 --devices 4
    quire verify ./my-model --quantization int4 --json > verdict.json
    quire verify --url http://127.0.0.1:8000 --concurrency 32
    """
    if url is not None:
        _check_server(url, model)
        from quire.tools.verify.server import verify_server

        key = api_key or os.environ.get("OPENAI_API_KEY")
        with TimeBar("Verifying", seconds) as bar:
            verdict, facts = verify_server(url, key, served, concurrency, seconds, seed, bar.show)
        what = "that came alone"
    else:
        from quire.tools.verify.axes import ModelSubject
        from quire.tools.verify.check import verify as check
        from quire.tools.verify.engines import Model

        loaded = Model(
            chosen_model(model, served) or options.DEFAULT_MODEL,
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
        )
        loaded.num_devices = devices
        facts = {"model": loaded.first_engine.description}
        with TimeBar("Verifying", seconds) as bar:
            verdict = check(ModelSubject(loaded), seconds, seed, bar.show)
        what = "alone"
    from quire.tools.verify.report import as_json, print_verdict

    if json_output:
        print(as_json(verdict, facts))
    else:
        print_verdict(verdict, facts, what)
    if not verdict.is_exact:
        raise typer.Exit(1)


def _check_server(url: str, model: str | None) -> None:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(
            "--url", f"must be an address such as http://127.0.0.1:8000, not {url!r}"
        )
    if model is not None:
        raise InvalidRequestError(
            "MODEL", "is loaded here, --url is a server elsewhere: leave one out"
        )
