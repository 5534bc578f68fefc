"""The Python API's borders: other threads, other processes, other types. Whatever comes, the engine
stays whole.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError, SamplingParams
from quire.errors import EngineError, InvalidRequestError
from tests.frontend.templates import QWEN
from tests.server.random_model import write_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "dtype": "float32", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_model(made, QWEN)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """Afterwards it answers as before, and all its blocks are free."""
    before = loaded.generate("ab", GREEDY)[0].token_ids
    yield loaded
    assert loaded.generate("ab", GREEDY)[0].token_ids == before
    while loaded.has_work:
        loaded.step()
    assert loaded.engine.core.scheduler.blocks.pool.num_free == loaded.engine.plan.num_blocks - 1
    assert not loaded._live
    assert not loaded._owners


# Threads


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Their results, or what they raised, when all have begun at the same moment."""
    results: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(place: int, call: Callable[[], Any]) -> None:
        gate.wait()
        try:
            results[place] = call()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return results


def test_calls_from_several_threads_get_their_own_answers(llm: LLM) -> None:
    texts = ["one", "two of them", "and three"]
    ids = [llm.generate(text, LONG)[0].token_ids for text in texts]
    words = "".join(llm.stream("four", LONG))
    beams = llm.beam_search("five", 3, 5)
    calls: list[Callable[[], Any]] = [
        lambda text=text: llm.generate([text, text], LONG) for text in texts
    ]  # type: ignore[misc]
    calls += [lambda: "".join(llm.stream("four", LONG))] * 2
    calls += [lambda: llm.beam_search("five", 3, 5)]
    for _ in range(3):
        found = together(*calls)
        assert [[one.token_ids for one in outputs] for outputs in found[:3]] == [
            [one, one] for one in ids
        ]
        assert found[3:5] == [words, words]
        assert [beam.token_ids for beam in found[5].beams] == [
            beam.token_ids for beam in beams.beams
        ]


def test_a_stream_that_is_dropped_in_another_thread(llm: LLM) -> None:
    def drop() -> None:
        stream = llm.stream("x", LONG)
        next(stream)
        del stream
        gc.collect()

    found = together(
        lambda: llm.generate("one", LONG), drop, drop, lambda: llm.abort("nothing of this name")
    )
    assert not any(isinstance(one, Exception) for one in found), found


def test_closing_in_another_thread(folder: Path) -> None:
    llm = LLM(folder, **OPTIONS)
    found = together(
        lambda: llm.generate("one", LONG), llm.close, lambda: llm.generate("two", LONG)
    )
    for one in (found[0], found[2]):
        assert isinstance(one, list) or "was closed" in str(one)


# Processes


