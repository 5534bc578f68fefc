"""`quire bench throughput`, `latency` and `compare`, and the peers they know."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from quire import LLM
from quire.cli.main import app, main
from quire.errors import QuireError
from quire.frontend.progress import BenchmarkBar
from quire.sampling_params import SamplingParams
from quire.tools.bench.comparison import OWN, STANDARD, Starts, Workload, compare, start_engines
from quire.tools.bench.engine_process import EngineChoice, EngineProcess
from quire.tools.bench.jobs import Job, Lengths, TokenSource, random_jobs
from quire.tools.bench.machine import command_line
from quire.tools.bench.measure import peak_memory
from quire.tools.bench.offline import OwnEngine, measure_latency, measure_throughput, run_together
from quire.tools.bench.peers import Peer, PeerSetting, open_peer
from quire.tools.bench.spread import Spread
from tests.cli.in_process import quire_here

CPU = torch.device("cpu")
SMALL = (
    "--requests",
    "3",
    "--prompt-tokens",
    "4-8",
    "--new-tokens",
    "2-5",
    "--repeats",
    "2",
    "--device",
    "cpu",
)


def setting(model: Path, **options: Any) -> PeerSetting:
    known = {
        "model": "it",
        "path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "batch_size": 3,
    }
    return PeerSetting(**(known | {"max_model_len": 64} | options))


OWN_OPTIONS = {"kv_cache_memory": "16MiB"}


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(
        tiny_model, device="cpu", dtype="float32", kv_cache_memory="16MiB", max_model_len=64
    ) as llm:
        yield llm


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("throughput", ["time", "output tokens", "prompt and output tokens", "requests"]),
        ("latency", ["time to first token", "time to the whole answer", "time per further token"]),
    ],
)
def test_the_engine_alone(tiny_model: Path, tmp_path: Path, command: str, rows: list[str]) -> None:
    files = ("--json", tmp_path / "a.json", "--markdown", tmp_path / "a.md")
    done = quire_here("bench", command, "--model", tiny_model, *SMALL, *files)
    assert done.returncode == 0, done.stderr
    raw = json.loads((tmp_path / "a.json").read_text())
    measured = raw["tables"][0]["rows"]
    assert [row[0]["text"] for row in measured][: len(rows)] == rows
    for name, cell in measured:
        assert f"| {name['text']} | {cell['text']} |" in (tmp_path / "a.md").read_text()
        assert cell["text"] in done.stdout
        assert min(cell["values"]) > 0
    assert raw["facts"]["command"] == shlex.join(
        ["quire", "bench", command, "--model", str(tiny_model), *SMALL]
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            "bench ladder --quick --output /a/b --device cuda",
            "quire bench ladder --quick --device cuda",
        ),
        ("bench ladder --output=/a/b", "quire bench ladder"),
        (
            "bench latency --markdown a.md --requests 2 --json=b.json",
            "quire bench latency --requests 2",
        ),
        ("bench ladder --output", "quire bench ladder"),
        (
            "bench compare --peer vllm=/a/bin/python --device cuda",
            "quire bench compare --peer vllm --device cuda",
        ),
        (
            "bench serve --api-key k --result-file a.json --plot=a.png --seed 2",
            "quire bench serve --seed 2",
        ),
    ],
)
def test_a_report_does_not_say_where_it_was_written_to(arguments: str, shown: str) -> None:
    assert command_line(arguments.split()) == shown


@pytest.mark.slow
def test_on_a_terminal_a_bar_shows_how_far_it_is(tiny_model: Path) -> None:
    master, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "quire.cli.main",
        "bench",
        "latency",
        "--model",
        str(tiny_model),
        *SMALL,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal) as running:
        os.close(terminal)
        shown = b""
        try:
            while chunk := os.read(master, 4096):
                shown += chunk
        except OSError:  # Linux' way to say that nobody writes to the terminal any more
            pass
        finally:
            os.close(master)
        assert running.wait(timeout=60) == 0
    assert b"Measuring" in shown
    assert b"0/3" in shown


class CountingBar(BenchmarkBar):
    """Remembers how many parts were announced, and how many were done."""

    seen: ClassVar[list[list[int]]] = []

    def __init__(self, num_parts: int) -> None:
        super().__init__(num_parts)
        self.seen.append([num_parts, 0])

    def advance(self) -> None:
        self.seen[-1][1] += 1


def test_bars_end_full(llm: LLM, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingBar, "seen", [])
    monkeypatch.setattr("quire.tools.bench.offline.BenchmarkBar", CountingBar)
    jobs = random_jobs(2, Lengths(4, 8), Lengths(2, 3), TokenSource(0, 256))
    measure_throughput(llm, jobs, repeats=2)
    measure_latency(llm, jobs, repeats=2)
    monkeypatch.setattr("quire.tools.bench.comparison.BenchmarkBar", CountingBar)
    own = OwnEngine(setting(tiny_model), OWN_OPTIONS)
    engines = {"transformers": open_peer("transformers", setting(tiny_model)), OWN: own}
    compare(
        engines, [Workload(name, 2, Lengths(4, 8), Lengths(2, 3)) for name in "ab"], 256, repeats=2
    )
    assert CountingBar.seen == [[3, 3], [3, 3], [9, 9]]


def test_throughput_counts_the_tokens_of_its_jobs(llm: LLM) -> None:
    jobs = random_jobs(3, Lengths(4, 8), Lengths(2, 5), TokenSource(0, 256))
    table = measure_throughput(llm, jobs, repeats=1, clock=iter([0.0, 2.0]).__next__)
    measured = {row[0]: row[1].values for row in table.rows}  # type: ignore[union-attr]
    new = sum(job.max_tokens for job in jobs)
    assert measured["time"] == (2.0,)
    assert measured["output tokens"] == (new / 2,)
    assert measured["prompt and output tokens"] == (
        (new + sum(len(job.prompt) for job in jobs)) / 2,
    )
    assert measured["requests"] == (1.5,)


def test_transformers_answers_alike_in_float32(tiny_model: Path) -> None:
    own = OwnEngine(setting(tiny_model), OWN_OPTIONS)
    engines = {"transformers": open_peer("transformers", setting(tiny_model)), OWN: own}
    clock = iter([0.0, 1.0, 1.0, 3.0] * 2).__next__
    workload = Workload("five at once", 5, Lengths(3, 9), Lengths(4, 4))
    table = compare(engines, [workload], 256, repeats=2, clock=clock)
    assert table.columns == ("what", "quire", "transformers", "over transformers")
    (name, ours, theirs, ratio), (_, _, same, _) = table.rows
    assert name == "five at once"
    assert same == "10 of 10"
    assert ours.values == (20 / 1,) * 2  # type: ignore[union-attr]
    assert theirs.values == (20 / 2,) * 2  # type: ignore[union-attr]
    assert ratio.value == 2.0  # type: ignore[union-attr]


class Counter:
    """An engine that only counts, and whose clock takes a second for 100 prompt tokens, a tenth for
    a new one.
    """

    name = "counter"

    def __init__(self, speed: float = 1.0) -> None:
        self.now = 0.0
        self.speed = speed
        self.seen: list[list[Job]] = []

    def run(self, jobs: Sequence[Job]) -> int:
        self.seen.append(list(jobs))
        self.now += sum(len(job.prompt) / 100 + job.max_tokens / 10 for job in jobs) / self.speed
        return sum(job.max_tokens for job in jobs)


def test_the_standard_workloads_count_what_their_names_say() -> None:
    ours, theirs = Counter(2.0), Counter()
    starts = {OWN: Starts(Spread.of([2.0, 4.0]), 2**20), "other": Starts(Spread.of([1.5]), 2**22)}
    both: dict[str, Peer] = {"other": theirs, OWN: ours}
    table = compare(both, STANDARD, 1000, 2, starts, clock=lambda: ours.now + theirs.now)
    rows: dict[str, Any] = {str(row[0]): row[1:] for row in table.rows}
    assert [name for name in rows if "answers" not in name] == [
        "prompt of 512 tokens",
        "decode, one request",
        "32 requests at once",
        "16 with a common 512 tokens",
        "start to first token",
        "peak memory, one request",
    ]
    for place, speed in enumerate((2.0, 1.0)):
        measured = [row[place] for row in rows.values()]
        assert measured[0].values == pytest.approx([512 / (5.12 + 0.1) * speed] * 2)
        assert measured[1].values == pytest.approx([10 * speed] * 2)
        assert measured[3].values == pytest.approx([16 * (5.44 + 3.2) / speed] * 2)
    assert [row[2].value for row in list(rows.values())[:6]] == pytest.approx([2, 2, 2, 2, 0.5, 4])
    many = ours.seen[3]  # after the pass that warms up and the two of one request
    assert len(many) == 32
    assert all(100 <= len(job.prompt) <= 300 and 64 <= job.max_tokens <= 128 for job in many)
    alike = ours.seen[4]
    assert len({job.token_ids[:512] for job in alike}) == 1
    assert len({job.token_ids for job in alike}) == 16
    # no pass finds another's prefix
    assert alike[0].token_ids[:512] != ours.seen[8][0].token_ids[:512]
    assert ours.seen == theirs.seen


@pytest.mark.slow
def test_engines_run_in_processes_of_their_own(tiny_model: Path) -> None:
    long = setting(tiny_model, max_model_len=256)
    choices = {
        "transformers": EngineChoice("transformers", long),
        OWN: EngineChoice(OWN, long, OWN_OPTIONS),
    }
    with ExitStack() as stack:
        engines, starts = start_engines(choices, 256, 1, stack)
        table = compare(
            engines, [Workload("some", 3, Lengths(4, 8), Lengths(2, 3))], 256, 1, starts
        )
    rows: dict[str, Any] = {str(row[0]): row[1:] for row in table.rows}
    assert rows["answers that agree"][1] == "3 of 3"
    assert all(spread.median > 0 for spread in rows["start to first token"][:2])
    if Path("/proc/self/status").exists():
        assert all(size.value > 2**26 for size in rows["peak memory, one request"][:2])


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="can't be started"):
        EngineProcess(EngineChoice("vllm", setting(tmp_path), python=str(tmp_path / "python")))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
    broken.chmod(0o700)
    with pytest.raises(QuireError, match="the process of vllm ended: no such module"):
        EngineProcess(EngineChoice("vllm", setting(tmp_path), python=str(broken)))
    # More than a pipe holds: it ends while the order is being written, and the rest can't be
    # delivered any more.
    with pytest.raises(QuireError, match="the process of vllm ended: no such module"):
        EngineProcess(
            EngineChoice("vllm", setting(tmp_path), {"long": "x" * 2**20}, python=str(broken))
        )


@pytest.mark.slow
def test_a_measure_that_takes_too_long_is_cut_and_named(tmp_path: Path) -> None:
    """Its engine is started again: what comes after is measured, and what was cut is not tried once
    more.
    """
    slow = tmp_path / "python"
    slow.write_text(
        f"""#!/bin/sh
