"""Keys, hosts, origins and TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire.server.guard.auth import ApiKeys
from tests.server.harness import SMALL_ENGINE, Server, wait_for

ORIGIN = "https://app.example"
PATHS = (
    "/v1/models",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/version",
    "/ready",
    "/v1/requests/x",
    "/v1/requests/x/explain",
    "/nothing",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, small_model: str) -> Iterator[Server]:
    """All that is off by default, on."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    fields = {"api_keys": ["first", "second"], "cors_origins": [ORIGIN], "allowed_hosts": ["127.0.0.1"]}
    fields |= {"model": small_model, "engine": SMALL_ENGINE}  # type: ignore[dict-item]
    with Server(tls_certificate=str(folder / "cert.pem"), tls_key=str(folder / "key.pem"), **fields) as server:
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
    for path in (*PATHS, "/health/", "/health/x", "//health", "/health%2f", "/HEALTH", "/v1/models?/health"):
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
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "x@127.0.0.1"):
        assert client.get("/health", headers={"host": host}).status_code == 421
    assert client.get("/health", headers={"host": "127.0.0.1"}).status_code == 200


def test_pages_of_the_allowed_origin_only(client: httpx.Client) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = client.options("/v1/chat/completions", headers={"origin": ORIGIN, **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = client.options("/v1/chat/completions", headers={"origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in other.headers


def test_plain_http_is_not_spoken(server: Server) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")
    wait_for(lambda: server.health() == 200, what="health")


def raw_status(server: Server, request_line: str, *headers: str) -> int:
    """Of a request as it is written: clients tidy paths up."""
    certificate: Path = server.certificate  # type: ignore[attr-defined]
    context = ssl.create_default_context(cafile=str(certificate))
    lines = [f"{request_line} HTTP/1.1", *(headers or ("host: 127.0.0.1",)), "connection: close", "", ""]
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        return int(connection.recv(1024).split(b" ", 2)[1])


@pytest.mark.parametrize("target", ["/health", "/%68ealth", "/health?x=/v1/models", "http://evil.example/health"])
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


@pytest.mark.parametrize(
    "headers",
    [
        ("host: 127.0.0.1", "host: x/health"),
        ("host: 127.0.0.1", "x-original-url: /health"),
        ("host: 127.0.0.1", "x-rewrite-url: /health"),
        ("host: 127.0.0.1", "x-forwarded-prefix: /health"),
        ("host: 127.0.0.1", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    ],
)
def test_no_header_opens_a_path(server: Server, headers: tuple[str, ...]) -> None:
    assert raw_status(server, "GET /v1/models", *headers) == 401
