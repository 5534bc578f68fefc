"""Files and batches of several keys: bad lines, hostile forms, a folder that is full, clients that
leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import InvalidRequestError
from quire.server.batches.answers import BatchAnswer
from quire.server.batches.entries import StoredBatch
from quire.server.batches.output import AnswerFile
from quire.server.batches.queue import BatchQueue
from quire.server.batches.requests import RequestFile
from quire.server.batches.room import FolderLimits, NoRoomError
from quire.server.batches.store import BatchStore
from quire.server.batches.work import WorkFiles
from quire.server.disk import disk_errors_for_client, write_whole
from quire.server.errors import ApiError
from tests.server.harness import Server, error_of, wait_for
from tests.server.replicas.local_engines import LocalEngines, LocalServer, local_links

MIB = 2**20
SHARE = MIB
URL = "/v1/completions"
KEYS = ("one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(small_model: str, folder: Path) -> Iterator[Server]:
    options: dict[str, Any] = {
        "model": small_model,
        "engine": {},
        "engine_module": "tests.server.scripted_engine",
    }
    keys = {"api_keys": KEYS, "admin_keys": ["boss"]}
    with Server(
        batches=str(folder), max_batch_bytes=3 * SHARE, body_seconds=1.0, **keys, **options
    ) as server:
        yield server
        assert " 500" not in server.log
        assert "Traceback" not in server.log


@pytest.fixture
def one(server: Server) -> Iterator[httpx.Client]:
    with as_key(server, "one") as client:
        yield client
        remove_all(client)


@pytest.fixture
def two(server: Server) -> Iterator[httpx.Client]:
    with as_key(server, "two") as client:
        yield client
        remove_all(client)


def as_key(server: Server, key: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {key}"})


def remove_all(client: httpx.Client) -> None:
    """All batches end, and all files go."""
    for batch in client.get("/v1/batches", params={"limit": 100}).json()["data"]:
        client.post(f"/v1/batches/{batch['id']}/cancel")
        ended(client, batch["id"])
    for file in client.get("/v1/files").json()["data"]:
        assert client.delete(f"/v1/files/{file['id']}").status_code == 200


def upload(client: httpx.Client, data: bytes, name: str = "x.jsonl") -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, data)})


def begin(client: httpx.Client, data: bytes, **more: Any) -> str:
    file = upload(client, data)
    assert file.status_code == 200, file.text
    body = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h", **more}
    batch = client.post("/v1/batches", json=body)
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


def ended(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    def look() -> Any:
        batch = client.get(f"/v1/batches/{batch_id}").json()
        return batch if batch["status"] in ("completed", "cancelled", "failed") else None

    found: dict[str, Any] = wait_for(look, "the batch to end")
    return found


def lines_of(client: httpx.Client, file_id: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in client.get(f"/v1/files/{file_id}/content").text.splitlines()
    ]


def line(number: int, **body: Any) -> bytes:
    asked = {"prompt": "a", "max_tokens": 1, **body}
    return json.dumps(
        {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": asked}
    ).encode()


HEAD = b'{"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": '
BAD_LINES = [
    HEAD + b'"\xff\xfe"}}',
    HEAD + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    HEAD + b"[" * 5_000 + b"]" * 5_000 + b"}}",
    HEAD + b"9" * 5_000 + b"}}",
    HEAD + b"1e999}}",
    HEAD + b'"\\ud800"}}',
    HEAD,
    b"\x00\x01\x02",
    b"\xef\xbb\xbf{}",
    b"[]",
    b"null",
    b"9" * 5_000,
    b'{"custom_id": 1, "url": "/v1/completions", "body": {}}',
    b'{"custom_id": "", "url": "/v1/completions", "body": {}}',
    b'{"custom_id": "%s", "url": "/v1/completions", "body": {}}' % (b"i" * 100_000),
]


def test_a_bad_line_fails_with_its_number_and_the_rest_goes_on(one: httpx.Client) -> None:
    lines = [each for number, bad in enumerate(BAD_LINES) for each in (line(number), bad)]
    batch = ended(one, begin(one, b"\n".join(lines)))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {
        "total": len(lines),
        "completed": len(BAD_LINES),
        "failed": len(BAD_LINES),
    }
    good, bad = lines_of(one, batch["output_file_id"]), lines_of(one, batch["error_file_id"])
    assert [each["custom_id"] for each in good] == [f"id-{i}" for i in range(len(BAD_LINES))]
    for number, each in enumerate(bad):
        assert f"line {2 * number + 2}:" in each["error"]["message"], each
        assert len(each["error"]["message"]) < 500


def test_quire_batch_reads_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join([line(0), *BAD_LINES, line(1)]))
    read = list(RequestFile(path, "options"))
    assert [each.problem is None for each in read] == [True, *[False] * len(BAD_LINES), True]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with path.open("wb") as file:
        file.write(line(0) + b"\n" + b'{"custom_id": "')
        file.seek(200 * MIB, 1)  # a hole: NULs
        file.write(b'"}\n' + line(1))
    read = RequestFile(path, "options")
    assert read.count() == 3
    first, long, last = read
    assert (first.problem, last.problem) == (None, None)
    assert "more than" in str(long.problem)


# Forms

PART = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; '


def form(*parts: bytes) -> bytes:
    return b"--b\r\n" + b"\r\n--b\r\n".join(parts) + b"\r\n--b--\r\n"


def post_form(
    client: httpx.Client, body: bytes, kind: str = "multipart/form-data; boundary=b"
) -> httpx.Response:
    return client.post("/v1/files", content=body, headers={"content-type": kind})


@pytest.mark.parametrize(
    "name",
    [
        b"filename*=utf-7''+2AA-",
        b"filename*=undefined''a",
        b"filename*=idna''a",
        b"filename*=punycode''a",
        b"filename*=\x00''a",
        b"filename*=utf-8''%ff",
        b"filename*=utf-8''%0a",
        b"filename*=utf-8''%zz",
        b"filename*=utf-8",
        b"filename*=''a",
        b"filename*0=a; filename*1=b; filename=c",
        b'filename="\xff"',
        b'filename="a\x00b"',
        b'filename="a\nb"',
        b'filename="%s"' % (b"n" * 300),
        b'filename="a"; filename="b"',
        b'filename="a',
        b"filename=a b",
        b'filename="a" x',
    ],
)
def test_a_file_name_that_cant_be_read_is_refused_and_leaves_nothing(
    one: httpx.Client, folder: Path, name: bytes
) -> None:
    answer = post_form(one, form(PART, FILE + name + b"\r\n\r\n" + b"x" * 1000))
    # continuations mean nothing in a form: the plain name counts
    if name.startswith(b"filename*0"):
        assert answer.json()["filename"] == "c"
        return
    error_of(answer, 400)
    assert list((folder / "work").iterdir()) == []
    assert one.get("/v1/files").json()["data"] == []
    full = upload(one, b"x" * (SHARE - 10_000))  # nothing is counted any more
    assert full.status_code == 200, full.text


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (b'filename="a.jsonl"', "a.jsonl"),
        (b"filename=a.jsonl", "a.jsonl"),
        ('filename="ä.jsonl"'.encode(), "ä.jsonl"),
        (b"filename*=UTF-8''%C3%A4.jsonl", "ä.jsonl"),
        (b"filename*=utf-8'en'a", "a"),
        (b'filename="a\\"b\\\\c"', 'a"b\\c'),
        (b'filename=""', "file"),
        (b'filename="../../etc/passwd"', "../../etc/passwd"),
    ],
)
def test_a_file_name_that_can_be_read_is_kept(one: httpx.Client, name: bytes, wanted: str) -> None:
    answer = post_form(one, form(PART, FILE + name + b"\r\n\r\n{}"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == wanted


GOOD = FILE + b'filename="a"\r\n\r\n{}'


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, form(PART, GOOD, GOOD)),
        (400, form(PART, PART, GOOD)),
        (400, form(PART)),
        (400, form(GOOD)),
        (400, form(*[PART.replace(b"purpose", b"x%d" % i) for i in range(40)], GOOD)),
        (400, form(PART, b'Content-Disposition: form-data; name="x"\r\n\r\n' + b"v" * 5000, GOOD)),
        (400, form(PART, b'Content-Disposition: form-data; name="x"\r\n\r\n\xff', GOOD)),
        (
            400,
            form(
                PART,
                b'Content-Disposition: form-data; name="expires_after[anchor]"\r\n\r\ncreated_at',
                GOOD,
            ),
        ),
        (400, form(PART, b"Content-Transfer-Encoding: base64\r\n" + GOOD)),
        (400, form(PART, b"Content-Disposition: attachment\r\n" + GOOD)),
        (400, form(PART, b"Content-Disposition: attachment; name=file\r\n\r\n{}")),
        (400, form(PART, b"Content-Disposition: form-data; name=\r\n\r\n{}")),
        (400, form(PART, b"X" * 9000 + b": 1\r\n" + GOOD)),
        (400, form(PART, b"".join(b"x-%d: 1\r\n" % i for i in range(100)) + GOOD)),
        (400, form(PART, GOOD)[:-6]),
        (400, b"\r\n" * 1000 + b"x"),
        (200, form(PART, GOOD) + b"an epilogue"),
        (200, form(PART, b'Content-Disposition: form-data; name="other"\r\n\r\n1', GOOD)),
    ],
)
def test_forms(one: httpx.Client, folder: Path, status: int, body: bytes) -> None:
    answer = post_form(one, body)
    assert answer.status_code == status, answer.text
    assert list((folder / "work").iterdir()) == []
    if b"other" in body:
        assert answer.headers["x-quire-ignored"] == "other"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "multipart/form-data"),
        (400, "multipart/form-data; boundary="),
        (400, 'multipart/form-data; boundary=""'),
        (400, f"multipart/form-data; boundary={'b' * 71}"),
        (400, 'multipart/form-data; boundary="b\\"'),
        (400, "multipart/form-data; boundary=b; boundary=c"),
        (400, "multipart/form-data; boundary*=utf-7''b"),
        (415, "multipart/mixed; boundary=b"),
        (415, ""),
        (415, "application/json"),
    ],
)
def test_content_types(one: httpx.Client, status: int, kind: str) -> None:
    error_of(post_form(one, form(PART, GOOD), kind), status)


# What clients may keep


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": "v" * 513},
        {"k" * 65: "v"},
        {str(i): "v" for i in range(17)},
        {"a": 1},
        {"a": None},
        {"a": ["v"]},
        [],
        "text",
    ],
)
def test_metadata_has_bounds_wherever_it_is_taken(one: httpx.Client, metadata: Any) -> None:
    batch = {"input_file_id": "x", "endpoint": URL, "completion_window": "24h"}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, body in (
        ("/v1/batches", batch),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "a"}),
    ):
        error_of(one.post(path, json=body | {"metadata": metadata}), 400, "metadata")


def test_the_largest_metadata_are_kept_and_counted(one: httpx.Client) -> None:
    """The oldest batches are forgotten, which nobody can delete, and there is room for files again."""
    metadata = {f"{i:064}": "v" * 512 for i in range(16)}
    batch = begin(one, line(0), metadata=metadata)
    assert ended(one, batch)["metadata"] == metadata
    body = {"input_file_id": one.get(f"/v1/batches/{batch}").json()["input_file_id"]}
    body |= {"endpoint": URL, "completion_window": "24h"}
    upload(one, b"x" * (SHARE - 100_000))
    for _ in range(20):
        answer = one.post("/v1/batches", json=body | {"metadata": metadata})
        assert answer.status_code == 200, answer.text
        ended(one, answer.json()["id"])
    left = one.get("/v1/batches", params={"limit": 100}).json()["data"]
    assert 1 < len(left) < 12
    assert upload(one, b"x" * 30_000).status_code == 200
    assert len(one.get("/v1/batches", params={"limit": 100}).json()["data"]) < len(left)


# One folder, several keys


def test_a_key_fills_its_own_share_and_nobody_elses(one: httpx.Client, two: httpx.Client) -> None:
    batch = begin(two, b"\n".join(line(i, max_tokens=30) for i in range(40)))
    assert upload(one, b"x" * (SHARE - 20_000)).status_code == 200
    assert "share" in error_of(upload(one, b"x" * 50_000), 413)
    assert upload(two, b"x" * 500_000).status_code == 200
    found = ended(two, batch)
    assert (found["status"], found["request_counts"]["completed"]) == ("completed", 40)


def test_a_batch_without_room_waits_and_then_goes_on(
    one: httpx.Client, two: httpx.Client, server: Server
) -> None:
    data = b"\n".join(line(i, max_tokens=5, logprobs=5) for i in range(60))
    filler = upload(one, b"x" * (SHARE - 30_000 - len(data))).json()["id"]
    batch = begin(one, data)
    wait_for(lambda: f"batch {batch} waits" in server.log, "it to have no room")
    assert one.get(f"/v1/batches/{batch}").json()["status"] == "in_progress"
    assert ended(two, begin(two, line(0)))["status"] == "completed"  # nobody waits with it
    assert one.delete(f"/v1/files/{filler}").status_code == 200
    found = ended(one, batch)
    assert found["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    assert [each["custom_id"] for each in lines_of(one, found["output_file_id"])] == [
        f"id-{i}" for i in range(60)
    ]


def test_a_batch_that_waits_can_be_cancelled_and_keeps_what_it_has(
    one: httpx.Client, server: Server
) -> None:
    data = b"\n".join(line(i, max_tokens=5, logprobs=5) for i in range(60))
    upload(one, b"x" * (SHARE - 40_000 - len(data)))
    batch, other = begin(one, data), begin(one, line(0))
    wait_for(lambda: f"batch {batch} waits" in server.log, "it to have no room")
    for each in (other, batch):
        one.post(f"/v1/batches/{each}/cancel")
        assert ended(one, each)["status"] == "cancelled"
    found = ended(one, batch)
    assert len(lines_of(one, found["output_file_id"])) == found["request_counts"]["completed"] > 0


def test_eight_uploads_at_once_dont_pass_the_limit_together(
    one: httpx.Client, server: Server
) -> None:
    found: list[int] = []

    def send() -> None:
        with as_key(server, "one") as client:
            found.append(upload(client, b"x" * (SHARE * 2 // 5)).status_code)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(found)) == [200, 413]
    assert found.count(200) <= 2
    assert sum(each["bytes"] for each in one.get("/v1/files").json()["data"]) <= SHARE


def test_uploads_deletions_and_listings_get_along(server: Server, one: httpx.Client) -> None:
    statuses: set[int] = set()

    def work() -> None:
        with as_key(server, "one") as client:
            for _ in range(12):
                answer = upload(client, b"x" * 1000)
                statuses.add(answer.status_code)
                statuses.add(client.get("/v1/files").status_code)
                statuses.add(client.delete(f"/v1/files/{answer.json()['id']}").status_code)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {200}


def test_a_key_sees_its_own_and_an_admin_key_all(
    one: httpx.Client, two: httpx.Client, server: Server
) -> None:
    batch = begin(one, line(0), metadata={"a": "b"})
    file = ended(one, batch)["output_file_id"]
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
        error_of(two.get(path), 404)
    error_of(two.delete(f"/v1/files/{file}"), 404)
    error_of(two.post(f"/v1/batches/{batch}/cancel"), 404)
    assert two.get("/v1/files").json()["data"] == []
    assert batch not in two.get("/v1/batches").text
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    error_of(two.post("/v1/batches", json=body), 404, "file_id")
    with as_key(server, "boss") as boss:
        assert {each["id"] for each in boss.get("/v1/batches").json()["data"]} >= {batch}
        assert lines_of(boss, file)[0]["custom_id"] == "id-0"
        assert boss.delete(f"/v1/files/{file}").status_code == 200
    error_of(one.get(f"/v1/files/{file}/content"), 404)


# Clients that stop, and files that go


def raw_upload(server: Server, length: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: {length}\r\n"
    connection.sendall(
        head.encode() + b"content-type: multipart/form-data; boundary=b\r\n\r\n" + sent
    )
    return connection


def is_tidy(folder: Path) -> bool:
    return not list((folder / "work").iterdir())


def test_an_upload_that_stops_is_timed_out(one: httpx.Client, server: Server, folder: Path) -> None:
    with raw_upload(server, 500_000, form(PART, GOOD)[:-30]) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
    wait_for(lambda: is_tidy(folder), "nothing to be left")
    assert upload(one, b"x" * (SHARE - 10_000)).status_code == 200


def test_a_client_that_leaves_is_no_error_of_the_server(
    one: httpx.Client, server: Server, folder: Path
) -> None:
    before = server.log.count("the client left")
    with raw_upload(server, 500_000, form(PART, GOOD)[:-30]):
        wait_for(lambda: not is_tidy(folder), "the upload to begin")
    wait_for(lambda: server.log.count("the client left") > before, "the end")
    wait_for(lambda: is_tidy(folder), "nothing to be left")
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\ncontent-length: 9\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(chat + b"content-type: application/json\r\n\r\n{")
    assert one.get("/health").status_code == 200


def test_a_file_that_vanished_is_missing_and_its_batch_fails_alone(
    one: httpx.Client, folder: Path, server: Server
) -> None:
    file = upload(one, line(0)).json()["id"]
    (folder / "files" / f"{file}.data").unlink()
    error_of(one.get(f"/v1/files/{file}/content"), 404)
    body = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
    batch = ended(one, one.post("/v1/batches", json=body).json()["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["message"] == "the input file is gone"
    assert is_tidy(folder)
    assert one.delete(f"/v1/files/{file}").status_code == 200


def test_a_link_in_the_place_of_a_file_is_not_followed(
    one: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    file = upload(one, line(0)).json()["id"]
    path, secret = folder / "files" / f"{file}.data", tmp_path / "secret"
    secret.write_text("secret")
    path.unlink()
    path.symlink_to(secret)
    answer = one.get(f"/v1/files/{file}/content")
    assert "secret" not in answer.text
    error_of(answer, 503)


# The store alone


def stored_batch(name: str = "batch_1", **fields: Any) -> StoredBatch:
    common = {
        "owner": "me",
        "created_at": 1,
        "endpoint": URL,
        "input_file_id": "f",
        "completion_window": "24h",
    }
    return StoredBatch(id=name, **common | fields)


def limited_files(num_bytes: int) -> Any:
    """Files beyond that can't be written, as on a full disk."""

    class Limited:
        def __enter__(self) -> None:
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, self.before[1]))

        def __exit__(self, *_: object) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)

    return Limited()


