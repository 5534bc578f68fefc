"""Weights of several engines replaced together, from files and by a real trainer in another process,
through several HTTP workers; and whatever is killed while that goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from tests.models.test_given_weights import changed
from tests.server.harness import SMALL_ENGINE, Server, engines_of, error_of, free_port, wait_for

ADMIN = {"authorization": "Bearer key-for-admins"}
PROMPT = list(range(20, 60))
PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}

TRAINER = """
import json, sys
from safetensors.torch import load_file
from quire.train.transfer import WeightSender
port, world, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
print("imported", flush=True)
try:
    sender = WeightSender(port, world, seconds=seconds)
except Exception as error:
    print("failed", error, flush=True)
    sys.exit(1)
print("joined", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    tensors = load_file(order["file"])
    pairs = [(name, tensors[name]) for name in order["names"]]
    if "cut" in order:
        pairs = [(name, one.flatten()[: order["cut"]]) for name, one in pairs]
    if "repeat" in order:
        pairs = [(name, one.repeat(*[order["repeat"]] * one.dim())) for name, one in pairs]
    try:
        sender.send(pairs, order.get("packed_bytes"))
        print("sent", flush=True)
    except Exception as error:
        print("failed", error, flush=True)
"""


class Trainer:
    """A process that broadcasts what it is told."""

    def __init__(self, world_size: int, seconds: float = 60.0) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(self.port), str(world_size), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.world_size = world_size
        assert self.heard() == "imported"  # who joins has seconds for it, and torch takes as many

    @property
    def init_info(self) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self.world_size,
            "backend": "gloo",
            "timeout_seconds": 20,
        }

    def order(self, file: Path, names: list[str], **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"file": str(file), "names": names, **more}) + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def versions(small_model: str) -> list[dict[str, Tensor]]:
    (file,) = Path(small_model).glob("*.safetensors")
    old = load_file(file)
    other = old
    for seed in range(2, 8):
        other = changed(other, seed)
    return [old, changed(old, 1), other]


@pytest.fixture(scope="module")
def expected(small_model: str, versions: list[dict[str, Tensor]]) -> list[list[int]]:
    params = SamplingParams(**PARAMS)  # type: ignore[arg-type]
    found = []
    with LLM(small_model, **SMALL_ENGINE) as llm:
        for weights in versions:
            llm.update_weights(weights.items())
            found.append(list(llm.generate(PROMPT, params)[0].token_ids))
    assert found[0] != found[1] != found[2] != found[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, versions: list[dict[str, Tensor]]) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for number, weights in enumerate(versions):
        save_file(weights, root / f"v{number}.safetensors")
    return root


def start(small_model: str, folder: Path, **more: Any) -> Server:
    return Server(
        model=small_model,
        engine=SMALL_ENGINE,
        weights_folder=folder,
        api_keys=["key"],
        admin_keys=["key-for-admins"],
        **more,
    )


@pytest.fixture(scope="module")
def server(small_model: str, folder: Path) -> Iterator[Server]:
    """Two engines behind two HTTP processes."""
    with start(small_model, folder, replicas=2, http_workers=2) as one:
        yield one


def manage(server: Server, path: str, **body: Any) -> Any:
    with server.client() as client:  # a connection of its own: to either worker
        return client.post(path, headers=ADMIN, **({"json": body} if body else {}))


def done(server: Server, path: str, **body: Any) -> dict[str, Any]:
    response = manage(server, path, **body)
    assert response.status_code == 200, (path, response.text)
    found: dict[str, Any] = response.json()
    return found


def complete(server: Server, **more: Any) -> Any:
    body = {"prompt": PROMPT, "return_token_ids": True, **PARAMS, **more}
    with server.client() as client:
        return client.post("/v1/completions", json=body, headers=ADMIN)


def answers(server: Server, count: int = 4) -> list[tuple[list[int], int]]:
    """Tokens and version of several requests at once: every engine gets some."""
    with ThreadPoolExecutor(count) as pool:
        found = [pool.submit(complete, server, prompt=PROMPT) for _ in range(count)]
    bodies = [one.result() for one in found]
    assert [one.status_code for one in bodies] == [200] * count, [one.text for one in bodies]
    return [
        (one.json()["choices"][0]["token_ids"], one.json().get("weights_version", 0))
        for one in bodies
    ]


def state(server: Server, path: str) -> dict[str, Any]:
    with server.client() as client:
        response = client.get(path, headers=ADMIN)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def version(server: Server) -> int:
    return int(state(server, "/weight_info")["weight_version"])


def update(server: Server, number: int) -> Any:
    done(server, "/start_weight_update")
    info = {"backend": "disk", "path": f"v{number}.safetensors"}
    done(server, "/update_weights", update_info=info)
    return manage(server, "/finish_weight_update")


def statuses(server: Server) -> list[str]:
    with server.client() as client:
        found = client.get("/health", headers=ADMIN).json()
    return [one["status"] for one in found["replicas"]]


def test_all_engines_change_together_through_any_worker(
    server: Server, expected: list[list[int]]
) -> None:
    now = version(server)
    assert state(server, "/get_world_size") == {"world_size": 2}
    for number in (1, 2, 0):
        now += 1
        assert update(server, number).json()["weights_version"] == now
        assert answers(server) == [(expected[number], now)] * 4
        assert complete(server, weights_version=now).json()["weights_version"] == now
        assert error_of(complete(server, weights_version=now - 1), 400, "weights_version")
    done(server, "/reset_prefix_cache")
    assert "version" in state(server, "/server_info")


def test_pauses_and_sleep_hold_all_engines(server: Server, expected: list[list[int]]) -> None:
    before = version(server)
    done(server, "/pause?mode=keep")
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(complete, server) for _ in range(4)]
        time.sleep(0.5)
        assert not any(one.done() for one in waiting)
        assert state(server, "/is_paused") == {"is_paused": True}
        assert update(server, 1).status_code == 200
        done(server, "/resume")
        found = [one.result().json() for one in waiting]
    assert [one["choices"][0]["token_ids"] for one in found] == [expected[1]] * 4
    assert {one["weights_version"] for one in found} == {before + 1}
    for level in (1, 2):
        done(server, f"/sleep?level={level}")
        assert state(server, "/is_sleeping") == {"is_sleeping": True}
        assert error_of(complete(server), 503)
        assert error_of(manage(server, f"/sleep?level={level}"), 409)
        done(server, "/wake_up")
        number = 1 if level == 1 else 0
        assert answers(server) == [(expected[number], before + level)] * 4


def test_of_two_updates_at_once_one_is_refused(server: Server, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(6) as pool:
        begun = [pool.submit(manage, server, "/start_weight_update") for _ in range(6)]
        assert sorted(one.result().status_code for one in begun) == [200] + [409] * 5
        done(server, "/update_weights", update_info={"backend": "disk", "path": "v1.safetensors"})
        finished = [pool.submit(manage, server, "/finish_weight_update") for _ in range(4)]
        assert sorted(one.result().status_code for one in finished) == [200] + [409] * 3
    assert [tokens for tokens, _ in answers(server)] == [expected[1]] * 4


def test_requests_under_updates_are_of_one_version_each(
    server: Server, expected: list[list[int]]
) -> None:
    """Which tokens an answer has says which weights computed it."""
    first = version(server)
    with ThreadPoolExecutor(8) as pool:
        asked: list[Future[Any]] = []
        made = {}
        for number in (1, 2, 0, 1):
            asked += [pool.submit(complete, server) for _ in range(6)]
            done(server, "/pause?mode=wait")
            found = update(server, number)
            made[found.json()["weights_version"]] = number
            done(server, "/resume")
        asked += [pool.submit(complete, server) for _ in range(6)]
        bodies = [one.result().json() for one in asked]
    for body in bodies:
        of = body.get("weights_version", 0)
        if of > first:
            assert body["choices"][0]["token_ids"] == expected[made[of]]
    assert {body.get("weights_version") for body in bodies} & made.keys()


@pytest.mark.parametrize("packed_bytes", [None, 1000, 2**30])
def test_a_trainer_broadcasts_weights(
    packed_bytes: int | None, server: Server, folder: Path, expected: list[list[int]]
) -> None:
    number = 2 if packed_bytes is None else 1
    with Trainer(3) as trainer:
        done(server, "/init_weight_transfer_engine", init_info=trainer.init_info)
        assert trainer.heard() == "joined"
        for _ in range(2):
            info, names = announced(folder, number)
            if packed_bytes is not None:
                info |= {"packed": True, "packed_buffer_size_bytes": packed_bytes}
            done(server, "/start_weight_update")
            trainer.order(folder / f"v{number}.safetensors", names, packed_bytes=packed_bytes)
            assert done(server, "/update_weights", update_info=info)["tensors"] == len(names)
            assert trainer.heard() == "sent"
            now = done(server, "/finish_weight_update")["weights_version"]
            assert answers(server) == [(expected[number], now)] * 4
            number = 0


def announced(folder: Path, number: int) -> tuple[dict[str, Any], list[str]]:
    tensors = load_file(folder / f"v{number}.safetensors")
    names = list(tensors)
    info = {
        "names": names,
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }
    return info, names


def test_what_a_trainer_announces_is_checked(server: Server, folder: Path) -> None:
    before, now = answers(server), version(server)
    info, names = announced(folder, 1)
    with Trainer(3) as trainer:
        wrong_world = {**trainer.init_info, "world_size": 2}
        said = error_of(
            manage(server, "/init_weight_transfer_engine", init_info=wrong_world),
            400,
            "init_info.world_size",
        )
        assert "it is 3 at least" in said
        done(server, "/init_weight_transfer_engine", init_info=trainer.init_info)
        done(server, "/start_weight_update")
        wrong: list[dict[str, Any]] = [
            {**info, "names": [*names[:-1], names[0]]},
            {**info, "names": [*names[:-1], "model.nothing"]},
            {**info, "shapes": [[2**40] * 8, *info["shapes"][1:]]},
            {**info, "shapes": [[0], *info["shapes"][1:]]},
            {**info, "shapes": [[-1], *info["shapes"][1:]]},
            {**info, "shapes": [[3, 3], *info["shapes"][1:]]},
            {**info, "shapes": info["shapes"][1:]},
            {**info, "dtype_names": ["int8", *info["dtype_names"][1:]]},
            {**info, "dtype_names": ["__class__", *info["dtype_names"][1:]]},
            {"names": names},
            {"names": []},
            {**info, "path": "v1.safetensors"},
            {**info, "packed_buffer_size_bytes": 10},
            {**info, "packed": True, "packed_buffer_size_bytes": 0},
            {**info, "packed": "x"},
            {"names": [5], "dtype_names": ["float32"], "shapes": [[1]]},
            {},
        ]
        for one in wrong:
            assert error_of(manage(server, "/update_weights", update_info=one), 400), one
        half = {key: values[:2] for key, values in info.items()}
        trainer.order(folder / "v1.safetensors", names[:2])
        done(server, "/update_weights", update_info=half)
        said = error_of(manage(server, "/update_weights", update_info=half), 400)
        assert "came before" in said
        assert manage(server, "/finish_weight_update").status_code in (200, 400)
    if version(server) != now:
        assert update(server, 1).status_code == 200
    else:
        assert answers(server) == before


@pytest.mark.parametrize(
    "init",
    [
        {"backend": "ipc"},
        {"backend": "nccl"},
        {"backend": "gloo", "master_address": "x", "master_port": 1, "world_size": 3},
        {"backend": "disk", "master_port": 1},
        {"master_address": "a\0b", "master_port": 1, "rank_offset": 1, "world_size": 3},
        {"master_address": "nowhere.invalid", "master_port": 1, "rank_offset": 1, "world_size": 3},
        {"master_address": 5, "master_port": 1, "rank_offset": 1, "world_size": 3},
        {"master_address": "127.0.0.1", "master_port": 70000, "rank_offset": 1, "world_size": 3},
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 3},
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3.5},
        [],
    ],
)
def test_hostile_groups_are_refused(server: Server, init: Any) -> None:
    if isinstance(init, dict) and init.get("rank_offset") == 1:
        init = {**init, "timeout_seconds": 3}
    response = manage(server, "/init_weight_transfer_engine", init_info=init)
    assert response.status_code in (400, 409), response.text
    assert len(answers(server)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "hangs", "sends less", "sends more", "is stopped"])
def test_a_trainer_that_fails_leaves_the_old_weights(
    fault: str, server: Server, folder: Path
) -> None:
    now = version(server)
    before = answers(server)
    info, names = announced(folder, 1)
    with Trainer(3) as trainer:
        init = {**trainer.init_info, "timeout_seconds": 4}
        done(server, "/init_weight_transfer_engine", init_info=init)
        assert trainer.heard() == "joined"
        done(server, "/start_weight_update")
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(manage, server, "/update_weights", update_info=info)
            file = folder / "v1.safetensors"
            if fault == "dies":
                trainer.order(file, names[:3])
                assert trainer.heard() == "sent"
                trainer.process.kill()
            elif fault == "hangs":
                trainer.order(file, names[:3])
            elif fault == "sends less":
                trainer.order(file, names, cut=3)
            elif fault == "sends more":
                trainer.order(file, names, repeat=2)
            else:
                trainer.process.send_signal(signal.SIGSTOP)
            assert answers(server) == before  # steps go on meanwhile
            response = taking.result()
        if fault in ("sends less", "sends more") and response.status_code == 200:
            pytest.fail("other sizes than announced were taken")
        assert response.status_code in (409, 503), response.text
        assert error_of(manage(server, "/update_weights", update_info=info), 409)
        done(server, "/finish_weight_update", abort=True)
    assert (answers(server), version(server)) == (before, now)
    assert set(statuses(server)) == {"ready"}
    assert update(server, 1).status_code == 200


def engine_pids(server: Server) -> list[int]:
    return sorted(engines_of(server.process.pid))


PHASES = ["paused", "begun", "gathered", "finishing", "finished", "asleep"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("count", [1, 2])
def test_engines_may_be_killed_in_any_phase(
    count: int, phase: str, small_model: str, folder: Path, expected: list[list[int]]
) -> None:
    """What answers afterwards has one version, the one that is told, and a full update brings the
    engine back that was lost.
    """
    with start(small_model, folder, replicas=2) as server:
        assert update(server, 1).json()["weights_version"] == 1

        def kill() -> None:
            for pid in engine_pids(server)[:count]:
                os.kill(pid, signal.SIGKILL)

        if phase == "asleep":
            done(server, "/sleep?level=1")
            kill()
            wait_for(lambda: len(engine_pids(server)) == 2)
            time.sleep(1)
            wait_for(lambda: manage(server, "/wake_up").status_code == 200)
        else:
            done(server, "/pause?mode=keep")
            if phase == "paused":
                kill()
            done_or_lost(server, "/start_weight_update")
            if phase == "begun":
                kill()
            info = {"path": "v2.safetensors"}
            done_or_lost(server, "/update_weights", update_info=info)
            if phase == "gathered":
                kill()
            with ThreadPoolExecutor(1) as pool:
                finishing = pool.submit(manage, server, "/finish_weight_update")
                if phase == "finishing":
                    time.sleep(0.02)
                    kill()
                finishing.result()
            if phase == "finished":
                kill()
            wait_for(lambda: manage(server, "/resume").status_code == 200)
        wait_for(lambda: complete(server).status_code == 200)
        now = version(server)
        for tokens, of in answers(server):
            assert of == now
            if now == 0:
                assert tokens == expected[0]
            else:
                assert tokens in expected[1:]
        wait_for(lambda: "restarting" not in statuses(server))
        for tokens, of in answers(server):
            assert of == version(server)
            assert tokens in expected
        assert wait_for(lambda: update(server, 2).status_code == 200 or forgotten(server))
        wait_for(lambda: statuses(server) == ["ready"] * 2)
        assert answers(server, 6) == [(expected[2], version(server))] * 6


def forgotten(server: Server) -> bool:
    manage(server, "/finish_weight_update", abort=True)
    return False


def done_or_lost(server: Server, path: str, **body: Any) -> None:
    response = manage(server, path, **body)
    assert response.status_code in (200, 409, 503), response.text


@pytest.mark.slow
def test_a_part_of_the_weights_leaves_an_engine_out_that_was_restarted(
    small_model: str, folder: Path, versions: list[dict[str, Tensor]], expected: list[list[int]]
) -> None:
    name = next(name for name in versions[2] if name.endswith("0.mlp.down_proj.weight"))
    save_file({name: versions[2][name]}, folder / "part.safetensors")
    with start(small_model, folder, replicas=2) as server:
        assert update(server, 1).status_code == 200
        os.kill(engine_pids(server)[0], signal.SIGKILL)
        wait_for(lambda: "outdated" in statuses(server))
        assert answers(server) == [(expected[1], 1)] * 4
        done(server, "/start_weight_update")
        done(server, "/update_weights", update_info={"path": "part.safetensors"})
        found = done(server, "/finish_weight_update")
        assert (found["weights_version"], len(found["left_out"])) == (2, 1)
        tokens = {tuple(one) for one, of in answers(server) if of == 2}
        assert len(tokens) == 1
        found = update(server, 2).json()
        assert "left_out" not in found
        assert statuses(server) == ["ready"] * 2
        assert answers(server) == [(expected[2], 3)] * 4


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_stops_no_update(
    server: Server, expected: list[list[int]]
) -> None:
    done(server, "/start_weight_update")
    done(server, "/update_weights", update_info={"backend": "disk", "path": "v2.safetensors"})
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(manage, server, "/finish_weight_update")
        time.sleep(0.01)
        for pid in worker_pids(server):
            os.kill(pid, signal.SIGKILL)
        finishing.exception()
    wait_for(lambda: is_answering(server))
    wait_for(lambda: [tokens for tokens, _ in answers(server)] == [expected[2]] * 4)


def worker_pids(server: Server) -> list[int]:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_answering(server: Server) -> bool:
    try:
        return bool(complete(server).status_code == 200)
    except Exception:
        return False


@pytest.mark.slow
def test_two_ranks_behind_http(small_model: str, folder: Path, expected: list[list[int]]) -> None:
    """And when one of them is killed the engine starts anew with its files."""
    engine = SMALL_ENGINE | {"tensor_parallel_size": 2, "device": "cpu"}
    with Server(
        model=small_model,
        engine=engine,
        weights_folder=folder,
        api_keys=["key"],
        admin_keys=["key-for-admins"],
    ) as server:
        assert state(server, "/get_world_size") == {"world_size": 1}
        assert update(server, 1).status_code == 200
        assert answers(server, 2) == [(expected[1], 1)] * 2
        done(server, "/sleep?level=2")
        done(server, "/wake_up")
        assert answers(server, 2) == [(expected[0], 2)] * 2
        with Trainer(2) as trainer:
            done(server, "/init_weight_transfer_engine", init_info=trainer.init_info)
            info, names = announced(folder, 2)
            done(server, "/start_weight_update")
            trainer.order(folder / "v2.safetensors", names)
            done(server, "/update_weights", update_info=info)
            done(server, "/finish_weight_update")
        assert answers(server, 2) == [(expected[2], 3)] * 2
