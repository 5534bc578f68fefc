"""`quire batch`: the same bytes however often it is killed, no line lost or twice, and errors where
they belong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidRequestError, QuireError
from quire.server.batches.output import AnswerFile
from quire.server.batches.requests import RequestFile
from quire.server.batches.run import BatchJob, run_batch
from tests.server.harness import ROOT, wait_for

ENGINE: dict[str, object] = {"device": "cpu", "kv_cache_memory": "8MiB", "max_num_seqs": 4}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def line(number: int, url: str, body: dict[str, Any], **more: Any) -> str:
    return json.dumps(
        {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body} | more
    )


def write_requests(path: Path, count: int) -> list[str]:
    """Chats, completions and embeddings in turns, then lines that are wrong in several ways."""
    lines = []
    for i in range(count):
        chat = {
            "messages": [{"role": "user", "content": f"say {i}"}],
            "max_tokens": 40,
            "logprobs": i % 2 == 0,
        }
        if i % 4 == 3:
            chat |= {"tools": [TOOL], "tool_choice": "required"}
        text = {
            "prompt": [f"once {i}", "then"],
            "max_tokens": 60,
            "n": 2,
            "temperature": 0.9,
            "ignore_eos": True,
        }
        embedding = {"input": [f"text {i}", "other"], "encoding_format": "base64"}
        lines += [
            line(3 * i, "/v1/chat/completions", chat),
            line(3 * i + 1, "/v1/completions", text),
            line(3 * i + 2, "/v1/embeddings", embedding),
        ]
    lines += [
        "{not json",
        line(0, "/v1/completions", {"prompt": "again"}),
        line(-1, "/v1/completions", {"prompt": "a", "max_tokens": -1}),
        line(-2, "/v1/responses", {"input": "a"}),
        line(-3, "/v1/completions", {"prompt": "a", "stream": True}),
        line(-4, "/v1/completions", {"prompt": "a", "model": "another"}),
        line(-5, "/v1/completions", {"prompt": "a"}, method="GET"),
        json.dumps({"custom_id": "no-body", "url": "/v1/completions"}),
    ]
    path.write_text("\n".join(lines) + "\n\n")
    return lines


def job(folder: Path, model: str, name: str = "answers.jsonl", **fields: Any) -> BatchJob:
    return BatchJob(
        folder / "requests.jsonl", folder / name, model, ENGINE, concurrency=6, **fields
    )


def report(done: int, total: int, num_tokens: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    write_requests(folder / "requests.jsonl", 24)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path, small_model: str) -> bytes:
    summary = run_batch(job(folder, small_model), report)
    assert (summary.total, summary.done, summary.failed, summary.resumed) == (80, 80, 8, 0)
    assert summary.num_tokens > 24 * 2 * 2 * 60
    assert not (folder / "answers.jsonl.part").exists()
    return (folder / "answers.jsonl").read_bytes()


@pytest.mark.slow
def test_every_request_has_its_answer_in_its_place(undisturbed: bytes) -> None:
    found = [json.loads(one) for one in undisturbed.splitlines()]
    assert [one["custom_id"] for one in found[:72]] == [f"id-{i}" for i in range(72)]
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in found[:72])
    chat, text, vector = (one["response"]["body"] for one in found[:3])
    assert chat["object"] == "chat.completion"
    assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"]
    assert len(text["choices"]) == 4
    assert text["usage"]["completion_tokens"] == 240
    assert [one["index"] for one in vector["data"]] == [0, 1]
    calls = [
        one["response"]["body"]["choices"][0]["message"].get("tool_calls") for one in found[9:72:12]
    ]
    assert all(calls)
    assert len({one["id"] for one in found}) == 80
    malformed, twice, limit, url, stream, model, method, body = found[72:]
    assert malformed["custom_id"] is None
    assert "line 73" in malformed["error"]["message"]
    assert "earlier line" in twice["error"]["message"]
    for one, status, field in (
        (limit, 400, "max_tokens"),
        (url, 404, "url"),
        (stream, 400, "stream"),
        (model, 404, "model"),
    ):
        assert one["response"]["status_code"] == status
        assert one["response"]["body"]["error"]["param"] == field
    assert "POST" in method["error"]["message"]
    assert (body["custom_id"], body["response"]) == ("no-body", None)


def command(folder: Path, model: str, name: str) -> Sequence[str]:
    options = [
        "--device",
        "cpu",
        "--kv-cache-memory",
        "8MiB",
        "--max-num-seqs",
        "4",
        "--concurrency",
        "6",
    ]
    files = [str(folder / "requests.jsonl"), "-o", str(folder / name)]
    return [sys.executable, "-m", "quire", "batch", *files, "--model", model, *options]


def engine_of(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            yield int(child)


@pytest.mark.slow
def test_killed_at_any_moment_it_comes_out_the_same(
    folder: Path, undisturbed: bytes, small_model: str
) -> None:
    """The command is killed in the middle; in the second run the engine is."""
    part = folder / "killed.jsonl.part"
    arguments = command(folder, small_model, "killed.jsonl")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def written() -> int:
        return part.read_bytes().count(b"\n") if part.exists() else 0

    with subprocess.Popen(arguments, env=environment) as process:
        wait_for(lambda: written() >= 10 or process.poll() is not None, "some answers")
        process.kill()
    before = written()
    assert 10 <= before < 72, "it was killed too late to show anything"
    with part.open("ab") as file:
        file.write(b'{"id":"batch_req_')  # as if a write had been cut
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_for(lambda: written() > before or process.poll() is not None, "more answers")
        for engine in list(engine_of(process.pid)):
            os.kill(engine, signal.SIGKILL)
        said = process.stderr.read()
        assert process.wait(120) == 3, said  # all answered, some with errors
    assert f"80 requests answered ({before} by an earlier run), 8 of them with errors" in said
    assert (folder / "killed.jsonl").read_bytes() == undisturbed
    assert not part.exists()


@pytest.mark.slow
def test_a_run_that_is_complete_does_nothing(
    folder: Path, undisturbed: bytes, small_model: str
) -> None:
    def never(done: int, total: int, num_tokens: int) -> None:
        raise AssertionError("something was computed")

    summary = run_batch(job(folder, small_model), never)
    assert (summary.done, summary.resumed, summary.failed) == (80, 80, 8)
    assert (folder / "answers.jsonl").read_bytes() == undisturbed
    with pytest.raises(QuireError, match="line 1 answers another request"):
        run_batch(job(folder, small_model, seed=1), never)


def test_what_a_killed_run_leaves_is_taken_up_at_every_byte(tmp_path: Path) -> None:
    """Whatever part of the lines is there: those that are whole count, half a line goes."""
    write_requests(tmp_path / "requests.jsonl", 1)
    requests = RequestFile(tmp_path / "requests.jsonl", "options")
    answered = [
        json.dumps(
            {"id": f"batch_req_{one.id}", "response": {"status_code": 200}, "error": None}
        ).encode()
        + b"\n"
        for one in requests
    ][:3]
    whole = b"".join(answered)
    ends = [len(b"".join(answered[:count])) for count in range(4)]
    for size in range(len(whole) + 1):
        (tmp_path / "out.jsonl.part").write_bytes(whole[:size])
        file = AnswerFile(tmp_path / "out.jsonl", restart=False)
        waiting = iter(requests)
        done, failed = file.resume(waiting)
        assert done == sum(size >= end for end in ends[1:])
        assert failed == 0
        assert next(waiting).number == done
        file.write(whole[ends[done] :])
        file.close()
        assert (tmp_path / "out.jsonl.part").read_bytes() == whole


def test_in_any_order_a_run_takes_up_whatever_is_there(tmp_path: Path) -> None:
    """Lines in any order, and half a line at the end; what is left are the others, in their order."""
    write_requests(tmp_path / "requests.jsonl", 1)
    requests = RequestFile(tmp_path / "requests.jsonl", "options")
    everyone = list(requests)
    lines = {
        one.number: json.dumps(
            {"id": one.answer_id, "response": {"status_code": 200}, "error": None}
        ).encode()
        + b"\n"
        for one in everyone
    }
    for order in ([], [5], [3, 0, 7], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]):
        whole = b"".join(lines[number] for number in order)
        (tmp_path / "out.jsonl.part").write_bytes(whole + lines[2][:20])
        file = AnswerFile(tmp_path / "out.jsonl", restart=False)
        done, failed, left = file.resume_in_any_order(requests)
        assert (done, failed) == (len(order), 0)
        assert [one.number for one in left] == [
            one.number for one in everyone if one.number not in order
        ]
        file.close()
        assert (tmp_path / "out.jsonl.part").exists() == bool(order)
        if order:
            assert (tmp_path / "out.jsonl.part").read_bytes() == whole
    (tmp_path / "out.jsonl.part").write_bytes(
        lines[1] + b'{"id": "batch_req_x", "response": null, "error": null}\n'
    )
    file = AnswerFile(tmp_path / "out.jsonl", restart=False)
    with pytest.raises(QuireError, match="some lines answer another request"):
        file.resume_in_any_order(requests)
    file.close()


@pytest.mark.slow
def test_in_any_order_the_lines_are_the_same(
    folder: Path, undisturbed: bytes, small_model: str
) -> None:
    """The first half of an answer file stands there backwards; the long requests of the rest come
    when they come.
    """
    lines = undisturbed.splitlines(keepends=True)
    (folder / "any.jsonl.part").write_bytes(b"".join(lines[39::-1]))
    summary = run_batch(job(folder, small_model, "any.jsonl", any_order=True), report)
    assert (summary.total, summary.done, summary.failed, summary.resumed) == (80, 80, 8, 40)
    found = (folder / "any.jsonl").read_bytes().splitlines(keepends=True)
    assert found[:40] == lines[39::-1]
    assert sorted(found) == sorted(lines)
    assert found[40:] != lines[40:]  # lines that are wrong are answered at once
    assert run_batch(job(folder, small_model, "any.jsonl", any_order=True), report).resumed == 80


def test_answers_of_others_are_not_touched(tmp_path: Path) -> None:
    write_requests(tmp_path / "requests.jsonl", 1)
    foreign = b'{"id": "batch_req_of another run", "response": null, "error": null}\n'
    (tmp_path / "out.jsonl.part").write_bytes(foreign)
    requests = RequestFile(tmp_path / "requests.jsonl", "options")
    file = AnswerFile(tmp_path / "out.jsonl", restart=False)
    with pytest.raises(QuireError, match="line 1 answers another request"):
        file.resume(iter(requests))
    with pytest.raises(QuireError, match="another run is writing"):
        AnswerFile(tmp_path / "out.jsonl", restart=False)
    file.close()
    assert (tmp_path / "out.jsonl.part").read_bytes() == foreign
    file = AnswerFile(tmp_path / "out.jsonl", restart=True)
    assert file.resume(iter(requests)) == (0, 0)
    file.close()
    assert not (tmp_path / "out.jsonl.part").exists()


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"there is no file .*gone\.jsonl"):
        RequestFile(tmp_path / "gone.jsonl", "")
    with pytest.raises(InvalidRequestError, match="can't be written"):
        AnswerFile(Path("/proc/answers.jsonl"), restart=False)
    write_requests(tmp_path / "requests.jsonl", 1)
    same = BatchJob(tmp_path / "requests.jsonl", tmp_path / "requests.jsonl", "smollm2", ENGINE)
    with pytest.raises(QuireError, match="the same file"):
        run_batch(same, report)


def test_parquet_needs_pyarrow(tmp_path: Path) -> None:
    try:
        import pyarrow  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        (tmp_path / "requests.parquet").write_bytes(b"PAR1")
        with pytest.raises(QuireError, match=r"pip install 'quire\[parquet\]'"):
            RequestFile(tmp_path / "requests.parquet", "")
        with pytest.raises(QuireError, match=r"pip install 'quire\[parquet\]'"):
            AnswerFile(tmp_path / "answers.parquet", restart=False)
        return
    check_parquet(tmp_path)


def check_parquet(folder: Path) -> None:
    """Rows with bodies as text are the same requests as lines, and answers come back as rows."""
    import pyarrow
    import pyarrow.parquet

    lines = [json.loads(one) for one in write_requests(folder / "requests.jsonl", 2)[:6]]
    rows = [one | {"body": json.dumps(one["body"])} for one in lines]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "requests.parquet")
    read = list(RequestFile(folder / "requests.parquet", ""))
    assert [(one.custom_id, json.loads(one.body), one.problem) for one in read] == [
        (one["custom_id"], one["body"], None) for one in lines
    ]
    check_parquet_bodies(folder)
    file = AnswerFile(folder / "answers.parquet", restart=False)
    file.write(b'{"id":"a","custom_id":"b","response":{"status_code":200},"error":null}\n')
    file.complete()
    file.close()
    found = pyarrow.parquet.read_table(folder / "answers.parquet").to_pylist()
    assert found == [
        {"id": "a", "custom_id": "b", "response": '{"status_code":200}', "error": None}
    ]


def check_parquet_bodies(folder: Path) -> None:
    """Bodies as structs, which have the fields of all rows, and what is no body; other columns
    don't matter.
    """
    import pyarrow
    import pyarrow.parquet

    bodies: list[Any] = [
        {"prompt": "a", "max_tokens": 3},
        {
            "messages": [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": None, "name": "c"},
            ]
        },
    ]
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/x", "body": body}
        for i, body in enumerate(bodies)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "structs.parquet")
    read = [json.loads(one.body) for one in RequestFile(folder / "structs.parquet", "")]
    assert read[0] == bodies[0]
    assert read[1]["messages"] == [
        {"role": "user", "content": "b"},
        {"role": "assistant", "name": "c"},
    ]

    texts = ['{"prompt": "a"}', "{no json", '{}, "url": "/v1/embeddings"', None, "[]"]
    rows = [
        {"custom_id": str(i), "url": "/v1/x", "body": body, "more": 1.5}
        for i, body in enumerate(texts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "texts.parquet")
    file = RequestFile(folder / "texts.parquet", "")
    assert file.count() == 5
    found = list(file)
    assert [one.problem is None for one in found] == [True, False, False, False, False]
    assert found[0].url == "/v1/x"
    (folder / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InvalidRequestError, match="can't be read as Parquet"):
        list(RequestFile(folder / "broken.parquet", ""))


@pytest.mark.slow
def test_parquet_in_and_out_says_what_lines_say(
    tmp_path: Path, undisturbed: bytes, small_model: str
) -> None:
    """The same answers, in rows."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    lines = [
        json.loads(one)
        for one in write_requests(tmp_path / "requests.jsonl", 1)
        if one != "{not json"
    ]
    # one of them is wrong
    rows = [one | {"body": json.dumps(one["body"])} for one in (lines[2], lines[4])]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "requests.parquet")
    summary = run_batch(
        BatchJob(tmp_path / "requests.parquet", tmp_path / "answers.parquet", small_model, ENGINE),
        report,
    )
    assert (summary.done, summary.failed) == (2, 1)
    good, bad = pyarrow.parquet.read_table(tmp_path / "answers.parquet").to_pylist()
    expected = json.loads(undisturbed.splitlines()[2])
    assert (good["custom_id"], good["error"]) == (expected["custom_id"], None)
    # each has its own
    body = json.loads(good["response"])["body"] | {"id": expected["response"]["body"]["id"]}
    assert body == expected["response"]["body"]
    assert json.loads(bad["response"])["status_code"] == 400
    assert not (tmp_path / "answers.parquet.part").exists()