def in_fork(work: Callable[[], str]) -> str:
    """What `work` says in a forked child; the child has some seconds for it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    ended = threading.Timer(30, os.kill, (child, 9))
    ended.start()
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(child, 0)
    ended.cancel()
    return said


def error_in(work: Callable[[], Any]) -> str:
    try:
        work()
    except EngineError as error:
        return str(error)
    return "nothing"


def test_a_forked_child_hears_at_once_that_it_can_not(llm: LLM) -> None:
    stream = llm.stream("x", LONG)
    next(stream)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("ab"),
        lambda: llm.chat([{"role": "user", "content": "ab"}]),
        lambda: llm.stream("ab"),
        lambda: llm.beam_search("ab", 2, 2),
        lambda: llm.add_request("ab"),
        llm.step,
        lambda: next(stream),
        lambda: llm.abort("x"),
        lambda: llm.encode_chat([{"role": "user", "content": "ab"}]),
    ]
    with llm._turn:  # held by a thread that the child has not got
        for number, call in enumerate(calls):
            said = in_fork(lambda call=call: error_in(call))  # type: ignore[misc]
            assert "made in another process" in said, number
            assert "spawn" in said
        assert in_fork(lambda: str(llm.close())) == "None"
    stream.close()  # type: ignore[attr-defined]


def answer(folder: Path, answers: Any) -> None:
    with LLM(folder, **OPTIONS) as llm:
        answers.put(llm.generate("ab", GREEDY)[0].token_ids)


@pytest.mark.slow
def test_a_spawned_child_makes_its_own(llm: LLM, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=answer, args=(folder, answers))
    child.start()
    assert answers.get(timeout=120) == llm.generate("ab", GREEDY)[0].token_ids
    child.join()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_not_to_be_copied(llm: LLM, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(QuireError, match="make one there"):
        copied(llm)


# Types

NO_PROMPTS: list[Any] = [
    None,
    b"abc",
    bytearray(b"abc"),
    memoryview(b"abc"),
    {"prompt": "a"},
    {1, 2},
    5,
    1.5,
    True,
]
NO_PARAMS: list[Any] = [
    5,
    "greedy",
    {"temperature": 0},
    SamplingParams,
    b"x",
    GREEDY.__class__.__name__,
]
Call = Callable[[LLM, Any], Any]
TYPES: list[tuple[str, str, Call, list[Any]]] = [
    ("generate", "prompts", lambda llm, value: llm.generate(value), [*NO_PROMPTS, iter(["a"])]),
    ("generate several", "prompt", lambda llm, value: llm.generate(["a", value]), NO_PROMPTS),
    ("stream", "prompt", lambda llm, value: llm.stream(value), NO_PROMPTS),
    ("add_request", "prompt", lambda llm, value: llm.add_request(value), NO_PROMPTS),
    ("beam_search", "prompt", lambda llm, value: llm.beam_search(value, 2, 2), NO_PROMPTS),
    (
        "chat",
        "messages",
        lambda llm, value: llm.chat(value),
        [*NO_PROMPTS, "hi", [], ["hi"], [[]], [None], [5]],
    ),
    (
        "stream_chat",
        "messages",
        lambda llm, value: llm.stream_chat(value),
        [*NO_PROMPTS, "hi", [], ["hi"], [None]],
    ),
    ("params", "params", lambda llm, value: llm.generate("a", value), NO_PARAMS),
    (
        "params of each",
        "params",
        lambda llm, value: llm.generate(["a", "b"], [GREEDY, value]),
        NO_PARAMS,
    ),
    (
        "a stream's params",
        "params",
        lambda llm, value: llm.stream("a", value),
        [*NO_PARAMS, [GREEDY]],
    ),
    (
        "a request's params",
        "params",
        lambda llm, value: llm.add_request("a", value),
        [*NO_PARAMS, [GREEDY]],
    ),
    (
        "request_id",
        "request_id",
        lambda llm, value: llm.add_request("a", GREEDY, value),
        [5, b"x", "", ["x"]],
    ),
    ("abort", "request_id", lambda llm, value: llm.abort(value), [None, 5, ["x"]]),
    (
        "tools",
        "tools",
        lambda llm, value: llm.chat([{"role": "user", "content": "a"}], tools=value),
        [5, "x", b"x"],
    ),
    (
        "beam_width",
        "beam_width",
        lambda llm, value: llm.beam_search("a", value, 2),
        [None, "2", 1.5],
    ),
    (
        "max_tokens",
        "max_tokens",
        lambda llm, value: llm.beam_search("a", 2, value),
        [None, "2", 1.5],
    ),
    (
        "stop_token_ids",
        "stop",
        lambda llm, value: llm.beam_search("a", 2, 2, stop_token_ids=value),
        [None, 5, "ab"],
    ),
    ("model", "model", lambda llm, value: LLM(value), [None, b"x", 5, ["smollm2"]]),
]
CASES = [
    # no addresses: workers must agree on names
    pytest.param(field, call, value, id=f"{name}-{value!r:.10}")
    for name, field, call, values in TYPES
    for value in values
]


@pytest.mark.parametrize(("field", "call", "value"), CASES)
def test_what_is_of_the_wrong_type_is_named(
    loaded: LLM, field: str, call: Call, value: Any
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}"):
        call(loaded, value)
    assert not loaded._live


def test_after_all_that(llm: LLM) -> None:
    """The fixture looks whether it is whole."""
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate(range(3, 9), GREEDY)) == 1


# Priorities


def test_a_priority_is_refused_where_nobody_would_look_at_it(llm: LLM) -> None:
    with pytest.raises(
        InvalidRequestError,
        match='priority: counts only in an LLM made with policy="priority" or "fair"',
    ):
        llm.generate("ab", SamplingParams(max_tokens=1, priority=1))


def test_under_policy_priority_lower_numbers_go_first(folder: Path) -> None:
    with LLM(folder, **OPTIONS | {"max_num_seqs": 1}, policy="priority") as llm:
        for priority in (2, 0, 1, 0):
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, priority=priority)
            llm.add_request("ab", params)
        ended: list[str] = []
        while llm.has_work:
            ended += [delta.request_id for delta in llm.step() if delta.finish_reason is not None]
    assert ended == ["request-2", "request-4", "request-3", "request-1"]
