"""HTTP as no client writes it, over plain sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.server.harness import Server, wait_for

BODY = json.dumps({"prompt": "The capital of France is", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    """Impatient: tests wait for its time limits."""
    limits = {
        "header_seconds": 1.0,
        "body_seconds": 1.0,
        "write_seconds": 1.0,
        "max_connections": 50,
    }
    with Server(
        model=small_model, engine={}, engine_module="tests.server.scripted_engine", **limits
    ) as server:
        server.assert_sound()
        yield server
        server.assert_sound()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def exchange(server: Server, *pieces: bytes) -> bytes:
    with connect(server) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has heard enough
        return read_all(connection)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def body_of(answer: bytes) -> dict[str, dict[str, str]]:
    body: dict[str, dict[str, str]] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return body


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, where plain HTTP is spoken
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 6\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\x00b\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_400(server: Server, garbage: bytes) -> None:
    answer = exchange(server, garbage)
    assert status_of(answer) == 400
    assert "request_id" in body_of(answer)["error"]


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /health HTTP/1.1\r\n"
        + b"".join(b"x-%d: %s\r\n" % (i, b"v" * 1000) for i in range(60))
        + b"\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"v" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"v" * 200_000,  # and it never ends
    ],
)
def test_giant_headers(server: Server, request_head: bytes) -> None:
    answer = exchange(server, request_head)
    assert status_of(answer) == 431
    assert "headers are too large: at most 32768" in body_of(answer)["error"]["message"]


@pytest.mark.parametrize("start", [b"", b"GET", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_slow_headers(server: Server, start: bytes) -> None:
    assert status_of(exchange(server, start)) == 408


def test_slow_headers_after_a_good_request(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /health HT")
        assert status_of(read_all(connection)) == 408


@pytest.mark.parametrize("sent", [b"", BODY[:10]])
def test_a_body_that_does_not_come(server: Server, sent: bytes) -> None:
    answer = exchange(server, HEAD + LENGTH + b"\r\n" + sent)
    assert status_of(answer) == 408
    assert b"connection: close" in answer


MEGABYTE = b"x" * 1_000_000
CHUNK = b"%x\r\n%s\r\n" % (len(MEGABYTE), MEGABYTE)


@pytest.mark.parametrize(
    ("head", "pieces"),
    [
        (b"content-length: 99999999999\r\n\r\n", []),
        (b"content-length: 20000000\r\n\r\n", [MEGABYTE] * 20),
        (b"transfer-encoding: chunked\r\n\r\n", [CHUNK] * 20),
        (b"transfer-encoding: chunked\r\n\r\n", [CHUNK] * 20 + [b"0\r\n\r\n"]),
    ],
)
def test_a_body_that_is_too_large_gets_an_answer_that_can_be_read(
    server: Server, head: bytes, pieces: list[bytes]
) -> None:
    """The client sends all it has before it reads: closed too early, the connection would be reset."""
    with connect(server) as connection:
        for piece in (HEAD + head, *pieces):
            connection.sendall(piece)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert status_of(answer) == 413
    assert "--max-body-size" in body_of(answer)["error"]["message"]


def test_a_body_without_end_is_not_read_for_ever(server: Server) -> None:
    """What follows the answer is read on, so much and no more."""
    with connect(server) as connection:
        connection.sendall(HEAD + b"content-length: 99999999999\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            connection.sendall(MEGABYTE * 200)
    assert "status=413" in server.log


@pytest.mark.parametrize(
    "ahead", [b"GET /hea", b"no http\r\n\r\n", b"GET /health HTTP/1.1\r\nx: " + b"v" * 60_000]
)
def test_what_is_wrong_with_a_request_sent_ahead_does_not_cost_the_first_its_answer(
    server: Server, ahead: bytes
) -> None:
    server.fault_file.write_text("slow 0.6")
    answer = exchange(server, HEAD + LENGTH + b"\r\n" + BODY + ahead)
    server.fault_file.write_text("")
    assert status_of(answer) == 200
    # If it is soon enough, the second is told what is wrong, too.
    assert [status_of(b"HTTP/1.1" + one) for one in answer.split(b"HTTP/1.1")[2:]] in (
        [],
        [408],
        [431],
    )


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"identity", b"deflate,chunked"])
def test_no_coding_but_chunks(server: Server, coding: bytes) -> None:
    answer = exchange(
        server, HEAD + b"transfer-encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    assert status_of(answer) == 415
    assert "transfer-encoding" in body_of(answer)["error"]["message"]


@pytest.mark.parametrize(
    "chunks", [b"ZZ\r\n", b"2\r\n{}0\r\n", b"-1\r\n", b"5;x\x00\r\n", b"fffffffffffffffff\r\n"]
)
def test_broken_chunks(server: Server, chunks: bytes) -> None:
    for pieces in ((chunks,), (b"1\r\n{\r\n", chunks)):
        answer = exchange(server, HEAD + b"transfer-encoding: chunked\r\n\r\n", *pieces)
        assert status_of(answer) == 400
        assert answer.count(b"HTTP/1.1") == 1
        assert "request_id" in body_of(answer)["error"]


# Trailers

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(BODY), BODY)


def test_trailers_are_dropped(server: Server) -> None:
    """Not even the last one gets into the headers, of this request or of the next on the
    connection.
    """
    trailers = (
        b"x-request-id: from-a-trailer\r\ncontent-encoding: gzip\r\nx-request-id: last\r\n\r\n"
    )
    nothing = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(CHUNKED + b"0\r\n" + trailers)
        answer = connection.recv(65536)
        assert status_of(answer) == 200
        connection.sendall(nothing)
        answer += read_all(connection)
    assert answer.count(b"200 OK") == 2
    assert b"from-a-trailer" not in answer
    assert b"x-request-id: last" not in answer


@pytest.mark.parametrize(
    "pieces",
    [
        [b"0\r\n", *[b"x-%d: %s\r\n" % (i, b"v" * 1000) for i in range(100)]],
        [b"0\r\nx: ", *[b"v" * 60_000] * 20],
        [b"1;", *[b"v" * 60_000] * 20],
        [b"1;" + b"v" * 100_000],
        [b"1;%s\r\nx\r\n" % (b"v" * 100), *[b"1;%s\r\nx\r\n" % (b"v" * 100)] * 400],
        [b"0\r\n" + b"a:\r\n" * 20_000, *[b"a:\r\n" * 20_000] * 60],
    ],
    ids=[
        "large",
        "one without end",
        "a chunk's extension without end",
        "a large one",
        "small ones",
        "many",
    ],
)
def test_trailers_are_counted(server: Server, pieces: list[bytes]) -> None:
    before = server.memory()[0]
    for sent in ((CHUNKED, *pieces), (CHUNKED + b"".join(pieces),)):
        answer = exchange(server, *sent)
        assert status_of(answer) == 431
        assert "trailers" in body_of(answer)["error"]["message"]
    assert server.memory()[0] < before + 32 * 1024


# Half of a connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(server: Server, stream: bool) -> None:
    """After its request, and while it waits."""
    server.fault_file.write_text("slow 0.1")
    body = json.dumps(
        {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream}
    ).encode()
    with connect(server) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    server.fault_file.write_text("")
    answer = answer.rpartition(b"HTTP/1.1 100 Continue\r\n\r\n")[2]
    assert status_of(answer) == 200
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    if not stream:
        assert body_of(answer)["usage"]["completion_tokens"] == 3  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_and_leaves_later_is_noticed(
    server: Server, stream: bool
) -> None:
    server.fault_file.write_text("slow 0.02")
    body = json.dumps(
        {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    ).encode()
    with connect(server) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, what="the request")
    wait_for(lambda: server.is_idle, what="its end")
    server.fault_file.write_text("")


def test_half_a_body_and_no_more(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(HEAD + LENGTH + b"\r\n" + BODY[:9])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


def test_bodies_in_pieces_of_every_size(server: Server) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    answer = exchange(
        server, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    )
    assert status_of(answer) == 200
    request = HEAD + b"connection: close\r\n" + LENGTH + b"\r\n" + BODY
    answer = exchange(server, *(request[i : i + 1] for i in range(len(request))))
    assert status_of(answer) == 200


def test_a_body_that_is_asked_for_first(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            HEAD + b"expect: 100-continue\r\nconnection: close\r\n" + LENGTH + b"\r\n"
        )
        assert b"100 Continue" in connection.recv(1024)
        connection.sendall(BODY)
        assert status_of(read_all(connection)) == 200


def test_requests_sent_ahead_are_dropped_with_the_connection(server: Server) -> None:
    answer = exchange(server, (HEAD + LENGTH + b"\r\n" + BODY) * 3)
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_sent_ahead_and_left_is_noticed(server: Server) -> None:
    server.fault_file.write_text("slow 0.02")
    body = json.dumps({"prompt": "Go on:", "max_tokens": 900, "ignore_eos": True}).encode()
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with connect(server) as connection:
        connection.sendall(request + request[:100])
        wait_for(lambda: server.metric("vllm:num_requests_running") == 1, what="the request")
    wait_for(lambda: server.is_idle, what="its end")
    server.fault_file.write_text("")


def test_the_host_header_changes_nothing(server: Server) -> None:
    for host, status in (
        (b"evil.example", 200),
        (b"", 200),
        (b"[::1]/health", 400),
        (b"x/health?", 400),
    ):
        answer = exchange(
            server, b"GET /version HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n"
        )
        assert status_of(answer) == status


def test_upgrades_are_not_for_us(server: Server) -> None:
    head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert status_of(exchange(server, head)) in (200, 400)


def test_too_many_connections(server: Server) -> None:
    opened = [connect(server) for _ in range(50)]
    try:
        answer = exchange(server, b"GET /health HTTP/1.1\r\n\r\n")
        assert status_of(answer) == 503
        assert b"retry-after" in answer
    finally:
        for one in opened:
            one.close()
    wait_for(lambda: server.health() == 200, what="room")


def test_a_stream_nobody_reads_ends_alone(server: Server) -> None:
    """A tiny window, many tokens: the server's side fills up, then its time is up."""
    body = json.dumps(
        {"prompt": "Go on:", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}
    )
    server.fault_file.write_text("slow 0.01")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.port))
        head = HEAD + b"x-request-id: slow-reader\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body.encode())
        wait_for(lambda: server.metric("vllm:num_requests_running") == 8, what="the request")
        other = server.complete(prompt="The capital of France is", max_tokens=4, ignore_eos=True)
        assert other["usage"]["completion_tokens"] == 4
        wait_for(lambda: "request_id=slow-reader" in server.log, "the stream's end")
    server.fault_file.write_text("")
    line = next(line for line in server.log.splitlines() if "request_id=slow-reader" in line)
    assert "state=failed" in line or "state=aborted" in line
    assert int(line.split("completion_tokens=")[1].split()[0]) < 8 * 900


