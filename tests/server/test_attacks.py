"""Attacks on files, batches, the page, structured output and HTTP, on one server: none gets an
error of the server's own, and after all of them it is as it was: the canary's tokens, free blocks,
descriptors, files.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import SMALL_ENGINE, Server, error_of, wait_for

URL = "/v1/completions"
HUGE = "9" * 5000
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def server(small_model: str, folder: Path) -> Iterator[Server]:
    limits: dict[str, Any] = {"header_seconds": 2.0, "body_seconds": 2.0, "max_batch_bytes": 2**20}
    with Server(model=small_model, engine=SMALL_ENGINE, batches=str(folder), **limits) as server:
        server.assert_sound()
        assert server.process is not None
        descriptors = f"/proc/{server.process.pid}/fd"
        before = len(os.listdir(descriptors))
        yield server
        server.assert_sound()
        wait_for(lambda: len(os.listdir(descriptors)) <= before + 2, "descriptors to be closed")
        with server.client() as client:
            for file in client.get("/v1/files").json()["data"]:
                assert client.delete(f"/v1/files/{file['id']}").status_code == 200
        left = [
            path
            for path in folder.rglob("*")
            if path.is_file() and path.suffix in (".data", ".unfinished")
        ]
        assert left == list((folder / "work").iterdir()) == []
        assert "Traceback" not in server.log
        assert " 500" not in server.log
        assert '"status": 500' not in server.log


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def check(answer: httpx.Response, *statuses: int) -> None:
    """Right or refused, and refused in the right form."""
    assert answer.status_code in (statuses or range(200, 500)), (
        answer.status_code,
        answer.text[:300],
    )
    is_announced = (
        answer.status_code >= 400 and answer.headers["content-type"] == "application/json"
    )
    if is_announced and answer.request.method != "HEAD":
        error_of(answer, answer.status_code)


# Files

IDS = [
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e",
    "file-%00",
    "file-" + "a" * 3000,
    "%ff%fe",
    "file-%0d%0ax:%20y",
    "*",
    "%24%7Bjndi%3Aldap%3A%2F%2Fx%7D",
    "file-x.json",
    "file-x.data",
    ".lock",
    "%F0%9F%92%A5",
]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "HEAD"])
@pytest.mark.parametrize("name", IDS)
def test_ids_of_files(client: httpx.Client, name: str, method: str) -> None:
    check(client.request(method, f"/v1/files/{name}"), 400, 404, 405)
    check(client.request(method, f"/v1/files/{name}/content"), 400, 404, 405)


@pytest.mark.parametrize("name", IDS)
def test_ids_of_batches_and_requests(client: httpx.Client, name: str) -> None:
    for path in (
        f"/v1/batches/{name}",
        f"/v1/requests/{name}",
        f"/v1/requests/{name}/explain",
        f"/v1/responses/{name}",
    ):
        check(client.get(path), 400, 404)
    check(client.post(f"/v1/batches/{name}/cancel"), 400, 404, 405)


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=10001",
        "limit=x",
        f"limit={HUGE}",
        "limit=1e9",
        "limit=NaN",
        "limit=1&limit=x",
        "after=" + "a" * 200,
        "after=none",
        "after=%00",
        "after=%ff",
        "order=up",
        "order=",
        "purpose=" + "p" * 100,
        "purpose=%ff%00",
    ],
)
def test_listings(client: httpx.Client, query: str) -> None:
    check(client.get(f"/v1/files?{query}"), 200, 400)
    check(client.get(f"/v1/batches?{query}"), 200, 400)


def form(*parts: bytes, end: bytes = b"\r\n--b--\r\n") -> bytes:
    return b"--b\r\n" + b"\r\n--b\r\n".join(parts) + end


PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
HEAD = b"Content-Disposition: form-data; name=file; filename=a"


@pytest.mark.parametrize(
    "body",
    [
        form(PURPOSE, HEAD + b"\r\n\r\n" + b"\r\n--" * 50_000),
        form(PURPOSE, HEAD + b"\r\n\r\n" + b"\r\n--bb" * 1000),
        form(PURPOSE, HEAD + b"\r\n\r\n{}", end=b"\r\n--b-x"),
        form(PURPOSE, HEAD + b"\r\n\r\n{}", end=b"\r\n--b\r\n"),
        form(PURPOSE, HEAD + b"\n\n{}"),
        form(PURPOSE, HEAD + b"\r\r\n{}"),
        form(PURPOSE, b": x\r\n" + HEAD + b"\r\n\r\n{}"),
        form(PURPOSE, b"a b: x\r\n" + HEAD + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD + b"; name=purpose\r\n\r\n{}"),
        form(PURPOSE, HEAD + b'; x="' + b'\\"' * 1000 + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD + b";" * 3000 + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD + b"; a*0=b; a*1=c\r\n\r\n{}"),
        form(PURPOSE.replace(b"batch", b"assistants"), HEAD + b"\r\n\r\n{}"),
        form(PURPOSE.replace(b"batch", b"\xff"), HEAD + b"\r\n\r\n{}"),
        form(PURPOSE.replace(b"batch", b"p" * 4000), HEAD + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD.replace(b"form-data", b"FORM-DATA") + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD.replace(b"name=file", b"name=file; name=file") + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD.replace(b"name=file", b'name="fi\\le"') + b"\r\n\r\n{}"),
        form(PURPOSE, HEAD + b"\r\nContent-Length: -1\r\n\r\n{}"),
        form(
            PURPOSE, HEAD + b"\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\n--c--"
        ),
        form(PURPOSE, HEAD + b"\r\n\r\n" + b"x" * 2**20),
        b"--b" * 10_000,
        b"\r\n--b\r\n" * 1000,
        b"-" * 100_000,
    ],
)
def test_forms(client: httpx.Client, folder: Path, body: bytes) -> None:
    answer = client.post(
        "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}
    )
    check(answer, 200, 400, 413)
    assert list((folder / "work").iterdir()) == []
    if answer.status_code == 200:
        assert client.delete(f"/v1/files/{answer.json()['id']}").status_code == 200


# Batches

BATCH = {"input_file_id": "file-x", "endpoint": URL, "completion_window": "24h"}


@pytest.mark.parametrize("field", [*BATCH, "metadata"])
@pytest.mark.parametrize(
    "value", [None, 1, True, [], {}, "", "x" * 200, [DEEP[:200]], {"a": {"b": 1}}, "\x00"]
)
def test_bodies_of_batches(client: httpx.Client, field: str, value: Any) -> None:
    check(client.post("/v1/batches", json=BATCH | {field: value}), 400, 404)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        DEEP.encode(),
        b'{"a": ' + HUGE.encode() + b"}",
        b"\xff",
        b'"x"',
        b"{}" * 100,
    ],
)
def test_bodies_that_are_none(client: httpx.Client, body: bytes) -> None:
    for path in ("/v1/batches", "/v1/completions", "/v1/responses", "/tokenize"):
        check(client.post(path, content=body, headers={"content-type": "application/json"}), 400)


LINES: list[bytes] = [
    b'{"custom_id": "a"}',
    b'{"custom_id": "b", "url": "/v1/completions"}',
    b'{"custom_id": "c", "url": 1, "body": {}}',
    b'{"custom_id": "d", "url": "/v1/completions", "body": []}',
    b'{"custom_id": "e", "url": "/v1/completions", "body": {"prompt": {}}}',
    b'{"custom_id": "f", "url": "/v1/chat/completions", "body": {"messages": []}}',
    b'{"custom_id": "g", "url": "http://127.0.0.1/v1/completions", "body": {"prompt": "a"}}',
    b'{"custom_id": "h", "url": "/v1/completions", "method": "DELETE", "body": {"prompt": "a"}}',
    b'{"custom_id": "i", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": -1}}',
    b'{"custom_id": "j", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1e999}}',
    b'{"custom_id": "k", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": %s}}'
    % HUGE.encode(),
    b'{"custom_id": "l", "url": "/v1/completions", "body": {"prompt": %s}}' % DEEP.encode(),
    b'{"custom_id": "m", "url": "/v1/completions", "body": {"prompt": "a", "stream": true}}',
    b'{"custom_id": "n", "url": "/v1/completions", "body": {"prompt": "a", "model": "/etc/passwd"}}',
    b'{"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "a", "n": 100000}}',
    b'{"custom_id": "p", "url": "/v1/completions", "body": {"prompt": "\xff"}}',
    b'{"custom_id": "\xff", "url": "/v1/completions", "body": {"prompt": "a"}}',
    b'{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "a", "regex": "("}}',
    b'{"custom_id": "r", "url": "/v1/completions", "body": {"prompt": "a", "logit_bias": {"x": 1}}}',
    b'{"custom_id": "s", "url": "/v1/completions", "body": {"prompt": [99999999]}}',
    b'{"custom_id": "t", "url": "/v1/completions", "body": {"prompt": ""}}',
    b'{"custom_id": "u", "url": "/v1/completions", "body": {"prompt": "%s"}}' % (b"word " * 20_000),
    b'{"custom_id": "v", "url": "/v1/completions", "body": {"prompt": "a", "temperature": NaN}}',
    b'{"custom_id": "w", "url": "/v1/completions", "body": {"prompt": "a", "stop": %s}}'
    % json.dumps(["x"] * 999).encode(),
    b'{"custom_id": "x", "url": "/v1/files", "body": {"prompt": "a"}}',
    b'{"custom_id": "y", "url": "/v1/batches", "body": {"prompt": "a"}}',
    b'{"custom_id": "z", "url": "%s", "body": {"prompt": "a"}}' % (b"/" * 10_000),
    b"\x00" * 1000,
    b"\xff\xfe\x00a",
    b"{" * 1000,
    b'"' * 999,
    b"-" + HUGE.encode(),
]


def test_lines_of_batches(client: httpx.Client) -> None:
    """Each fails alone, with its number or its status, and the good one among them is answered."""
    good = (
        b'{"custom_id": "good", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}'
    )
    data = b"\n".join([*LINES[:16], good, *LINES[16:]])
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", data)}).json()[
        "id"
    ]
    batch = client.post("/v1/batches", json=BATCH | {"input_file_id": file}).json()["id"]

    def over() -> Any:
        found = client.get(f"/v1/batches/{batch}").json()
        return found if found["status"] not in ("validating", "in_progress") else None

    found = wait_for(over, "the batch")
    assert found["status"] == "completed"
    assert found["request_counts"] == {
        "total": len(LINES) + 1,
        "completed": 1,
        "failed": len(LINES),
    }
    answers = client.get(f"/v1/files/{found['error_file_id']}/content").text.splitlines()
    for answer in map(json.loads, answers):
        body = answer["error"] or answer["response"]["body"]["error"]
        assert body["message"]
        assert len(body["message"]) < 1500
        assert answer["response"] is None or answer["response"]["status_code"] < 500, answer


# The page

PAGES = [
    "/page/..%2fsign_in.html",
    "/page/sign_in.html",
    "/page/%00",
    "/page/main.js%00.css",
    "/page/../auth.py",
    "/page/" + "a" * 5000,
    "/page/watch?engine=-1",
    "/page/watch?engine=99",
    "/page/watch?engine=x",
    f"/page/watch?engine={HUGE}",
    "/page/watch/x",
    "/page/about/x",
    "/?x=" + "y" * 5000,
    "/%2f%2fevil.example",
    "//evil.example/%2e%2e",
    "/docs/../page",
    "/openapi.json/",
    "/metrics?x[]=1",
    "/page/%e0%80%af",
]


@pytest.mark.parametrize("path", PAGES)
def test_paths_of_the_page(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    check(answer, 200, 400, 404)
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "["},
        {"host": "[::1"},
        {"host": "a b"},
        {"host": "x" * 20_000},
        {"origin": "http://["},
        {"origin": "http://[::1"},
        {"origin": "x" * 5000},
        {"origin": "null", "host": "null"},
        {"cookie": "quire_page=" + "1." * 2000},
        {"cookie": "quire_page=99999999999999999999.x"},
        {"cookie": "=;=;=;" * 500},
        {"if-none-match": '"' * 1000},
        {"accept": "text/html," * 1000},
        {"range": "bytes=0-0,1-1," + "2-2," * 500},
        {"x-request-id": "../../x"},
        {"x-request-id": "a\tb"},
        {"content-length": "0", "content-encoding": "gzip"},
        {"traceparent": "00-" + "z" * 32 + "-0-0"},
        {"x-forwarded-host": "evil.example", "x-forwarded-proto": "javascript"},
        {"expect": "x"},
        {
            "upgrade": "h2c",
            "connection": "upgrade, http2-settings",
            "http2-settings": "AAMAAABkAAQAAP__",
        },
    ],
)
def test_headers(client: httpx.Client, headers: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/"),
        ("GET", "/page/about"),
        ("POST", "/"),
        ("GET", "/v1/models"),
    ):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code < 500, answer.text
        assert "evil.example" not in answer.headers.get("location", "")


# Structured output: answered or refused, in bounded time

REGEXES = [
    "(?i)" + "a?" * 5000 + "a" * 5000,
    "(?i)" + "a?" * 200 + "a" * 200,
    "(a+)+b",
    "((a|b|c)*x){1,50}",
    "[a-z]{1,99999}",
    ".*" * 500,
    "(.*a.{12}|.*b.{13})c",
    "(\\w+\\s+){50,3000}x",
    "(?:[a-z]{0,300} ){0,300}",
    "(" * 1000 + ")" * 1000,
    "a{0}",
    "",
    "[",
    "\\",
    "(?=a)b",
    "\\1",
    "(?P<x>a)(?P=x)",
    "\\p{L}{500}",
    "[^\\x00-\\U0010ffff]",
    "a{4294967296}",
    "\x00",
    "\\ud800",
]


@pytest.mark.few(6)
@pytest.mark.parametrize("regex", REGEXES)
def test_regexes(client: httpx.Client, regex: str) -> None:
    body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": regex}}
    check(client.post(URL, json=body), 200, 400)


SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "http://127.0.0.1:1/x"},
    {"$ref": "file:///etc/passwd"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"enum": []},
    {"enum": list(range(2000))},
    {"type": "integer", "multipleOf": 1234567},
    {"type": "number", "minimum": 1e308, "maximum": -1e308},
    {"type": "string", "pattern": "(a+)+b"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9},
    {
        "properties": {str(i): {"type": "string"} for i in range(500)},
        "required": [str(i) for i in range(500)],
    },
    {"type": ["object", "x"]},
    {"type": "object", "properties": []},
    {"x-guidance": {"whitespace_pattern": "(a+)+"}},
    {"x-guidance": 1},
    {"not": {}},
    {"patternProperties": {"(": {}}},
    True,
    False,
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(client: httpx.Client, schema: Any) -> None:
    body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"json": schema}}
    check(client.post(URL, json=body), 200, 400)


GRAMMARS = [
    "start: start",
    "start: a\na: b\nb: a",
    "start: /(/",
    'start: "a"' + ' "b"?' * 3000,
    "start: " + "(" * 2000 + '"a"' + ")" * 2000,
    "%import common.WORD\nstart: WORD",
    '%json {"$ref": "#"}',
    "start[temperature=2]: /a/",
    "start: <|im_end|>",
    "root ::= root",
    "root ::= (" * 500,
    'root ::= "\\uD800"',
    "\x00",
    "start: ~/a/",
]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammars(client: httpx.Client, grammar: str) -> None:
    body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"grammar": grammar}}
    check(client.post(URL, json=body), 200, 400)


# HTTP as no client writes it

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"

RAW = [
    CHUNKED + b"5;" + b"e" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"".join(b"1;" + b"e" * 2000 + b"\r\nx\r\n" for _ in range(50)) + b"0\r\n\r\n",
    CHUNKED + b"ffffffffffffffff\r\n",
    CHUNKED + b"fffffffffffffffff\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    CHUNKED + b"5\nhello\n0\n\n",
    CHUNKED + b"5\r\nhello0\r\n\r\n",
    CHUNKED + b"0\r\n" + b"".join(b"t-%d: %s\r\n" % (i, b"v" * 1000) for i in range(60)) + b"\r\n",
    CHUNKED + b"0\r\nhost: [\r\n\r\n",
    POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    POST + b"content-length: +5\r\n\r\nhello",
    POST + b"content-length: 5 5\r\n\r\nhello",
    POST + b"content-length: 0x5\r\n\r\nhello",
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    POST
    + b"content-length: %d\r\n\r\n" % len(BODY)
    + BODY
    + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20,
    GET + b"a: b\r\n c: folded\r\n\r\n",
    GET + b"a\x00b: c\r\n\r\n",
    GET + b": empty\r\n\r\n",
    GET + b"host: y\r\n\r\n",
    GET + b"host:\r\n\r\n",
    GET.replace(b"host: x", b"host: [") + b"\r\n",
    GET.replace(b"host: x", b"host: x@y") + b"\r\n",
    GET.replace(b"host: x", b"host: " + b"h" * 20_000) + b"\r\n",
    GET.replace(b"/health", b"http://[/health") + b"\r\n",
    GET.replace(b"/health", b"//[") + b"\r\n",
    GET.replace(b"/health", b"*") + b"\r\n",
    GET.replace(b"/health", b"x") + b"\r\n",
    GET.replace(b"/health", b"/%") + b"\r\n",
    GET.replace(b"/health", b"/health#f") + b"\r\n",
    GET.replace(b"/health", b"/h\xffealth") + b"\r\n",
    GET.replace(b"GET", b"get") + b"\r\n",
    GET.replace(b"GET", b"PRI") + b"\r\n",
    GET.replace(b"GET", b"CONNECT") + b"\r\n",
    GET.replace(b"HTTP/1.1", b"HTTP/1.2") + b"\r\n",
    GET.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 20_000 + GET + b"\r\n",
    b"\x16\x03\x01" * 100 + b"\r\n\r\n",
    b"GET /health\r\n\r\n",
    GET + b"\r\n" + b"\x00" * 1000,
]


@pytest.mark.parametrize("sent", RAW, ids=range(len(RAW)))
def test_raw_requests(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has heard enough
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
    for part in answer.split(b"HTTP/1.1 ")[1:]:
        assert part[:1] in b"1234", part[:200]
        assert b"Traceback" not in part


def test_the_stream_of_an_innocent_goes_on_beside_expensive_masks(server: Server) -> None:
    """14 grammars at once, each of its own, none of which may end or fail the stream beside them."""
    import threading

    def ask(number: int) -> None:
        body = {"prompt": "a", "max_tokens": 20, "regex": f"(\\w+\\s+){{50,{900 + number}}}x"}
        statuses.append(server.post(URL, body).status_code)

    statuses: list[int] = []
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(14)]
    alone = server.complete(prompt="Once", max_tokens=100, ignore_eos=True, seed=1)["choices"][0][
        "token_ids"
    ]
    for thread in threads:
        thread.start()
    tokens = server.complete(prompt="Once", max_tokens=100, ignore_eos=True, seed=1)["choices"][0][
        "token_ids"
    ]
    for thread in threads:
        thread.join()
    assert tokens == alone
    assert set(statuses) <= {200, 400}
