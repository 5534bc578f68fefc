"""`quire bench serve`: its requests, its figures, its client, and a run against a real server."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import InvalidRequestError, QuireError
from quire.tools.bench.http_client import HttpClient, HttpError
from quire.tools.bench.jobs import Job, Lengths, TokenSource, file_jobs, prefix_jobs, random_jobs
from quire.tools.bench.serve.figures import Metrics, parse_goodput, serving_report, summarize
from quire.tools.bench.serve.load import Load, Result, measure, request
from quire.tools.bench.spread import percentile_of
from tests.server.harness import KEY, SMALL_ENGINE, Server


class TestWorkloads:
    def test_random_lengths_are_exact_in_tokens_and_repeat_with_the_seed(self) -> None:
        lengths = Lengths.around("--in", 100, 0.5), Lengths.around("--out", 40, 0.5)
        jobs = random_jobs(200, *lengths, TokenSource(1, vocab_size=500), shared=7)
        assert jobs == random_jobs(200, *lengths, TokenSource(1, vocab_size=500), shared=7)
        assert jobs != random_jobs(200, *lengths, TokenSource(2, vocab_size=500), shared=7)
        prompts = [job.prompt for job in jobs]
        assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
        counts = [len(prompt) - 7 for prompt in prompts]
        assert (min(counts) >= 50, max(counts) <= 150, len(set(counts)) > 50) == (True, True, True)
        assert all(20 <= job.max_tokens <= 60 for job in jobs)
        assert all(
            0 <= token < 500 for prompt in prompts for token in prompt if isinstance(token, int)
        )

    def test_words(self) -> None:
        (job,) = random_jobs(1, Lengths(25, 25), Lengths(3, 3), TokenSource(0))
        assert isinstance(job.prompt, str)
        assert len(job.prompt.split()) == 25

    def test_prefixes_are_shared_evenly(self) -> None:
        jobs = prefix_jobs(
            12, TokenSource(0, 1000), num_prefixes=3, prefix_len=5, suffix_len=4, output_len=9
        )
        starts = [tuple(job.prompt[:5]) for job in jobs]
        assert sorted(starts.count(start) for start in set(starts)) == [4, 4, 4]
        assert len({tuple(job.prompt) for job in jobs}) == 12

    def test_files(self, tmp_path: Path) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text(
            '{"prompt": "a", "output_tokens": 3}\n\n{"messages": [{"role": "user", "content": "b"}]}\n'
        )
        jobs = file_jobs(path, 3, 50)
        assert jobs == [Job("a", 3), Job([{"role": "user", "content": "b"}], 50), Job("a", 3)]

    @pytest.mark.parametrize(
        "line",
        ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": 3}', '{"prompt": "a", "output_tokens": 0}'],
    )
    def test_bad_files_name_the_line(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "requests.jsonl"
        path.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(InvalidRequestError, match="line 2"):
            file_jobs(path, 3, 50)

    def test_arrivals_keep_the_rate(self) -> None:
        for burstiness in (0.2, 1.0, 50.0):
            pauses = Load(request_rate=4.0, burstiness=burstiness).pauses(400)
            assert sum(pauses) == pytest.approx(100)
            # A gamma distribution's spread, in means.
            assert statistics.pstdev(pauses) * 4 == pytest.approx(burstiness**-0.5, rel=0.2)
        assert Load().pauses(3) == [0.0, 0.0, 0.0]

    def test_bodies(self) -> None:
        load = Load(model="m", ignore_eos=True, temperature=0.0, extra_body={"top_k": 5})
        body = load.body(Job((1, 2), 9))
        assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["top_k"]) == (
            (1, 2),
            9,
            True,
            5,
        )
        chat = Load(backend="openai-chat").body(Job("hi", 9))
        assert chat["messages"] == [{"role": "user", "content": "hi"}]
        assert chat["max_completion_tokens"] == 9
        with pytest.raises(InvalidRequestError, match="vocab-size"):
            Load(backend="openai-chat").body(Job((1, 2), 9))
        with pytest.raises(InvalidRequestError, match="openai-chat"):
            Load().body(Job([{"role": "user", "content": "b"}], 9))


class TestReport:
    RESULTS = (
        Result(10.0, [10.1, 10.2, 10.4], 10.5, prompt_tokens=7, output_tokens=3),
        Result(10.2, [10.5], 10.6, prompt_tokens=5, output_tokens=1),
        Result(10.3, [], 10.4, error="HTTP 429"),
    )

    def test_figures_by_hand(self) -> None:
        figures = summarize(self.RESULTS, 2.0, Metrics({"ttft": 200.0}, percentiles=(50, 99)))
        expected = {
            "completed": 2,
            "failed": 1,
            "total_input_tokens": 12,
            "total_output_tokens": 4,
            "request_throughput": 1.0,
            "request_goodput": 0.5,
            "output_throughput": 2.0,
            "total_token_throughput": 8.0,
            "max_output_tokens_per_s": 4.0,
            "max_concurrent_requests": 3,
            "mean_ttft_ms": 200.0,
            "median_ttft_ms": 200.0,
            "std_ttft_ms": 100.0,
            "p50_ttft_ms": 200.0,
            "p99_ttft_ms": 298.0,
            "mean_tpot_ms": 150.0,
            "mean_itl_ms": 150.0,
            "median_itl_ms": 150.0,
            "mean_e2el_ms": 450.0,
        }
        assert {name: figures[name] for name in expected} == pytest.approx(expected)

    def test_the_table_has_vllms_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        def shown(load: Load, metrics: Metrics) -> str:
            serving_report(
                {"server": "x"}, load, "random", self.RESULTS, 2.0, metrics, False
            ).print()
            return capsys.readouterr().out

        text = shown(Load(request_rate=3.0, max_concurrency=8), Metrics())
        for words in (
            "Serving Benchmark Result",
            "Successful requests:                     2",
            "Maximum request concurrency:             8",
            "Request rate configured (RPS):           3.00",
            "Output token throughput (tok/s):         2.00",
            "Time per Output Token (excl. 1st token)",
            "P99 TTFT (ms):                           298.00",
            "Median E2EL (ms):                        450.00",
        ):
            assert words in text
        assert "goodput" not in text
        assert "Inter-token" not in shown(Load(), Metrics(shown=["ttft"]))

    def test_percentiles(self) -> None:
        assert [percentile_of([1.0, 2.0, 4.0], p) for p in (0, 25, 50, 75, 100)] == [
            1.0,
            1.5,
            2.0,
            3.0,
            4.0,
        ]
        assert percentile_of([3.0], 99) == 3.0

    def test_nothing_succeeded(self) -> None:
        figures = summarize(self.RESULTS[2:], 1.0, Metrics())
        assert (
            figures["completed"],
            figures["output_throughput"],
            figures["max_output_tokens_per_s"],
        ) == (0, 0, 0)

    def test_goodput(self) -> None:
        assert parse_goodput(["ttft:500", "tpot:20.5"]) == {"ttft": 500.0, "tpot": 20.5}
        even = Result(0.0, chunks=[0.1 * i for i in range(1, 200)], end=20.0, output_tokens=199)
        late = Result(0.0, chunks=[*even.chunks[:100], *(9 + 0.1 * i for i in range(100, 199))])
        for limit, good in ((150.0, 1), (50.0, 0)):
            figures = summarize([even, late], 1.0, Metrics({"itl": limit}))
            assert figures["request_goodput"] == 2 * good  # one gap in 198 is forgiven
        for bad in ("itl:x", "ttft", "ttft:x", "ttft:-1", "ttft:nan"):
            with pytest.raises(InvalidRequestError, match="--goodput"):
                parse_goodput([bad])


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(
    answer: bytes, use: Callable[[HttpClient], Awaitable[Any]], pieces: int = 1
) -> tuple[Any, int]:
    """What `use` does with a server that gives every request this answer, cut into pieces; and how
    many connections it took.
    """
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (
                    int(line[15:])
                    for line in head.split(b"\r\n")
                    if line[:15].lower() == b"content-length:"
                ),
                0,
            )
            await reader.readexactly(length)
            size = math.ceil(len(answer) / pieces)
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            if b"close" in answer:
                break
        writer.close()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(quiet, "127.0.0.1", 0)
        async with (
            server,
            HttpClient(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/root", timeout=5
            ) as client,
        ):
            return await use(client)

    return asyncio.run(run()), connections


def chunked(*events: str) -> bytes:
    chunks = [f"data: {event}\n\n".encode() for event in events]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


class TestClient:
    EVENTS = (
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "Grüße"}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}',
        '{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}',
        "[DONE]",
    )

    @pytest.mark.parametrize("pieces", [1, 2, 7, 400])
    def test_streams_however_they_are_cut(self, pieces: int) -> None:
        async def use(client: HttpClient) -> list[Result]:
            return [await request(client, "/v1/x", {}) for _ in range(3)]

        results, connections = with_server(chunked(*self.EVENTS), use, pieces)
        for result in results:
            assert result.error is None
            assert len(result.chunks) == 2
            assert (result.prompt_tokens, result.output_tokens) == (4, 2)
        assert connections == 1

    def test_connections_are_kept(self) -> None:
        async def use(client: HttpClient) -> list[Any]:
            return [
                await client.get_json("/a"),
                await client.post_json("/b", {"c": 1}),
                await client.get_json("/d"),
            ]

        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n[1,2,3]"
        assert with_server(answer, use) == ([[1, 2, 3]] * 3, 1)
        closing = answer.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        assert with_server(closing, use) == ([[1, 2, 3]] * 3, 3)
        until_close = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n[1,2,3]"
        assert with_server(until_close, use) == ([[1, 2, 3]] * 3, 3)

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (
                b'HTTP/1.1 429 No\r\nContent-Length: 31\r\n\r\n{"error": {"message": "full up"}',
                "HTTP 429: ",
            ),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nab",
                "closed",
            ),
            (b"SSH-2.0-OpenSSH_9.6 close\r\n\r\n", "no HTTP"),
            (chunked('{"error": {"message": "it broke"}}'), "it broke"),
            (chunked("{nonsense"), "Expecting"),
            (chunked("[DONE]"), "empty"),
        ],
    )
    def test_what_went_wrong_is_told(self, answer: bytes, message: str) -> None:
        async def use(client: HttpClient) -> Result:
            return await request(client, "/v1/x", {})

        result, _ = with_server(answer, use)
        assert message in result.error

    def test_a_server_that_is_not_there(self) -> None:
        async def run() -> None:
            async with HttpClient("http://127.0.0.1:1") as client:
                await client.get("/")

        with pytest.raises(HttpError, match=r"127\.0\.0\.1:1"):
            asyncio.run(run())
        with pytest.raises(HttpError, match="base-url"):
            HttpClient("127.0.0.1:8000")

    def test_no_more_requests_than_allowed_are_under_way(self) -> None:
        async def use(client: HttpClient) -> list[Result]:
            results, _ = await measure(client, [Job("a", 1)] * 9, Load(max_concurrency=2))
            return results

        results, _ = with_server(chunked(*self.EVENTS), use, 20)
        assert len(results) == 9
        assert summarize(results, 1.0, Metrics())["max_concurrent_requests"] <= 2


@pytest.fixture(scope="module")
def server(small_model: str) -> Iterator[Server]:
    with Server(
        model=small_model, engine=SMALL_ENGINE, served_model_names=["small"], api_keys=[KEY]
    ) as server:
        yield server


@pytest.mark.slow
class TestAgainstAServer:
    def test_completions_with_everything(self, server: Server, tmp_path: Path) -> None:
        figures, picture = tmp_path / "run.json", tmp_path / "run.png"
        options = "--num-prompts 6 --max-concurrency 3 --random-input-len 20 --random-output-len 5 --vocab-size 200"
        options += " --random-range-ratio 0.4 --ignore-eos --num-warmups 1 --goodput e2el:60000 --save-detailed"
        files = ["--result-file", str(figures), "--plot", str(picture)]
        result = self.run(server, *options.split(), *files)
        assert result.exit_code == 0, result.output
        assert "Successful requests:                     6" in result.output
        found = json.loads(figures.read_text())
        jobs = random_jobs(
            6, Lengths.around("", 20, 0.4), Lengths.around("", 5, 0.4), TokenSource(0, 200)
        )
        assert found["input_lens"] == [len(job.prompt) for job in jobs]
        assert found["output_lens"] == [job.max_tokens for job in jobs]
        assert (found["model_id"], found["completed"], found["failed"]) == ("small", 6, 0)
        assert found["request_goodput"] == found["request_throughput"] > 0
        assert all(0 < ttft < found["duration"] for ttft in found["ttfts"])
        assert found["errors"] == [""] * 6
        assert found["facts"]["server"] == server.url
        assert found["tables"][0]["rows"][0] == [{"text": "Successful requests:"}, {"text": "6"}]
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_several_rates_give_the_share_within_targets(
        self, server: Server, tmp_path: Path
    ) -> None:
        figures, picture = tmp_path / "rates.json", tmp_path / "rates.svg"
        options = "--num-prompts 4 --request-rate 40,80 --random-input-len 5 --random-output-len 3"
        result = self.run(
            server,
            *f"{options} --ignore-eos --goodput e2el:60000 --goodput itl:60000".split(),
            *("--result-file", str(figures), "--plot", str(picture)),
        )
        assert result.exit_code == 0, result.output
        runs = json.loads(figures.read_text())["runs"]
        assert [(run["request_rate"], run["good_share"], run["completed"]) for run in runs] == [
            (40.0, 1.0, 4),
            (80.0, 1.0, 4),
        ]
        assert "100%" in result.output
        assert "<svg" in picture.read_text()
        for wrong in ("40,inf", "40,0", "x", "1,2"):  # the last without a target
            result = self.run(server, "--request-rate", wrong)
            assert result.exit_code != 0
            assert "--request-rate" in str(result.output) + str(result.exception)

    def test_chat_at_a_rate(self, server: Server) -> None:
        options = "--backend openai-chat --num-prompts 3 --request-rate 50 --burstiness 2 --random-input-len 5"
        result = self.run(
            server,
            *options.split(),
            "--random-output-len",
            "4",
            "--ignore-eos",
            "--temperature",
            "0",
        )
        assert result.exit_code == 0, result.output
        assert "Total generated tokens:                  12" in result.output
        assert "Request rate configured (RPS):           50.00" in result.output

    def test_shared_prefixes_are_found_in_the_servers_cache(self, server: Server) -> None:
        before = self.cached(server)
        options = (
            "--dataset-name prefix_repetition --num-prompts 4 --max-concurrency 1 --vocab-size 200"
        )
        options += " --prefix-repetition-prefix-len 64 --prefix-repetition-suffix-len 8"
        options += " --prefix-repetition-num-prefixes 1"
        result = self.run(server, *options.split(), "--prefix-repetition-output-len", "2")
        assert result.exit_code == 0, result.output
        assert self.cached(server) - before == 3 * 64

    def test_when_nothing_succeeds_it_says_why(self, server: Server) -> None:
        result = self.run(server, "--num-prompts", "2", "--extra-body", '{"temperature": -1}')
        assert isinstance(result.exception, QuireError)
        assert "Failed requests:                         2" in result.output
        assert "temperature" in str(result.exception)

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            (["--dataset-name", "sonnet"], "--dataset-name"),
            (["--dataset-name", "custom"], "--dataset-path"),
            (["--backend", "grpc"], "--backend"),
            (["--extra-body", "[]"], "--extra-body"),
            (["--request-rate", "0"], "--request-rate"),
            (["--metric-percentiles", "101"], "--metric-percentiles"),
            (["--percentile-metrics", "ttft,x"], "--percentile-metrics"),
            (["--save-detailed"], "--save-detailed"),
            (["--random-range-ratio", "1"], "--random-range-ratio"),
            (["--prefix-repetition-num-prefixes", "0"], "--prefix-repetition-num-prefixes"),
        ],
    )
    def test_wrong_options_are_named(self, server: Server, options: list[str], field: str) -> None:
        result = self.run(server, *options)
        assert isinstance(result.exception, InvalidRequestError)
        assert result.exception.field == field

    def run(self, server: Server, *options: str) -> Any:
        return CliRunner().invoke(
            app, ["bench", "serve", "--base-url", server.url, "--api-key", KEY, *options]
        )

    def cached(self, server: Server) -> float:
        page = server.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        lines = [
            line for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total{")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
