"""Keys, hosts, origins and TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.guard.auth import ApiKeys
from tests.server.browser import expect
from tests.server.harness import SMALL_ENGINE, Server, wait_for

ORIGIN = "https://app.example"
PATHS = (
    "/",
    "/page/main.js",
    "/page/about",
    "/page/watch",
    "/page/sign_in.html",
    "/v1/models",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/version",
    "/ready",
    "/v1/requests",
    "/v1/requests/x",
    "/v1/requests/x/explain",
    "/nothing",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, small_model: str) -> Iterator[Server]:
    """All that is off by default, on."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    command += " -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    fields: dict[str, Any] = {
        "api_keys": ["first", "second"],
        "admin_keys": ["boss"],
        "cors_origins": [ORIGIN],
    }
    fields |= {
        "allowed_hosts": ["127.0.0.1"],
        "header_seconds": 3.0,
        "model": small_model,
        "engine": SMALL_ENGINE,
    }
    with Server(
        tls_certificate=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"), **fields
    ) as server:
        server.certificate = folder / "cert.pem"  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    certificate: Path = server.certificate  # type: ignore[attr-defined]
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=server.url, verify=context) as client:
        yield client


def test_everything_but_health_needs_a_key(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    for path in (
        *PATHS,
        "/health/",
        "/health/x",
        "//health",
        "/health%2f",
        "/HEALTH",
        "/v1/models?/health",
    ):
        response = client.get(path)
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["request_id"] == response.headers["x-request-id"]
    response = client.post("/v1/messages", json={})
    assert response.status_code == 401
    assert response.json()["type"] == "error"  # as Anthropic's clients know it


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer second"}, 200),
        ({"x-api-key": "second"}, 200),
        ({"authorization": "Bearer firs"}, 401),
        ({"authorization": "Bearer first second"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "first"}, 401),
        ({"authorization": "Bearer \xff"}, 401),
    ],
)
def test_keys(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    assert client.get("/v1/models", headers=raw).status_code == status  # type: ignore[arg-type]


def test_the_first_key_sent_counts(client: httpx.Client) -> None:
    twice = [("authorization", "Bearer wrong"), ("authorization", "Bearer first")]
    assert client.get("/v1/models", headers=twice).status_code == 401


def test_keys_are_compared_with_all() -> None:
    keys = ApiKeys(["a", " b "])
    assert b"a" in keys
    assert b"b" in keys
    assert b"" not in keys
    assert b"ab" not in keys


def test_other_hosts_are_turned_away(client: httpx.Client) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert client.get("/health", headers={"host": host}).status_code == 421
    for host in ("x@127.0.0.1", "[", "127.0.0.1:x", "127.0.0.1:999999", "a b", "127.0.0.1/"):
        assert client.get("/health", headers={"host": host}).status_code == 400
    assert client.get("/health", headers={"host": "127.0.0.1"}).status_code == 200


def test_pages_of_the_allowed_origin_only(client: httpx.Client) -> None:
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    allowed = client.options("/v1/chat/completions", headers={"origin": ORIGIN, **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = client.options(
        "/v1/chat/completions", headers={"origin": "https://evil.example", **ask}
    )
    assert "access-control-allow-origin" not in other.headers


def test_plain_http_is_not_spoken(server: Server) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")
    wait_for(lambda: server.health() == 200, what="health")


def raw_status(server: Server, request_line: str, *headers: str) -> int:
    """Of a request as it is written: clients tidy paths up."""
    certificate: Path = server.certificate  # type: ignore[attr-defined]
    context = ssl.create_default_context(cafile=str(certificate))
    lines = [
        f"{request_line} HTTP/1.1",
        *(headers or ("host: 127.0.0.1",)),
        "connection: close",
        "",
        "",
    ]
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        return int(connection.recv(1024).split(b" ", 2)[1])


@pytest.mark.parametrize(
    "target", ["/health", "/%68ealth", "/health?x=/v1/models", "http://evil.example/health"]
)
def test_what_the_router_takes_for_health_is_open(server: Server, target: str) -> None:
    assert raw_status(server, f"GET {target}") == 200
    assert raw_status(server, f"POST {target}") == 405


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "TRACE"])
@pytest.mark.parametrize(
    "target",
    [
        "//health",
        "/health/",
        "/health;x",
        "/./health",
        "/%2568ealth",
        "/health%00",
        "/health/../v1/models",
        "/health%2f..%2fv1/models",
        "/v1/models/../../health",
        "/v1/models?/health",
        "/v1/models%3f/health",
        "/v1%2fmodels",
        "///v1/models",
        "http://127.0.0.1/v1/models",
        "http://127.0.0.1//health",
        "http://127.0.0.1/health/../v1/models",
        "https://127.0.0.1:9/v1/models?/health",
    ],
)
def test_no_other_path_is(server: Server, method: str, target: str) -> None:
    assert raw_status(server, f"{method} {target}") == 401


def test_a_second_host_is_refused(server: Server) -> None:
    assert raw_status(server, "GET /v1/models", "host: 127.0.0.1", "host: x/health") == 400


@pytest.mark.parametrize(
    "headers",
    [
        ("host: 127.0.0.1", "x-original-url: /health"),
        ("host: 127.0.0.1", "x-rewrite-url: /health"),
        ("host: 127.0.0.1", "x-forwarded-prefix: /health"),
        (
            "host: 127.0.0.1",
            "connection: upgrade",
            "upgrade: websocket",
            "sec-websocket-version: 13",
        ),
    ],
)
def test_no_header_opens_a_path(server: Server, headers: tuple[str, ...]) -> None:
    assert raw_status(server, "GET /v1/models", *headers) == 401


# The page: a browser can't send a key with its first request.

HTML = {"accept": "text/html,application/xhtml+xml"}


def sign_in(client: httpx.Client, key: str) -> httpx.Response:
    return client.post("/", data={"key": key})


def test_a_browser_without_a_key_sees_a_form_and_nothing_else(client: httpx.Client) -> None:
    form = client.get("/", headers=HTML)
    assert form.status_code == 401
    assert form.headers["content-type"].startswith("text/html")
    policy = form.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'none'; style-src 'sha256-" in policy
    assert "src=" not in form.text
    assert "href=" not in form.text
    for path in (
        "/page/main.js",
        "/page/about",
        "/page/watch",
        "/v1/models",
        "/docs",
        "/index.html",
    ):
        other = client.get(path, headers=HTML)
        assert other.status_code == 401, path
        assert other.json()["error"]["code"] == "invalid_api_key"


def test_a_cookie_is_given_for_a_key_and_is_as_good(client: httpx.Client) -> None:
    wrong = sign_in(client, "firs")
    assert wrong.status_code == 401
    assert "Wrong key" in wrong.text
    assert "set-cookie" not in wrong.headers
    given = sign_in(client, "second")
    assert given.status_code == 303
    assert given.headers["location"] == "/"
    cookie = given.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=lax", "Path=/"))
    assert "second" not in cookie
    page = client.get("/", headers=HTML)
    assert page.status_code == 200
    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'"
    )
    assert client.get("/v1/models").status_code == 200
    # What changes something is taken from our own page only: others on this host are sent the
    # cookie, too.
    body = {"prompt": "x"}
    own = f"https://127.0.0.1:{client.base_url.port}"
    for origin, status in (
        (own, 200),
        ("https://127.0.0.1:1", 401),
        (ORIGIN, 401),
        ("null", 401),
        ("", 401),
    ):
        assert (
            client.post("/tokenize", json=body, headers={"origin": origin}).status_code == status
        ), origin
    assert client.post("/tokenize", json=body).status_code == 401
    # A key that is sent goes before the cookie, a wrong one too.
    assert client.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.post("/page/sign_out", headers={"origin": own}).status_code == 204
    assert client.get("/v1/models").status_code == 401


