"""`quire explain`: what happened to a request, and where its time went."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from typer import Argument, Option

from quire.cli.terminal import say
from quire.errors import InvalidRequestError, QuireError, reason

_MOST_LISTED = 20


def explain(
    source: Annotated[
        str,
        Argument(
            metavar="LOG|URL",
            help="A step log (step_log=FILE), or the address of a server that runs.",
        ),
    ],
    request: Annotated[
        str | None,
        Argument(
            metavar="[REQUEST]", help="Its id; of a server's, that of the response or x-request-id."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        Option(metavar="KEY", help="Of the server; default: the variable OPENAI_API_KEY."),
    ] = None,
    json_output: Annotated[bool, Option("--json", help="Print everything as JSON.")] = False,
    svg: Annotated[Path | None, Option(metavar="FILE", help="Draw it, too.")] = None,
) -> None:
    """Tell where a request's time went, in parts that add up.

    What it waited for and because of whom, what it found in the cache, every chunk, every
    preemption and what that cost.

    Without REQUEST, requests are listed: a log's, the slowest first (all of them with --json), or a
    server's last ones, the newest first.

    \b
    quire explain steps.jsonl
    quire explain http://127.0.0.1:8000
    quire explain steps.jsonl request-7 --svg slow.svg
    quire explain http://127.0.0.1:8000 chatcmpl-0123abcd
    quire explain http://127.0.0.1:8000 my-id --json
    """
    from quire.tools.explain.text import explanation_svg, explanation_text

    is_server = source.startswith(("http://", "https://"))
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if request is None:
        if svg is not None:
            raise InvalidRequestError("--svg", "draws one request: name it")
        if is_server:
            _list_served(source, key, json_output)
        else:
            _list_requests(Path(source), json_output)
        return
    if is_server:
        path = f"/v1/requests/{quote(request, safe='')}/explain"
        explanation = asyncio.run(_ask(source, key, path, "answers"))
    else:
        explanation = _read(Path(source), request)
    if svg is not None:
        try:
            svg.write_text(explanation_svg(explanation), encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(
                "--svg", f"{svg} can't be written: {reason(error)}"
            ) from error
        say(f"wrote {svg}")
    print(json.dumps(explanation, indent=1) if json_output else explanation_text(explanation))


def _read(path: Path, request: str) -> dict[str, Any]:
    from quire.observe.step_log import last_run
    from quire.tools.explain.explain import explain_request, request_names

    entries, engine = last_run(path)
    explanation = explain_request(entries, request, None if engine is None else engine.config)
    if explanation is None:
        names = request_names(entries)
        known = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise InvalidRequestError(
            "REQUEST", f"{request!r} is not in {path}; there are {known or 'none'}"
        )
    return explanation


def _list_requests(path: Path, json_output: bool) -> None:
    from quire.observe.engine_metrics import derive_metrics
    from quire.observe.step_log import last_run

    metrics = derive_metrics(last_run(path)[0])
    finished = sorted(metrics.finished, key=lambda one: one.arrival - one.finished)
    if not finished:
        raise InvalidRequestError("LOG", f"{path} has no request that came to its end")
    if json_output:
        print(json.dumps([asdict(one) for one in finished], indent=1))
        return
    width = max(len(one.request_id) for one in finished[:_MOST_LISTED])
    print(f"{'request':<{width}}  {'seconds':>9}  {'queue':>9}  prompt  answer  cached  preempted")
    for one in finished[:_MOST_LISTED]:
        print(
            f"{one.request_id:<{width}}  {one.finished - one.arrival:9.3f}  {one.queue_time or 0.0:9.3f}  "
            f"{one.num_prompt_tokens:6}  {one.num_output_tokens:6}  {one.cached_tokens + one.host_tokens:6}  "
            f"{one.preemptions:9}"
        )
    if len(finished) > _MOST_LISTED:
        print(f"… and {len(finished) - _MOST_LISTED} more")
    say(f"quire explain {path} {finished[0].request_id}")


def _list_served(url: str, api_key: str | None, json_output: bool) -> None:
    found = asyncio.run(_ask(url, api_key, f"/v1/requests?limit={_MOST_LISTED}", "data"))
    requests: list[dict[str, Any]] = found["data"]
    if json_output:
        print(json.dumps(requests, indent=1))
        return
    if not requests:
        say(f"{url} has answered no request yet")
        return
    width = max(len(one["response_id"]) for one in requests)
    print(f"{'request':<{width}}  {'seconds':>9}  prompt  answer  cached  state")
    for one in requests:
        seconds = one["timings"].get("total")
        print(
            f"{one['response_id']:<{width}}  {'–' if seconds is None else f'{seconds:.3f}':>9}  "
            f"{one['prompt_tokens']:6}  {one['completion_tokens']:6}  {one['cached_tokens']:6}  {one['state']}"
        )
    say(f"quire explain {url} {requests[0]['response_id']}")


async def _ask(url: str, api_key: str | None, path: str, expected: str) -> dict[str, Any]:
    from quire.tools.bench.http_client import HttpClient

    async with HttpClient(url.removesuffix("/").removesuffix("/v1"), api_key) as client:
        found = await client.get_json(path)
    if not isinstance(found, dict) or expected not in found:
        raise QuireError(f"{url} does not know how to explain requests: is it a Quire server?")
    return found