def test_a_full_disk_leaves_no_half_files(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, FolderLimits.of(MIB, 1))
    upload = store.new_upload("me")
    with limited_files(100), pytest.raises(OSError, match="large") as caught:
        upload.write(b"x" * 1000)
    with pytest.raises(ApiError) as told, disk_errors_for_client():
        raise caught.value
    assert (told.value.status, told.value.code) == (507, "disk_full")
    assert str(tmp_path) not in told.value.message
    upload.discard()
    small = store.new_upload("me")
    small.write(b"x")
    with limited_files(10), pytest.raises(OSError, match="large"):
        store.add_file(small, "a", "batch")
    small.discard()
    batch = stored_batch()
    work = store.open_work(batch)
    work.write([BatchAnswer(b"1\n", False), BatchAnswer(b"2\n", True)])
    with limited_files(100), pytest.raises(OSError, match="large"):
        work.write([BatchAnswer(b"3\n", False), BatchAnswer(b"x" * 1000, True)])
    work.close()
    assert (work.output.size, work.errors.size, store.room.taken()) == (2, 2, 4)
    found = {
        path.name: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert found == {"batch_1.output": b"1\n", "batch_1.errors": b"2\n"}
    store.close()


def test_a_start_removes_what_belongs_to_nobody(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, FolderLimits.of(MIB, 1))
    upload = store.new_upload("me")
    upload.write(b"x" * 100)
    file = store.add_file(upload, "a", "batch")
    running, over = (
        stored_batch("batch_1", input_file_id=file.id),
        stored_batch("batch_2", input_file_id=file.id),
    )
    for batch in (running, over):
        store.add_batch(batch)
        work = store.open_work(batch)
        work.write([BatchAnswer(b"1\n", False)])
        work.close()
    over.status = "failed"
    store.save(over)
    taken = store.room.taken() - 2
    for name in (
        "work/batch_3.part",
        "work/upload-1",
        "files/file-x.data",
        "files/file-x.unfinished",
    ):
        (tmp_path / name).write_bytes(b"x" * 100_000)
    (tmp_path / "batches" / "batch_9.json").write_bytes(b"[" * 5000)
    (tmp_path / "files" / "file-9.json").write_bytes(b"\xff")
    (tmp_path / "work" / "link").symlink_to("/etc/passwd")
    store.close()
    again = BatchStore(tmp_path, FolderLimits.of(MIB, 1))
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    records = {"batch_1.json", "batch_2.json", f"{file.id}.json"}
    assert names == {".lock", f"{file.id}.data", "batch_1.output", "batch_1.errors", *records}
    assert again.room.taken() == taken
    again.close()


def test_a_batch_that_is_over_stays_until_its_client_has_seen_it(tmp_path: Path) -> None:
    """Found by CI: another batch that waited for room took its record's, and its client got 404."""
    store = BatchStore(tmp_path, FolderLimits.of(MIB, 1))
    upload = store.new_upload("me")
    upload.write(b"x" * 100)
    file = store.add_file(upload, "a", "batch")
    over, running = (
        stored_batch(f"batch_{i}", input_file_id=file.id, owner="me") for i in range(2)
    )
    for batch in (over, running):
        store.add_batch(batch)
    store.end_batch(over, "cancelled")
    left = MIB - store.room.taken()
    work = store.open_work(running)
    with pytest.raises(NoRoomError):
        work.write([BatchAnswer(b"x" * (left + 1), False)])
    assert store.batch("me", over.id).status == "cancelled"
    assert over.ended_at is not None
    over.ended_at -= 3600
    work.write([BatchAnswer(b"x" * (left + 1), False)])
    with pytest.raises(ApiError):
        store.batch("me", over.id)
    work.close()
    store.close()


def test_records_are_never_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("record.json", "record.unfinished"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "record.json", b"{}")
    assert victim.read_text() == "mine"
    assert (tmp_path / "record.json").read_bytes() == b"{}"
    assert not (tmp_path / "record.json").is_symlink()


def test_answers_are_never_written_through_a_link_or_over_a_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out.jsonl.part").symlink_to(victim)
    with pytest.raises(InvalidRequestError, match="is a link"):
        AnswerFile(tmp_path / "out.jsonl", restart=True)
    assert victim.read_text() == "mine"
    with pytest.raises(InvalidRequestError, match="is a folder"):
        AnswerFile(tmp_path, restart=False)


def test_what_was_cut_off_is_answered_again_and_counted_once(tmp_path: Path) -> None:
    """Killed between two writes, one of the files has lines behind the other's end."""
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\n".join(line(i) for i in range(4)))
    requests = RequestFile(path, "b")
    ids = [each.answer_id for each in requests]
    store = BatchStore(tmp_path / "store", FolderLimits.of(MIB, 1))
    work = store.open_work(stored_batch())
    lines = [json.dumps({"id": each}).encode() + b"\n" for each in ids]
    # the error of line 1 did not come
    work.write([BatchAnswer(lines[0], False), BatchAnswer(lines[2], False)])
    left = work.resume(iter(requests))
    assert [each.number for each in left] == [1, 2, 3]
    assert (work.output.num_lines, work.errors.num_lines) == (1, 0)
    assert store.room.taken() == work.output.size == len(lines[0])
    work.close()
    store.close()


def test_shares_are_even_unless_told_otherwise() -> None:
    assert FolderLimits.of(900, 3).bytes_per_key == 300
    assert FolderLimits.of(900, 0).bytes_per_key == 900
    assert FolderLimits.of(900, 3, 500).bytes_per_key == 500
    assert NoRoomError(1, 2, 3, "x").status == 413


def test_a_batch_that_is_cancelled_while_its_files_are_opened_leaves_none_open(
    small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the soak: two descriptors stayed for each such batch."""
    store = BatchStore(tmp_path, FolderLimits.of(MIB, 1))
    upload_of = store.new_upload("one")
    upload_of.write(line(0))
    stored = store.add_file(upload_of, "x.jsonl", "batch")
    engines = LocalEngines(small_model)
    opening, may_open, opened = threading.Event(), threading.Event(), []
    open_work = store.open_work

    def open_late(batch: StoredBatch) -> WorkFiles:
        opening.set()
        assert may_open.wait(60)
        opened.append(open_work(batch))
        return opened[0]

    monkeypatch.setattr(store, "open_work", open_late)

    async def main() -> None:
        server = LocalServer(engines, 1)
        async with server:
            queue = BatchQueue(store, server.service)
            batch = StoredBatch(
                id="batch_1",
                owner="one",
                created_at=0,
                endpoint=URL,
                input_file_id=stored.id,
                completion_window="24h",
            )
            await queue.add(batch)
            await asyncio.to_thread(opening.wait, 60)
            await queue.cancel(batch)
            may_open.set()
            async with asyncio.timeout(60):
                while not batch.is_over:
                    await asyncio.sleep(0.01)
            assert batch.status == "cancelled"
            await queue.stop()

    with local_links(engines):
        asyncio.run(main())
    (work,) = opened
    for part in (work.output, work.errors):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(part.number)
