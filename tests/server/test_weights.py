"""Pauses, sleep and other weights over HTTP, for administrators."""

from __future__ import annotations

import multiprocessing.shared_memory
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from tests.models.test_given_weights import changed
from tests.server.harness import SMALL_ENGINE, Server, error_of, wait_for

KEY, ADMIN = "key-for-all", "key-for-admins"
PROMPT = list(range(20, 60))
PARAMS = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def weights(small_model: str) -> dict[str, Tensor]:
    (file,) = Path(small_model).glob("*.safetensors")
    return changed(load_file(file), 1)


@pytest.fixture(scope="module")
def expected(small_model: str, weights: dict[str, Tensor]) -> list[list[int]]:
    """What the old and the new weights answer."""
    params = SamplingParams(**PARAMS)  # type: ignore[arg-type]
    with LLM(small_model, **SMALL_ENGINE) as llm:
        old = llm.generate(PROMPT, params)[0].token_ids
        llm.update_weights(weights.items())
        new = llm.generate(PROMPT, params)[0].token_ids
    assert old != new
    return [list(old), list(new)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    root = tmp_path_factory.mktemp("weights")
    (root / "inside" / "step-1").mkdir(parents=True)
    save_file(weights, root / "inside" / "step-1" / "model.safetensors")
    save_file(weights, root / "outside.safetensors")
    (root / "inside" / "link").symlink_to(root / "outside.safetensors")
    (root / "inside" / "broken.safetensors").write_bytes(b"\xff" * 20)
    name = next(name for name in weights if name.endswith("0.mlp.down_proj.weight"))
    save_file({name: weights[name][:-1].clone()}, root / "inside" / "other.safetensors")
    name = next(name for name in weights if name.endswith("0.self_attn.q_proj.weight"))
    save_file({name: weights[name]}, root / "inside" / "part.safetensors")
    return root / "inside"


@pytest.fixture(scope="module")
def server(small_model: str, folder: Path) -> Iterator[Server]:
    with Server(
        model=small_model,
        engine=SMALL_ENGINE,
        weights_folder=folder,
        api_keys=[KEY],
        admin_keys=[ADMIN],
    ) as one:
        yield one


def manage(server: Server, path: str, key: str = ADMIN, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    with server.client() as client:
        return client.post(path, headers=headers, **({"json": body} if body else {}))


def ask(server: Server, path: str) -> Any:
    with server.client() as client:
        response = client.get(path, headers={"authorization": f"Bearer {ADMIN}"})
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: Server, **more: Any) -> Any:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": PROMPT, "return_token_ids": True, **PARAMS, **more}
    with server.client() as client:
        return client.post("/v1/completions", json=body, headers=headers)


def answer(server: Server, **more: Any) -> list[int]:
    response = complete(server, **more)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def version(server: Server) -> int:
    return int(ask(server, "/weight_info")["weight_version"])


def update(server: Server, **info: Any) -> Any:
    assert manage(server, "/start_weight_update").status_code == 200
    taken = manage(server, "/update_weights", update_info=info)
    assert taken.status_code == 200, taken.text
    return manage(server, "/finish_weight_update")


def test_weights_come_from_disk_and_from_shared_memory(
    server: Server, expected: list[list[int]], weights: dict[str, Tensor], small_model: str
) -> None:
    assert answer(server) == expected[0]
    assert "weights_version" not in complete(server).json()
    done = manage(server, "/init_weight_transfer_engine", init_info={"backend": "disk"})
    assert done.status_code == 200
    done = update(server, path="step-1")
    assert done.status_code == 200, done.text
    assert done.json()["weights_version"] == 1
    assert answer(server) == expected[1]
    body = complete(server).json()
    assert body["weights_version"] == 1
    assert body["system_fingerprint"].endswith("-w1")
    (file,) = Path(small_model).glob("*.safetensors")
    data = save(load_file(file))
    memory = multiprocessing.shared_memory.SharedMemory("quire-test-weights", True, len(data))
    try:
        memory.buf[: len(data)] = data
        done = update(server, backend="shared_memory", name="quire-test-weights")
        assert done.status_code == 200, done.text
    finally:
        memory.close()
        memory.unlink()
    assert answer(server) == expected[0]
    assert version(server) == 2


def test_a_request_may_want_one_version(server: Server, expected: list[list[int]]) -> None:
    now = version(server)
    assert complete(server, weights_version=now).json()["weights_version"] == now
    said = error_of(complete(server, weights_version=now + 1), 400, "weights_version")
    assert f"the engine has version {now}" in said
    with ThreadPoolExecutor(2) as pool:
        long = {"max_tokens": 900, "prompt": PROMPT[:5]}
        pinned = pool.submit(complete, server, weights_version=now, **long)
        kept = pool.submit(complete, server, **long)
        wait_for(lambda: running(server) == 2)
        assert manage(server, "/pause?mode=keep").status_code == 200
        assert update(server, path="step-1").status_code == 200
        assert manage(server, "/resume").status_code == 200
        assert "weights_version" in error_of(pinned.result(), 409, "weights_version")
        assert kept.result().json()["weights_version"] == now + 1


def running(server: Server) -> int:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with server.client() as client:
        records = client.get("/v1/requests", headers=headers).json()["data"]
    return sum(one["state"] == "running" for one in records)


def test_pauses_as_vllm_has_them(server: Server) -> None:
    assert ask(server, "/is_paused") == {"is_paused": False}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, server, max_tokens=900)
        wait_for(lambda: running(server) == 1)
        said = error_of(manage(server, "/reset_prefix_cache"), 409)
        assert "has to wait until no request runs" in said
        assert manage(server, "/pause?mode=abort").json()["status"] == "paused"
        assert first.result().status_code == 503
        second = pool.submit(complete, server)
        assert ask(server, "/is_paused") == {"is_paused": True}
        assert not second.done()
        assert manage(server, "/resume").json()["is_paused"] is False
        assert second.result().status_code == 200
        third = pool.submit(complete, server, max_tokens=300)
        wait_for(lambda: running(server) == 1)
        assert manage(server, "/pause?mode=wait").status_code == 200
        assert third.result().json()["usage"]["completion_tokens"] == 300
        assert manage(server, "/resume").status_code == 200
    assert manage(server, "/reset_prefix_cache").status_code == 200
    assert error_of(manage(server, "/pause?mode=later"), 400)


