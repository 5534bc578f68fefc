"""The page's files and routes, without a browser."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from quire.observe.request_records import RecordBook
from quire.server.api.page import FILES
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.link.engine_client import EngineClient
from quire.server.link.messages import Command, Watch
from quire.tools.explain.text import TITLES


def get(paths: dict[str, dict[str, str]], **config: Any) -> dict[str, httpx.Response]:
    """The answers to GET, from an application without an engine."""
    ready = SimpleNamespace(fingerprint="fp", max_model_len=8)
    metrics = SimpleNamespace(http_request=lambda path, status: None)
    fields = {
        "config": ServerConfig(**config),
        "client": SimpleNamespace(engines=[None]),
        "records": RecordBook(),
        "metrics": metrics,
    }
    app = create_app(SimpleNamespace(**fields, ready=ready, is_draining=False, counts=None))  # type: ignore[arg-type]

    async def ask() -> dict[str, httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as client:
            return {
                path: await client.get(path, headers=headers) for path, headers in paths.items()
            }

    return asyncio.run(ask())


def test_every_file_is_served_under_a_strict_policy() -> None:
    answers = get({"/": {}, "/favicon.ico": {}, **{f"/page/{name}": {} for name in FILES}})
    for path, answer in answers.items():
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        kind = {
            "css": "text/css",
            "js": "text/javascript",
            "svg": "image/svg+xml",
            "html": "text/html",
            "ico": "image/x-icon",
        }
        name = "index.html" if path == "/" else path
        assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
    again = get(
        {
            f"/page/{name}": {"if-none-match": answers[f"/page/{name}"].headers["etag"]}
            for name in FILES
        }
    )
    assert {answer.status_code for answer in again.values()} == {304}


@pytest.mark.parametrize("name", sorted(set(FILES) - {"favicon.ico"}))
def test_files_name_each_other_and_nobody_else(name: str) -> None:
    text = FILES[name].content.decode()
    for found in re.findall(r"""(?:src|href)="([^"]+)"|from "([^"]+)"|url\(([^)]+)\)""", text):
        (target,) = filter(None, found)
        assert target == "/docs" or target.removeprefix("/page/") in FILES, target
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "<style",
        " style=",
    ):
        assert forbidden not in text, forbidden


def test_every_part_of_an_explanation_has_a_colour() -> None:
    styled = set(re.findall(r"\.part-(\w+)", FILES["style.css"].content.decode()))
    assert styled == TITLES.keys()


def test_what_is_no_file_is_not_there() -> None:
    paths = ("/page/", "/page/no.js", "/page/..%2fapp.py", "/page/sign_in.html")
    for path, answer in get({path: {} for path in paths}).items():
        assert answer.status_code == 404, path


def test_the_page_can_be_left_out() -> None:
    answers = get(
        {"/": {"accept": "text/html"}, "/page/main.js": {}, "/page/watch": {}}, page=False
    )
    assert {answer.status_code for answer in answers.values()} == {404}
    keyed = get({"/": {"accept": "text/html"}}, page=False, api_keys=("k",))
    assert keyed["/"].status_code == 401
    assert keyed["/"].headers["content-type"] == "application/json"


def test_an_engine_that_comes_after_another_is_watched_too() -> None:
    metrics = SimpleNamespace(memory=lambda memory: None, set_cache=lambda *sizes: None)
    client = EngineClient(ServerConfig(), metrics, lambda: None)  # type: ignore[arg-type]
    sent: list[Command] = []
    client._link = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    ready: Any = SimpleNamespace(memory={}, num_blocks=1, block_size=1, bytes_per_block=1)
    client._became_ready(ready)
    assert sent == []
    client.watch(lambda watched: None)
    client._became_ready(ready)
    client.watch(None)
    client._became_ready(ready)
    assert sent == [Watch(True), Watch(True), Watch(False)]