exec >&0
echo start >> {tmp_path}/log
read setting && echo '{{"name": "slow"}}'
while read jobs; do
  echo jobs >> {tmp_path}/log
  case $jobs in *", 9]"*) exec sleep 60;; esac
  echo '{{"answers": 4, "peak_memory": null}}'
done
"""
    )
    slow.chmod(0o700)
    workloads = [
        Workload(name, 1, Lengths(3, 3), Lengths(new, new))
        for name, new in (("long", 9), ("short", 4))
    ]
    with EngineProcess(
        EngineChoice("vllm", setting(tmp_path), python=str(slow)), limit=1.0
    ) as process:
        table = compare({OWN: Counter(), "vllm": process}, workloads, 256, repeats=2, limit=1.0)
    rows: dict[str, Any] = {str(row[0]): row[1:] for row in table.rows}
    assert rows["long"][1:] == ("took too long", "–")
    assert len(rows["short"][1].values) == len(rows["short"][0].values) == 2
    assert table.note.endswith("What took too long was stopped after 1 s (--limit).")
    log = (tmp_path / "log").read_text().split()
    # a warm-up, the long one; a short one each pass
    assert log == ["start", "jobs", "jobs", "start", "jobs", "jobs"]
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(QuireError, match=r"vllm did not answer within 0\.1 s"):
        EngineProcess(EngineChoice("vllm", setting(tmp_path), python=str(slow)), limit=0.1)


@pytest.mark.slow
def test_a_peer_has_nothing_of_ours_in_its_process() -> None:
    script = (
        "import sys, quire.tools.bench.engine_process; "
        "print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_llama_cpp_runs_the_same_jobs(smollm2_gguf: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed here")
    jobs = random_jobs(3, Lengths(4, 8), Lengths(2, 5), TokenSource(0, 49152))
    peer = open_peer("llama-cpp", setting(smollm2_gguf))
    answers = peer.run(jobs)
    assert isinstance(answers, list)
    assert [len(answer) for answer in answers] == [job.max_tokens for job in jobs]
    assert peer.run(jobs) == answers
    # The last token is told and not computed further: the peer must not do more than it is asked
    # for.
    assert peer._model.n_tokens == len(jobs[-1].prompt) + jobs[-1].max_tokens - 1  # type: ignore[attr-defined]
    with LLM(
        smollm2_gguf, device="cpu", dtype="float32", kv_cache_memory="16MiB", max_model_len=64
    ) as llm:
        ours = [output.token_ids for output in run_together(llm, jobs)]
    # It computes with quantised weights as they are and rounds what it multiplies them with; first
    # tokens are clear.
    assert [answer[0] for answer in answers] == [tokens[0] for tokens in ours]


@pytest.mark.slow
def test_openvino_runs_the_same_jobs(smollm2_gguf: Path) -> None:
    pytest.importorskip("openvino_genai", reason="openvino-genai is not installed here")
    jobs = random_jobs(4, Lengths(4, 8), Lengths(2, 5), TokenSource(0, 49152))
    peer = open_peer("openvino", setting(smollm2_gguf))
    answers = peer.run(jobs)
    assert isinstance(answers, list)
    assert [len(answer) for answer in answers] == [job.max_tokens for job in jobs]
    assert [answer for job in jobs for answer in peer.run([job])] == answers  # type: ignore[union-attr]


class Completions(BaseHTTPRequestHandler):
    """OpenAI's completions, as far as the peer asks for them, answered by the model itself."""

    llm: LLM
    lock = threading.Lock()
    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "path": self.path})
        if body["max_tokens"] == 13 or self.path != "/v1/completions":
            # a client may have seen enough; what this said would be another test's
            with suppress(BrokenPipeError):
                self.send_error(400 if self.path == "/v1/completions" else 404, "no")
            return
        with self.lock:
            output = self.llm.generate(
                body["prompt"], SamplingParams(temperature=0, max_tokens=body["max_tokens"])
            )[0]
        answer = {
            "choices": [{"text": output.text}],
            "usage": {"completion_tokens": len(output.token_ids)},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tiny_model: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with LLM(
        tiny_model, device="cpu", dtype="float32", kv_cache_memory="16MiB", max_model_len=64
    ) as llm:
        handler = type("Handler", (Completions,), {"llm": llm, "seen": []})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
            thread = threading.Thread(target=listening.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{listening.server_port}/v1", handler.seen  # type: ignore[attr-defined]
            finally:
                listening.shutdown()
                thread.join()


class Recorder:
    """Our engine, and what it was asked for."""

    name = "recorder"

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.seen: list[list[Job]] = []

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        self.seen.append(list(jobs))
        return [output.token_ids for output in run_together(self.llm, jobs)]


def test_a_server_is_compared_by_the_tokens_it_reports(
    llm: LLM, tiny_model: Path, server: tuple[str, list[dict[str, Any]]]
) -> None:
    url, seen = server
    jobs = random_jobs(3, Lengths(4, 8), Lengths(2, 5), TokenSource(0, 256))
    ours = Recorder(llm)
    engines: dict[str, Peer] = {
        "openai-url": open_peer("openai-url", setting(tiny_model, url=url)),
        OWN: ours,
    }
    table = compare(engines, [Workload("three", 3, Lengths(4, 8), Lengths(2, 5))], 256, repeats=2)
    assert table.rows[1][2] == "not told"
    assert {body["path"] for body in seen} == {"/v1/completions"}
    passes = [seen[:2], seen[2:5], seen[5:]]  # two to warm up
    for asked, expected in zip(passes, ours.seen, strict=True):
        lengths = sorted((len(body["prompt"]), body["max_tokens"]) for body in asked)
        assert lengths == sorted((len(job.prompt), job.max_tokens) for job in expected)
    # A server that keeps prefixes must find none of an earlier pass.
    assert len({tuple(body["prompt"]) for body in seen}) == len(seen)
    with pytest.raises(QuireError, match="answered 400"):
        open_peer("openai-url", setting(tiny_model, url=url)).run(
            random_jobs(1, Lengths(4, 4), Lengths(13, 13), TokenSource(0, 256))
        )
    with pytest.raises(QuireError, match=r"(?s)answered 404.*\(does --url end with /v1\?\)"):
        open_peer("openai-url", setting(tiny_model, url=url.removesuffix("/v1"))).run(jobs)


def bench_error(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a failing command says, run in this process: starting another takes seconds."""
    monkeypatch.setattr(sys, "argv", ["quire", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    return capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("peer", "module"),
    [("llama-cpp", "llama_cpp"), ("openvino", "openvino_genai"), ("vllm", "vllm")],
)
def test_absent_peers_say_what_to_install(
    peer: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed here")
    said = bench_error(("compare", "--peer", peer), monkeypatch, capsys)
    assert said.startswith(f"error: the peer {peer} is not installed here: pip install ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "--peer", "ollama"), "--peer: must be one of transformers, llama-cpp"),
        (("compare", "--peer", "openai-url"), "--url"),
        (("compare", "--peer", "transformers", "--new-tokens", "5"), "--requests"),
        (("compare", "--peer", "openai-url", "--url", "ftp://x"), "--url: must begin with http"),
        (("compare", "--peer", "transformers", "--url", "http://x"), "--url"),
        (("throughput", "--prompt-tokens", "many"), "--prompt-tokens"),
        (("ladder", "--plot", "gif"), "--plot: must be svg or png"),
        (("ladder", "--model", "smolm2"), "'smolm2' was not found"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench_error(arguments, monkeypatch, capsys).startswith(f"error: {message}")


def test_a_server_that_is_not_there_is_named(tiny_model: Path) -> None:
    peer = open_peer("openai-url", setting(tiny_model, url="http://127.0.0.1:9/v1"))
    with pytest.raises(QuireError, match=r"127\.0\.0\.1:9/v1/completions can't be reached"):
        peer.run(random_jobs(1, Lengths(4, 4), Lengths(2, 2), TokenSource(0, 256)))


def test_every_command_has_examples() -> None:
    for command in ("ladder", "throughput", "latency", "compare", "quality"):
        shown = CliRunner().invoke(app, ["bench", command, "--help"]).stdout
        assert f"\n  quire bench {command} " in shown


def test_peak_memory_sees_what_was_held_for_a_moment() -> None:
    size = 64 * 2**20
    peak = peak_memory(lambda: torch.ones(size, dtype=torch.uint8).max(), CPU)
    if peak is None:
        pytest.skip("this system does not tell")
    assert size * 0.9 < peak < size * 1.5
    nothing = peak_memory(lambda: None, CPU)
    assert nothing is not None
    assert nothing < size / 8