def test_sleep_gives_memory_back_and_changes_no_bit(
    server: Server, weights: dict[str, Tensor], expected: list[list[int]]
) -> None:
    before = answer(server)
    nbytes = sum(one.nbytes for one in weights.values())
    for level in (1, 2):
        awake = server.memory()[1]
        done = manage(server, f"/sleep?level={level}")
        assert done.status_code == 200, done.text
        assert ask(server, "/is_sleeping") == {"is_sleeping": True}
        given_back = (awake - server.memory()[1]) * 1024
        # at level 1 weights stay where they are on a CPU, and of the cache little was ever written
        assert given_back > (0.8 * nbytes if level == 2 else 0), (given_back, nbytes)
        assert "asleep" in error_of(complete(server), 503)
        assert error_of(manage(server, f"/sleep?level={level}"), 409)
        assert error_of(manage(server, "/resume"), 409)
        assert manage(server, "/wake_up").status_code == 200
        assert ask(server, "/is_sleeping") == {"is_sleeping": False}
        assert answer(server) == (before if level == 1 else expected[0])


@pytest.mark.parametrize(
    ("info", "status"),
    [
        ({"path": "../outside.safetensors"}, 400),
        ({"path": "/etc/passwd"}, 400),
        ({"path": "link"}, 400),
        ({"path": "step-1/../../outside.safetensors"}, 400),
        ({"path": "nowhere"}, 400),
        ({"path": "a\0b"}, 400),
        ({"path": "broken.safetensors"}, 400),
        ({}, 400),
        ({"path": "step-1", "name": "quire-x"}, 400),
        ({"backend": "shared_memory", "name": "../etc/passwd"}, 400),
        ({"backend": "shared_memory", "name": "quire-nothing"}, 400),
        ({"path": "other.safetensors"}, 400),
        ({"backend": "nccl", "names": ["a"]}, 400),
        ({"backend": "gloo", "names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}, 409),
        ({"backend": "ipc"}, 400),
        ({"path": 5}, 400),
    ],
)
def test_hostile_updates_are_refused_and_show_no_path(
    server: Server, folder: Path, info: dict[str, Any], status: int
) -> None:
    before, now = answer(server), version(server)
    assert manage(server, "/start_weight_update").status_code == 200
    response = manage(server, "/update_weights", update_info=info)
    assert response.status_code == status, response.text
    assert str(folder.parent) not in response.text
    assert error_of(manage(server, "/start_weight_update"), 409)
    assert manage(server, "/finish_weight_update", abort=True).status_code == 200
    assert (answer(server), version(server)) == (before, now)


def test_what_does_not_fit_leaves_the_old_weights(server: Server) -> None:
    before, now = answer(server), version(server)
    assert "kept as one matrix" in error_of(update(server, path="part.safetensors"), 400)
    assert error_of(manage(server, "/finish_weight_update"), 409)
    assert manage(server, "/start_weight_update").status_code == 200
    assert manage(server, "/update_weights", update_info={"path": "step-1"}).status_code == 200
    assert error_of(manage(server, "/update_weights", update_info={"path": "step-1"}), 400)
    assert error_of(manage(server, "/finish_weight_update", weight_version="new"), 400)
    assert error_of(manage(server, "/finish_weight_update", weight_version=now), 400)
    assert manage(server, "/finish_weight_update", abort=True).status_code == 200
    assert (answer(server), version(server)) == (before, now)


ROUTES = (
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


@pytest.mark.parametrize("path", ROUTES)
def test_only_administrators_may(server: Server, path: str) -> None:
    assert error_of(manage(server, path, KEY), 403)
    assert manage(server, path, "no-key").status_code == 401


def test_the_world_is_one_engine(server: Server) -> None:
    assert ask(server, "/get_world_size") == {"world_size": 1}
    nccl: dict[str, Any] = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
    }
    nccl["backend"] = "nccl"
    said = error_of(manage(server, "/init_weight_transfer_engine", init_info=nccl), 400)
    assert "between GPUs" in said
