"""The server on a Ray cluster of three nodes, all on this machine. The long form (make soak) starts
them, which takes half a minute; the short one has an engine's actor without a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from quire.errors import QuireError
from quire.server.batches.run import BatchJob, run_batch
from quire.server.config import EngineShare, ServerConfig
from quire.server.link.messages import (
    AddRequest,
    Fatal,
    Ready,
    Updates,
    decode_event,
    encode,
    pack_tokens,
)
from tests.long_runs import IS_LONG
from tests.server.harness import ROOT, SMALL_ENGINE, free_port, wait_for
from tests.server.random_model import write_model

# importing it takes long, and every process of the tests would
if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'quire[ray]'", allow_module_level=True)

pytestmark = [pytest.mark.soak, pytest.mark.slow]

BODY: dict[str, Any] = {"prompt": "Tell me about it.", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0,
                        "seed": 4, "return_token_ids": True, "stream": True}  # fmt: skip


def test_an_actor_passes_messages_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray around it: the process beside it is started, spoken to, missed when it dies, and
    ended.
    """
    from quire.cluster.ray_engine import EngineActor

    monkeypatch.setenv("QUIRE_TEST_FAULT", str(tmp_path / "fault"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    share = EngineShare({}, "engine 3", block_events=True)
    config = ServerConfig(engine_module="tests.server.scripted_engine", share=share)

    async def main() -> None:
        actor = EngineActor(config)
        ready, refusal = await actor.start()
        assert not refusal
        assert isinstance(decode_event(ready), Ready)
        await actor.send(encode(AddRequest("r", pack_tokens((1, 2, 3)), {"max_tokens": 3}, 0)))
        tokens: list[int] = []
        async with asyncio.timeout(60):
            while len(tokens) < 3:
                for data in await actor.receive():
                    event = decode_event(data)
                    assert isinstance(event, Updates)
                    tokens += [
                        token for update in event.all_updates() for token in update.new_token_ids
                    ]
            assert tokens == [1, 2, 3]
            os.kill(await actor.pid(), signal.SIGKILL)
            events = [decode_event(data) for data in await actor.receive()]
            while not isinstance(events[-1], Fatal):
                events = [decode_event(data) for data in await actor.receive()]
        assert "SIGKILL" in events[-1].message
        await actor.stop()

    asyncio.run(main())


@pytest.mark.skipif(not IS_LONG, reason="importing all of Ray takes long: make soak")
def test_a_cluster_that_is_not_there() -> None:
    pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'quire[ray]'")
    from quire.cluster.ray_batch import cluster_at

    address = f"127.0.0.1:{free_port()}"
    with (
        pytest.raises(QuireError, match=f"--ray {address}: there is no Ray cluster"),
        cluster_at(address),
    ):
        pass


def test_something_else_at_the_address_is_noticed_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes connections and says nothing: Ray itself tries for minutes."""
    pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'quire[ray]'")
    from quire.cluster import ray_batch

    monkeypatch.setattr(ray_batch, "_CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for form in (address, f"ray://{address}", "auto"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            with (
                pytest.raises(QuireError, match="does not speak as Ray does"),
                ray_batch.cluster_at(form),
            ):
                pass


@pytest.mark.parametrize(
    ("cpus", "http_node", "is_pinned"),
    [(4.0, "head", True), (0.0, "head", False), (4.0, "any", False)],
)
def test_the_http_side_stays_with_the_head_that_has_room(
    cpus: float, http_node: str, is_pinned: bool
) -> None:
    """Its machine's end is the cluster's end; that of another one would cut every stream."""
    from quire.cluster.ray_app import _place
    from quire.cluster.settings import RaySettings

    head = {"Alive": True, "Resources": {"node:__internal_head__": 1.0, "CPU": cpus}}
    other = {"Alive": True, "Resources": {"CPU": 64.0}}
    found = _place(RaySettings(http_node=http_node), [other, head])
    assert found == ({"resources": {"node:__internal_head__": 0.001}} if is_pinned else {})


# With a cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.frontend.templates import QWEN

    folder = tmp_path_factory.mktemp("ray-model")
    write_model(folder, QWEN)
    return str(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    if not IS_LONG:
        pytest.skip("a cluster takes half a minute to start: make soak")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
        patch.setenv("OMP_NUM_THREADS", "1")
        # On Linux too, Ray then stays on the loopback address.
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray
        from ray.cluster_utils import Cluster

        node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **node}
        )
        for _ in range(2):
            cluster.add_node(num_cpus=1, **node)
        ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
        try:
            assert sum(one["Alive"] for one in ray.nodes()) == 3
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Any, model: str) -> Iterator[str]:
    from ray import serve

    from quire.cluster.ray_app import build

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    serve.run(build(settings(model)), name="quire", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def settings(model: str, **engine: Any) -> dict[str, Any]:
    return {
        "model": model, "min_replicas": 2, "max_replicas": 2, "http_cpus": 0.5,
        "engine": {**SMALL_ENGINE, **engine}, "server": {"served_model_names": ("m",)},
    }  # fmt: skip


def read(url: str, at_token: int = 0, act: Any = None) -> list[int]:
    """The tokens of a stream; when it has come to `at_token`, something is done."""
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
                if act is not None and len(tokens) >= at_token:
                    act()
                    act = None
    return tokens


def replicas(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/health", timeout=30).json()["replicas"]
    return found


def test_engines_and_machines_are_lost(cluster: Any, url: str) -> None:
    from ray import serve

    wanted = read(url)
    assert len(wanted) == 300
    handle = serve.get_app_handle("quire")

    def kill_all() -> None:
        for pid in handle.engine_pids.remote().result():
            os.kill(pid, signal.SIGKILL)

    assert read(url, 20, kill_all) == wanted
    wait_for(lambda: [one["status"] for one in replicas(url)] == ["ready", "ready"])

    def lose_machine() -> None:
        threading.Thread(
            target=cluster.remove_node, args=(next(iter(cluster.worker_nodes)),)
        ).start()

    found = read(url, 20, lose_machine)
    assert found == wanted
    cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1", object_store_memory=80 * 2**20)
    wait_for(lambda: [one["status"] for one in replicas(url)] == ["ready", "ready"])
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    assert (
        sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("quire_requests_moved_total")
        )
        >= 1
    )


def test_a_rolling_update_loses_no_stream(url: str, model: str) -> None:
    from ray import serve

    from quire.cluster.ray_app import build

    wanted = read(url)
    before = set(serve.get_app_handle("quire").engine_pids.remote().result())
    results: list[list[int]] = []
    done = threading.Event()

    def keep_reading() -> None:
        while not done.is_set():
            results.append(read(url))

    readers = [threading.Thread(target=keep_reading) for _ in range(3)]
    for reader in readers:
        reader.start()
    time.sleep(0.5)
    serve.run(build(settings(model, max_num_seqs=8)), name="quire", route_prefix="/")
    wait_for(lambda: not before & set(serve.get_app_handle("quire").engine_pids.remote().result()))
    done.set()
    for reader in readers:
        reader.join()
    assert len(results) >= 3
    assert all(one == wanted for one in results)


class Batches:
    """A file of requests of all kinds, wrong ones among them, and its answers by an engine here."""

    def __init__(self, folder: Path, model: str, count: int) -> None:
        self.requests, self.here = folder / "requests.jsonl", folder / "here.jsonl"
        self.model = model
        lines = []
        for number in range(count):
            body = {
                "prompt": f"n {number}",
                "max_tokens": 60 if number % 7 == 3 else 9,
                "ignore_eos": True,
            }
            url = "/v1/completions" if number % 5 else "/v1/embeddings"
            line = {"custom_id": str(number - number % 11 // 10), "method": "POST", "url": url,
                    "body": body if number % 5 else {"input": f"n {number}"}}  # fmt: skip
            lines.append("no request" if number % 13 == 12 else json.dumps(line))
        self.requests.write_text("".join(line + "\n" for line in lines))
        run_batch(BatchJob(self.requests, self.here, model, dict(SMALL_ENGINE)), lambda *args: None)

    def command(self, answers: Path, address: str) -> list[str]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_ENGINE.items()]
        files = [str(self.requests), "-o", str(answers), "--model", self.model]
        return [
            sys.executable,
            "-m",
            "quire",
            "batch",
            *files,
            *options,
            "--replicas=2",
            "--ray",
            address,
        ]


@pytest.fixture(scope="module")
def batches(cluster: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Batches:
    pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'quire[ray]'")
    from ray import serve

    serve.shutdown()  # its engines have the cores
    return Batches(tmp_path_factory.mktemp("batches"), model, 60)


def test_a_batch_has_the_same_answers(cluster: Any, batches: Batches) -> None:
    """While one of the processes that answer is killed."""
    import ray

    from quire.cluster.ray_batch import cluster_at

    there = batches.here.with_name("there.jsonl")
    address = cluster.address
    ray.shutdown()
    done: list[int] = []

    def report(num_done: int, total: int, num_tokens: int) -> None:
        done.append(num_done)
        if num_done and len(done) == 3:
            os.kill(next(iter(actor_processes())), signal.SIGKILL)

    with cluster_at(address) as answer_all:
        job = BatchJob(
            batches.requests, there, batches.model, {**SMALL_ENGINE}, concurrency=8, replicas=2
        )
        summary = run_batch(job, report, answer_all)
    assert (summary.total, summary.done, done[-1]) == (60, 60, 60)
    assert summary.failed > 0
    assert done == sorted(done)
    assert len(done) > 3
    assert there.read_bytes() == batches.here.read_bytes()
    missing = BatchJob(
        batches.requests, there.with_name("no.jsonl"), "./no-such-model", {**SMALL_ENGINE}
    )
    with cluster_at(address) as answer_all, pytest.raises(QuireError, match="no-such-model"):
        run_batch(missing, report, answer_all)
    wait_for(lambda: not actor_processes(), "actors to end")


@pytest.mark.parametrize("at", [0, 5, 30])
def test_a_batch_that_is_killed_goes_on(cluster: Any, batches: Batches, at: int) -> None:
    answers = batches.here.with_name(f"killed-{at}.jsonl")
    part = answers.with_name(answers.name + ".part")
    command = [*batches.command(answers, cluster.address), "--concurrency=8"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") >= at, f"{at} answers")
    process.kill()
    process.wait()
    assert not answers.exists()
    written = part.read_bytes()
    assert batches.here.read_bytes().startswith(written)
    ended = subprocess.run(command, check=False, timeout=180, stderr=subprocess.DEVNULL)
    assert ended.returncode == 3  # some of the requests are wrong
    assert answers.read_bytes() == batches.here.read_bytes()


def actor_processes() -> list[int]:
    """Ray calls a process by what it does."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"MapWorker(MapBatches(_Answers)" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def test_configuration_files_are_serves(cluster: Any) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(
        yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text())
    )
    service = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())
    ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