def test_cookies_that_nobody_gave(client: httpx.Client) -> None:
    value = sign_in(client, "first").cookies[f"quire_page_{client.base_url.port}"]
    until, _, proof = value.partition(".")
    client.cookies.clear()
    later, dead = str(int(until) + 1), "1000000000"
    for made in (
        f"{later}.{proof}",
        f"{dead}.{proof}",
        f"{until}.",
        f".{proof}",
        "first",
        "",
        f"{until}.{proof[:-1]}",
    ):
        header = {"cookie": f"quire_page_{client.base_url.port}={made}"}
        assert client.get("/v1/models", headers=header).status_code == 401, made
    header = {"cookie": f"a=b; quire_page_{client.base_url.port}={value}"}
    assert client.get("/v1/models", headers=header).status_code == 200
    assert client.get("/v1/models", headers={"cookie": f"quire_page={value}"}).status_code == 401
    assert client.post("/", content=b"key=" + b"x" * 20_000).status_code == 413


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://[", "https://127.0.0.1:1", "x"]
)
def test_another_sites_page_cant_sign_in_here(client: httpx.Client, origin: str) -> None:
    answer = client.post("/", data={"key": "first"}, headers={"origin": origin})
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers
    own = client.post(
        "/", data={"key": "first"}, headers={"origin": f"https://127.0.0.1:{client.base_url.port}"}
    )
    assert own.status_code == 303


