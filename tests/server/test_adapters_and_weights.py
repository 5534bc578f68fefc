"""Adapters on weights that change: whoever loads, updates or is killed meanwhile, an answer is that of one
adapter's content and one version of the weights.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from tests.adapters import random_adapter
from tests.models.test_given_weights import changed
from tests.server.harness import SMALL_ENGINE, Server, engines_of, wait_for
from tests.server.test_weight_updates import (
    PARAMS,
    PROMPT,
    complete,
    done,
    done_or_lost,
    forgotten,
    manage,
    start,
    statuses,
    update,
    version,
)

pytestmark = pytest.mark.slow  # servers with several engines
CONTENTS = ("one", "two")
PLAIN = "small"


@pytest.fixture(scope="module")
def adapters(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    with LLM(small_model, **SMALL_ENGINE) as llm:
        decoder = llm.engine.decoder
        return {name: random_adapter(root / name, decoder, i) for i, name in enumerate(CONTENTS)}


@pytest.fixture(scope="module")
def folder(small_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    (file,) = Path(small_model).glob("*.safetensors")
    old = load_file(file)
    for number, weights in enumerate([old, changed(old, 1), changed(changed(old, 2), 3)]):
        save_file(weights, root / f"v{number}.safetensors")
    return root


@pytest.fixture(scope="module")
def expected(
    small_model: str, folder: Path, adapters: dict[str, Path]
) -> dict[tuple[int, str], list[int]]:
    """By the number of the weights and what the adapter is."""
    params = SamplingParams(**PARAMS)  # type: ignore[arg-type]
    asked = {PLAIN: None, **{name: LoRARequest(name, 1, str(adapters[name])) for name in CONTENTS}}
    found = {}
    with LLM(small_model, **SMALL_ENGINE) as llm:
        for number in range(3):
            llm.update_weights(load_file(folder / f"v{number}.safetensors").items())
            for name, one in asked.items():
                output = llm.generate(PROMPT, params, lora_request=one)[0]
                found[number, name] = list(output.token_ids)
    assert len({tuple(one) for one in found.values()}) == len(found)
    return found


@pytest.fixture
def server(small_model: str, folder: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    with start(
        small_model,
        folder,
        replicas=2,
        served_model_names=[PLAIN],
        adapters=(("given", str(adapters["one"])),),
    ) as one:
        yield one


def load(server: Server, name: str, path: Path) -> Any:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    return manage(server, "/v1/load_lora_adapter", **body)


def tokens_and_version(response: Any) -> tuple[list[int], int]:
    assert response.status_code == 200, response.text
    body = response.json()
    return body["choices"][0]["token_ids"], body.get("weights_version", 0)


def test_no_answer_mixes_versions_or_adapters_whatever_two_administrators_do(
    server: Server, adapters: dict[str, Path], expected: dict[tuple[int, str], list[int]]
) -> None:
    number_of = {0: 0}
    refused: list[str] = []
    is_over = threading.Event()
    answered: list[tuple[str, list[int], int]] = []

    def updates(numbers: list[int]) -> None:
        for number in numbers:
            while manage(server, "/start_weight_update").status_code == 409:
                refused.append("start")
                time.sleep(0.01)
            done(server, "/update_weights", update_info={"path": f"v{number}.safetensors"})
            done(server, "/pause?mode=wait")
            while (finished := manage(server, "/finish_weight_update")).status_code == 409:
                refused.append("finish")  # the other one has resumed requests
                done(server, "/pause?mode=wait")
            assert finished.status_code == 200, finished.text
            number_of[finished.json()["weights_version"]] = number
            done(server, "/resume")

    def loads() -> None:
        for number in range(10_000):
            if is_over.is_set():
                return
            assert load(server, "changing", adapters[CONTENTS[number % 2]]).status_code == 200
            time.sleep(0.02)

    def asks(number: int) -> None:
        name = [PLAIN, "given", "changing"][number % 3]
        while not is_over.is_set():
            tokens, of = tokens_and_version(complete(server, model=name))
            answered.append((name, tokens, of))

    assert load(server, "changing", adapters["one"]).status_code == 200
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(loads), *(pool.submit(asks, number) for number in range(6))]
        administrators = [pool.submit(updates, [1, 2, 0, 1]), pool.submit(updates, [2, 1, 2, 0])]
        try:
            for one in administrators:
                one.result()
        finally:
            is_over.set()
        for one in others:
            one.result()
    assert refused
    contents = {PLAIN: (PLAIN,), "given": ("one",), "changing": CONTENTS}
    for name, tokens, of in answered:
        assert tokens in [expected[number_of[of], one] for one in contents[name]], (name, of)
    assert len({of for _, _, of in answered}) > 2
    assert {name for name, _, _ in answered} == set(contents)


@pytest.mark.parametrize("phase", ["gathered", "finishing", "finished"])
def test_adapters_are_there_again_with_the_weights_that_answer(
    phase: str,
    server: Server,
    adapters: dict[str, Path],
    expected: dict[tuple[int, str], list[int]],
) -> None:
    """One of two engines is killed in an update that keeps requests of adapters: of one that was given at
    the start, and of one that was loaded since.
    """

    def kill() -> None:
        assert server.process is not None
        os.kill(min(engines_of(server.process.pid)), signal.SIGKILL)

    def check_all(numbers: tuple[int, ...]) -> None:
        for name, content in ((PLAIN, PLAIN), ("given", "one"), ("later", "two")) * 2:
            tokens, _ = tokens_and_version(complete(server, model=name))
            assert tokens in [expected[number, content] for number in numbers], name

    assert load(server, "later", adapters["two"]).status_code == 200
    assert update(server, 1).json()["weights_version"] == 1
    check_all((1,))
    with ThreadPoolExecutor(7) as pool:
        names = [PLAIN, "given", "later"] * 2
        running = [pool.submit(complete, server, model=name, max_tokens=100) for name in names]
        time.sleep(0.05)
        done(server, "/pause?mode=keep")
        done(server, "/start_weight_update")
        done(server, "/update_weights", update_info={"path": "v2.safetensors"})
        if phase == "gathered":
            kill()
        finishing = pool.submit(done_or_lost, server, "/finish_weight_update")
        if phase == "finishing":
            time.sleep(0.02)
            kill()
        finishing.result()
        if phase == "finished":
            kill()
        wait_for(lambda: manage(server, "/resume").status_code == 200)
        for one in running:  # answered by the new weights, or elsewhere, or told to come again
            assert one.result().status_code in (200, 409, 503)
    wait_for(lambda: complete(server).status_code == 200)
    wait_for(lambda: "restarting" not in statuses(server))
    check_all((0,) if version(server) == 0 else (1, 2))
    assert wait_for(lambda: update(server, 2).status_code == 200 or forgotten(server))
    wait_for(lambda: statuses(server) == ["ready"] * 2)
    check_all((2,))
