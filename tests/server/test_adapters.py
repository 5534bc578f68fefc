"""Adapters over HTTP: the model field names them; they are loaded, listed and unloaded while the
server runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from tests.adapters import random_adapter
from tests.server.harness import SMALL_ENGINE, Server, wait_for

KEY, ADMIN = "key-for-all", "key-for-admins"
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folders(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters, of which two lie in the server's folder."""
    root = tmp_path_factory.mktemp("adapters")
    with LLM(small_model, **SMALL_ENGINE) as llm:
        made = {
            name: random_adapter(root / place / name, llm.engine.decoder, seed, 4)
            for seed, (place, name) in enumerate(
                [("", "given"), ("", "later"), ("dir", "found"), ("dir", "found-2")]
            )
        }
    (root / "dir" / "link").symlink_to(root / "given")
    return made


@pytest.fixture(scope="module")
def expected(small_model: str, folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """What each answers, computed without a server."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(small_model, **SMALL_ENGINE) as llm:
        asked: list[Any] = [None, *(LoRARequest(n, 1, str(p)) for n, p in folders.items())]
        found = llm.generate([PROMPT] * len(asked), params, lora_request=asked)
    answers = [list(one.completions[0].token_ids) for one in found]
    assert len({tuple(one) for one in answers}) == len(answers)
    return dict(zip([None, *folders], answers, strict=True))


@pytest.fixture(scope="module")
def server(small_model: str, folders: dict[str, Path]) -> Iterator[Server]:
    with Server(
        model=small_model,
        engine=SMALL_ENGINE,
        served_model_names=["small"],
        adapters=(("given", str(folders["given"])),),
        adapter_folder=folders["found"].parent,
        api_keys=[KEY],
        admin_keys=[ADMIN],
    ) as one:
        yield one


def headers(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(server: Server, model: str) -> Any:
    body = {
        "model": model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post("/v1/completions", body, headers=headers())


def answer(server: Server, model: str) -> list[int]:
    response = complete(server, model)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == model
    found: list[int] = body["choices"][0]["token_ids"]
    return found


def manage(server: Server, what: str, key: str = ADMIN, **body: Any) -> Any:
    return server.post(f"/v1/{what}_lora_adapter", body, headers=headers(key))


def test_the_model_field_names_the_adapter(
    server: Server, expected: dict[str | None, list[int]]
) -> None:
    names = ["small", "given", "found", "found-2"] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: answer(server, name), names))
    assert answers == [expected[None if name == "small" else name] for name in names]


def test_models_are_listed_with_their_parent(server: Server) -> None:
    found = server.get("/v1/models", headers=headers()).json()["data"]
    assert {one["id"]: one["parent"] for one in found} == {
        "small": None,
        "given": "small",
        "found": "small",
        "found-2": "small",
    }
    assert server.get("/v1/models/found", headers=headers()).json()["parent"] == "small"


@pytest.mark.parametrize("name", ["nobody", "link", "../given", "dir/../found", "found/", ".", ""])
def test_names_that_lead_out_of_the_folder_are_no_models(server: Server, name: str) -> None:
    assert complete(server, name).status_code == 404


def test_adapters_come_and_go_while_the_server_runs(
    server: Server, folders: dict[str, Path], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    assert complete(server, "later").status_code == 404
    path = shutil.copytree(folders["later"], tmp_path / "later")
    loaded = manage(server, "load", lora_name="later", lora_path=str(path))
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["rank"] == 4
    assert answer(server, "later") == expected["later"]
    assert manage(server, "load", lora_name="later", lora_path=str(path)).status_code == 400
    again = {"lora_name": "later", "lora_path": str(folders["found"]), "load_inplace": True}
    assert manage(server, "load", **again).status_code == 200
    assert answer(server, "later") == expected["found"]
    assert manage(server, "unload", lora_name="later").status_code == 200
    assert complete(server, "later").status_code == 404
    assert manage(server, "unload", lora_name="later").status_code == 404


def test_only_administrators_load_and_unload(server: Server, folders: dict[str, Path]) -> None:
    body = {"lora_name": "later", "lora_path": str(folders["later"])}
    assert manage(server, "load", KEY, **body).status_code == 403
    assert manage(server, "unload", KEY, lora_name="given").status_code == 403


@pytest.mark.parametrize(
    "body",
    [
        {"lora_name": "x"},
        {"lora_name": "../x", "lora_path": "/tmp"},
        {"lora_name": "small", "lora_path": "/tmp"},
        {"lora_name": "x", "lora_path": "relative"},
        {"lora_name": "x", "lora_path": "/nowhere\0"},
        {"lora_name": "x", "lora_path": "/nowhere"},
        {"lora_name": 3, "lora_path": "/nowhere"},
        {"lora_name": "x", "lora_path": "/" + "x" * 4000},
        {"lora_name": "x", "lora_path": "/dev/zero"},
    ],
)
def test_what_can_not_be_loaded_is_a_bad_request(server: Server, body: dict[str, Any]) -> None:
    response = manage(server, "load", **body)
    assert response.status_code == 400, response.text
    assert "Traceback" not in response.text


def test_an_adapter_that_breaks_fails_its_own_requests_and_shows_no_path(
    server: Server, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    broken = shutil.copytree(folders["found"], folders["found"].parent / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    try:
        response = complete(server, "broken")
    finally:
        shutil.rmtree(broken)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
    assert str(broken.parent) not in response.text
    assert answer(server, "found") == expected["found"]


def test_loading_under_load_gives_no_wrong_answer(
    server: Server, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    """Each name stands for one content all the time, and comes and goes."""

    def ask(number: int) -> bool:
        name = ["given", "found", "later"][number % 3]
        if name == "later" and number % 2:
            manage(server, "unload", lora_name="later")
        elif name == "later":
            manage(server, "load", lora_name="later", lora_path=str(folders["later"]))
        response = complete(server, name)
        if response.status_code == 404:
            return name == "later"
        tokens = response.json()["choices"][0]["token_ids"]
        return bool(response.status_code == 200 and tokens == expected[name])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(ask, range(36)))
    manage(server, "unload", lora_name="later")


@pytest.mark.slow  # servers of their own, of several processes each
@pytest.mark.parametrize("processes", [{"http_workers": 2}, {"replicas": 2}], ids=str)
def test_every_process_knows_what_was_loaded_when_the_answer_comes(
    small_model: str,
    folders: dict[str, Path],
    expected: dict[str | None, list[int]],
    processes: dict[str, Any],
) -> None:
    with Server(
        model=small_model,
        engine=SMALL_ENGINE,
        served_model_names=["small"],
        adapters=(("given", str(folders["given"])),),
        api_keys=[KEY],
        admin_keys=[ADMIN],
        **processes,
    ) as server:

        def statuses() -> set[int]:
            with ThreadPoolExecutor(8) as threads:
                found = list(threads.map(lambda _: complete(server, "later"), range(16)))
            for one in found:
                if one.status_code == 200:
                    assert one.json()["choices"][0]["token_ids"] == expected["later"]
            return {one.status_code for one in found}

        assert answer(server, "given") == expected["given"]
        for _ in range(3):
            assert statuses() == {404}
            body = {"lora_name": "later", "lora_path": str(folders["later"])}
            assert manage(server, "load", KEY, **body).status_code == 403
            loaded = manage(server, "load", **body)
            assert loaded.status_code == 200, loaded.text
            assert statuses() == {200}
            assert manage(server, "unload", lora_name="later").status_code == 200
        num_engines = processes.get("replicas", 1)
        assert server.log.count("adapter later: rank 4") == 3 * num_engines
        assert manage(server, "unload", lora_name="given").status_code == 200
        assert complete(server, "given").status_code == 404


@pytest.mark.slow  # a server of its own
def test_who_finds_no_room_for_an_adapter_is_told_to_come_again(
    small_model: str, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    with LLM(small_model, **SMALL_ENGINE) as llm:
        llm.load_adapter("given", folders["given"])
        size = llm.engine.adapters.nbytes
    with Server(
        model=small_model,
        engine={**SMALL_ENGINE, "lora_memory": int(1.5 * size)},
        adapters=[(name, str(folders[name])) for name in ("given", "later")],
    ) as server:
        assert server.post("/pause?mode=keep", {}).status_code == 200
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(answer, server, "given")
            # once at the start, before the other one took its place, and once for this request
            wait_for(lambda: server.log.count("adapter given: rank 4") == 2, "the first adapter")
            refused = complete(server, "later")
            assert refused.status_code == 503, refused.text
            assert "try again later" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            assert server.post("/resume", {}).status_code == 200
            assert first.result() == expected["given"]
        assert answer(server, "later") == expected["later"]