@pytest.mark.parametrize(
    "body",
    [
        b"&".join(b"a%d=b" % i for i in range(9)),
        b"key=\xff",
        b"&" * 5000,
        b"%",
        b"key",
        b"key=%ff%fe",
    ],
)
def test_a_sign_in_form_that_is_none(client: httpx.Client, body: bytes) -> None:
    answer = client.post(
        "/", content=body, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code in (400, 401)
    assert "Traceback" not in answer.text


def test_no_address_leads_to_where_the_host_header_says(client: httpx.Client) -> None:
    key = {"authorization": "Bearer first", "host": "127.0.0.1"}
    for path in (
        "/v1/responses/..%2f",
        "/v1/models/",
        "/docs/",
        "/v1/files/",
        "/page/",
        "//evil.example/",
        "/health/",
    ):
        answer = client.get(path, headers=key)
        assert answer.status_code in (200, 404), path
        assert "location" not in answer.headers


def test_handshakes_that_stop_are_timed_out(server: Server) -> None:
    """`header_seconds` is 10 by default: the test's server has less."""
    connections = [
        socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(30)
    ]
    for each in connections[::2]:
        # the beginning of a ClientHello
        each.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    for each in connections:
        assert each.recv(100) == b""
        each.close()


# Whose requests a key may see


def test_a_key_sees_its_own_requests_and_an_admin_key_all(client: httpx.Client) -> None:
    def as_key(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}", "x-request-id": "the-same"}

    ids = {}
    for key in ("first", "second"):
        body = {"prompt": "a", "max_tokens": 2, "user": f"user-of-{key}"}
        made = client.post("/v1/completions", json=body, headers=as_key(key), timeout=60)
        assert made.status_code == 200, made.text
        ids[key] = made.json()["id"]
    for key, other in (("first", "second"), ("second", "first")):
        for path in ("/v1/requests/the-same", "/v1/requests/the-same/explain"):
            shown = client.get(path, headers=as_key(key), timeout=60)
            assert shown.json()["response_id"] == ids[key]
            assert shown.json()["notes"] == {"user": f"user-of-{key}"}
            assert ids[other] not in shown.text
            assert "owner" not in shown.json()
        for path in (f"/v1/requests/{ids[other]}", f"/v1/requests/{ids[other]}/explain"):
            assert client.get(path, headers=as_key(key)).status_code == 404
        listed = client.get("/v1/requests?limit=1", headers=as_key(key))
        assert [one["response_id"] for one in listed.json()["data"]] == [ids[key]]
        assert "owner" not in listed.json()["data"][0]
    listed = client.get("/v1/requests?limit=2", headers=as_key("boss")).json()["data"]
    assert [one["response_id"] for one in listed] == [ids["second"], ids["first"]]
    for name in ids.values():
        shown = client.get(f"/v1/requests/{name}/explain", headers=as_key("boss"), timeout=60)
        assert shown.json()["response_id"] == name
    assert (
        client.get("/v1/requests/the-same", headers=as_key("boss")).json()["response_id"]
        == ids["second"]
    )


def watched(client: httpx.Client, key: str, until: str, seconds: float = 60) -> str:
    """What the live view tells a key until it tells of something."""
    text = ""
    with client.stream(
        "GET", "/page/watch", headers={"authorization": f"Bearer {key}"}, timeout=seconds
    ) as stream:
        for piece in stream.iter_text():
            text += piece
            if until in text:
                return text
    raise AssertionError(text)


def test_the_live_view_shows_a_key_its_own_requests(client: httpx.Client) -> None:
    made = {}
    for key in ("first", "second"):
        body = {"prompt": f"for {key}", "max_tokens": 3}
        answer = client.post("/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)
        made[key] = answer.json()["id"]
    assert made["first"] in watched(client, "boss", made["second"])
    assert made["first"] not in watched(client, "second", made["second"])
    assert made["second"] not in watched(client, "first", made["first"])


def test_who_signs_in_owns_what_the_key_owns(client: httpx.Client) -> None:
    """A response stored with the key is there for its cookie, and for no other's."""
    key = {"authorization": "Bearer first"}
    made = client.post(
        "/v1/responses",
        json={"input": "x", "max_output_tokens": 1, "seed": 1},
        headers=key,
        timeout=60,
    )
    assert made.status_code == 200, made.text
    sign_in(client, "first")
    assert client.get(f"/v1/responses/{made.json()['id']}").status_code == 200
    client.cookies.clear()
    sign_in(client, "second")
    assert client.get(f"/v1/responses/{made.json()['id']}").status_code == 404


@pytest.mark.slow
def test_in_a_browser(server: Server, browser: Any) -> None:
    with browser.new_context(ignore_https_errors=True) as context:
        page = context.new_page()
        page.goto(server.url + "/#watch")
        page.fill("#key", "wrong")
        page.click("button")
        expect(page.locator("#wrong")).to_be_visible()
        assert context.cookies() == []
        page.fill("#key", "first")
        page.keyboard.press("Enter")
        # the fragment is still there
        expect(page.locator("#tab-watch")).to_have_attribute("aria-selected", "true")
        expect(page.locator("#step-text")).not_to_be_empty()  # frames come
        page.click("#tab-talk")
        context.clear_cookies()
        page.fill("#question", "Hello?")
        page.keyboard.press("Enter")
        expect(page.locator("#signed-out")).to_be_visible()
        page.click("#sign-in-again")
        page.fill("#key", "first")
        page.keyboard.press("Enter")
        page.click("#sign-out")
        expect(page.locator("#key")).to_be_visible()
        assert context.cookies() == []