@pytest.mark.parametrize("at_once", [True, False])
def test_extensions_of_chunks_are_bounded_however_they_come(server: Server, at_once: bool) -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(BODY), b"e" * 100_000, BODY)
    answer = (
        exchange(server, head + chunk)
        if at_once
        else exchange(server, head, chunk[:50_000], chunk[50_000:])
    )
    assert status_of(answer) == 431
    assert "extensions of chunks" in body_of(answer)["error"]["message"]


@pytest.mark.parametrize(
    "host", [b"[", b"a b", b"x@y", b"a:b", b"a:1:2", b"[::1", b"a/b", b"\xff", b"a\tb", b"[]:1"]
)
def test_a_host_that_is_none_gets_400(server: Server, host: bytes) -> None:
    for target in (b"/", b"/health", b"/v1/models"):
        assert (
            status_of(exchange(server, b"GET %s HTTP/1.1\r\nhost: %s\r\n\r\n" % (target, host)))
            == 400
        )


@pytest.mark.parametrize(
    "host", [b"", b"a", b"a:80", b"[::1]:8000", b"127.0.0.1", b"xn--a.example:", b"a_b"]
)
def test_a_host_that_is_one_is_served(server: Server, host: bytes) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % host
    assert status_of(exchange(server, request)) == 200
