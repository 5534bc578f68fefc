"""Full collections wait for a good moment, and come."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.assemble import assemble
from quire.cli.main import main
from quire.config import EngineConfig
from quire.kernels.reference import ReferenceKernels
from quire.process.gc_pauses import IdleCollector, full_collections_put_off, no_collections
from quire.server.link import engine_process
from quire.server.link.channel import BlockingChannel
from quire.server.link.engine_process import EngineLoop
from tests.engine.harness import Harness, config
from tests.random_models import SPECS, random_decoder


class Cycle:
    """Garbage that only the collector can find."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        type(self).alive += 1

    def __del__(self) -> None:
        type(self).alive -= 1


@pytest.fixture(autouse=True, scope="module")
def frozen_again() -> Iterator[None]:
    """Leaves the collector as conftest.py has it for all others."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collections of every kind come often, and see only what a test makes."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(100, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def full_collections_in(work: Callable[[], None]) -> int:
    found = 0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal found
        found += phase == "start" and info["generation"] == 2

    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return found


@pytest.mark.usefixtures("eager_collector")
def test_a_program_that_starts_collects_nothing() -> None:
    before, frozen = gc.get_stats(), gc.get_freeze_count()
    with no_collections():
        kept = [[i] for i in range(10_000)]
        assert gc.get_stats() == before
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)
    Cycle()
    alive = Cycle.alive
    gc.collect()
    assert Cycle.alive == alive - 1


@pytest.mark.usefixtures("eager_collector")
def test_a_busy_engine_is_not_held_up_by_full_collections() -> None:
    def collections_beside(policy: AbstractContextManager[None]) -> int:
        harness = Harness(
            config(num_blocks=513, max_num_seqs=16, max_model_len=128, max_batched_tokens=256)
        )
        for i in range(16):
            harness.add(f"r{i}", [1 + i, 2, 3], max_tokens=100)
        with policy:
            return full_collections_in(harness.run)

    if sys.version_info < (3, 14):  # later ones make none by themselves
        assert collections_beside(nullcontext()) > 0
    assert collections_beside(full_collections_put_off()) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("eager_collector")
def test_garbage_goes_though_the_engine_is_entered_again_and_again() -> None:
    """Freezing on the way in, as was done once, began the counting anew every time: nothing was
    ever collected.
    """
    before = Cycle.alive
    recent: deque[Cycle] = deque(maxlen=200)  # long enough to grow old
    for _ in range(20_000):
        recent.append(Cycle())
        with full_collections_put_off():
            pass
    assert Cycle.alive - before < 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("eager_collector")
def test_garbage_goes_under_a_load_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.process.gc_pauses._PUT_OFF", 20)
    before = Cycle.alive
    recent: deque[Cycle] = deque(maxlen=200)
    with full_collections_put_off():
        for _ in range(20_000):
            recent.append(Cycle())
    assert Cycle.alive - before < 10_000


def test_the_collector_is_left_as_it_was() -> None:
    usual = gc.get_threshold()
    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), full_collections_put_off(), full_collections_put_off():
        raise KeyError
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == frozen
    gc.set_threshold(0, 7, 10**6)
    try:
        with full_collections_put_off():
            assert gc.get_threshold() == (0, 7, 10**6)  # off stays off, and rarer stays rarer
    finally:
        gc.set_threshold(*usual)


@pytest.mark.slow
def test_requests_leave_nothing_for_the_collector(smollm2_gguf: Path) -> None:
    """What a step leaves (once its tensors) may get old, and then lies about until the next full
    collection.
    """
    with LLM(smollm2_gguf, kv_cache_memory="64MiB", max_model_len=128) as llm:

        def work() -> None:
            scored = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1)
            llm.generate(
                ["a b c", "b"],
                [scored, SamplingParams(max_tokens=4, n=2, top_p=0.9)],
                progress=False,
            )
            next(llm.stream("and", SamplingParams(max_tokens=4, temperature=0)))
            llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4, stop=["x"]))
            llm.generate("x", SamplingParams(max_tokens=4, structured={"regex": "[a-z]+"}))  # type: ignore[arg-type]

        work()  # whatever is made once
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            work()
            gc.collect()
            left = [type(item).__qualname__ for item in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left == []


@pytest.mark.slow
def test_importing_waits_for_no_full_collection() -> None:
    code = (
        "import gc; found = []; gc.callbacks.append(lambda phase, info: found.append(info['generation']))\n"
        "from quire import LLM; print(found.count(2), len(found) > 10)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "True"]


def test_a_command_puts_full_collections_off_from_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr("quire.cli.main.app", lambda **_: found.append(gc.get_threshold()))
    main()
    assert found[0][2] > 100 * gc.get_threshold()[2]


def test_an_idle_engine_process_collects_garbage_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collector = IdleCollector(now=100.0)
    assert not collector.is_due(159.0)
    assert collector.is_due(160.0)
    collector.collect(160.0)
    assert not collector.is_due(219.0)

    decoder = random_decoder(SPECS["llama"], ReferenceKernels(), torch.float32)
    engine = assemble(
        decoder, EngineConfig(device="cpu", kv_cache_memory="1MiB", max_model_len=64), name="test"
    )
    monkeypatch.setattr("quire.process.gc_pauses._INTERVAL", 0.0)
    monkeypatch.setattr(engine_process, "_SILENCE", 1)
    collected = threading.Event()
    ours, theirs = socket.socketpair()
    with theirs:
        loop = EngineLoop(BlockingChannel(theirs))
        garbage = Cycle()
        weakref.finalize(garbage, collected.set)
        gc.disable()  # so that it is the loop that collects
        try:
            del garbage
            thread = threading.Thread(target=loop.run, args=(engine,))
            thread.start()
            assert collected.wait(60)
        finally:
            gc.enable()
            ours.close()
            thread.join(60)
        assert not thread.is_alive()
