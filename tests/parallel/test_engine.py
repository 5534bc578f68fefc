"""Whole engines on two and four processes: the same answers as on one, whatever is asked for; and
how a group ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.assemble import build_engine
from quire.checkpoints.sources import resolve
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.errors import CapacityError, DeviceError, EngineError, InvalidRequestError
from quire.parallel import ranks
from quire.parallel.runner import ParallelRunner
from quire.sampling.metadata import Indices
from quire.sampling_params import StructuredOutput
from quire.step import ScheduledRequest
from tests.long_runs import IS_LONG
from tests.models.test_cache_scales import ONLY_CACHE
from tests.models.test_cache_scales import named as cache_scales

SMALL = {"device": "cpu", "kv_cache_memory": "1MiB", "max_num_seqs": 6, "max_batched_tokens": 64}
PROMPTS = ["once upon a time there was", "once upon a time there was a house", "the", "abc " * 40]


def workload(llm: LLM) -> list[Any]:
    """Everything that must not depend on the number of ranks."""
    plain = [
        SamplingParams(max_tokens=20, temperature=i % 2, seed=i, top_p=0.9, ignore_eos=True)
        for i in range(4)
    ]
    asked = [
        SamplingParams(max_tokens=8, temperature=1, seed=5, logprobs=3, prompt_logprobs=2, n=2),
        SamplingParams(
            max_tokens=30, seed=6, structured=StructuredOutput(json_schema={"type": "boolean"})
        ),
        SamplingParams(
            max_tokens=20, seed=7, structured=StructuredOutput(regex="[a-f]{12}"), logprobs=1
        ),
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.3, min_p=0.05),
    ]
    found: list[Any] = []
    for params in (plain, asked, plain):  # the third time from the cache
        outputs = llm.generate(PROMPTS, params)
        assert all(output.finish_reason != "error" for output in outputs), [
            output.error for output in outputs
        ]
        found += [
            [(one.token_ids, one.logprobs) for one in output.completions] for output in outputs
        ]
        found += [output.prompt_logprobs for output in outputs]
    found.append([(beam.token_ids, beam.score) for beam in llm.beam_search(PROMPTS[0], 3, 6).beams])
    return [*found, embeddings(llm)]


def embeddings(llm: LLM) -> list[bytes]:
    engine = llm.engine
    vectors = []
    for index, pooling in enumerate(("mean", "last")):
        params = SamplingParams(max_tokens=1)
        (request,) = make_requests(f"e{index}", [5, 6, 7, 8] * 9, params, 0, pooling=pooling)  # type: ignore[arg-type]
        engine.core.add_request(request, time.monotonic())
        while engine.core.has_work:
            vectors += [
                one.pooled for one in engine.core.step(time.monotonic()) if one.pooled is not None
            ]
    assert len(vectors) == 2
    return vectors


def children(llm: LLM) -> list[int]:
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    return [one.child.pid for one in runner._processes.processes]


def are_gone(pids: Sequence[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FP8 = {"kv_cache_dtype": "fp8"}


@pytest.fixture(scope="module")
def scaled_model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with scales for an FP8 cache."""
    folder = tmp_path_factory.mktemp("scaled")
    shutil.copytree(random_model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": ONLY_CACHE}
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | cache_scales("k_scale", "v_scale"), weights)
    return folder


@pytest.fixture(scope="module")
def expected(random_model: Path, scaled_model: Path) -> dict[Path, list[Any]]:
    found = {}
    for model, options in ((random_model, {}), (scaled_model, FP8)):
        with LLM(model, **SMALL | options) as llm:
            found[model] = workload(llm)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"host_cache_memory": "1MiB", "speculation": "ngram"}),
        (2, {"speculation": "self", "kv_cache_memory": "200KiB"}),
        (4, {"speculation": "draft:MODEL"} | FP8),
    ],
)
def test_answers_do_not_depend_on_the_number_of_ranks(
    size: int,
    options: dict[str, Any],
    random_model: Path,
    scaled_model: Path,
    expected: dict[Path, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what becomes of the group when a rank dies, or hangs."""
    monkeypatch.setattr(ranks, "STEP_SECONDS", 60.0 if "ngram" in options["speculation"] else 12.0)
    model = scaled_model if "kv_cache_dtype" in options else random_model
    options = {key: value.replace("MODEL", str(model)) for key, value in options.items()}
    threads = torch.get_num_threads()
    folders: list[Path] = []
    original = ranks.temporary_folder

    @contextlib.contextmanager
    def noted(prefix: str) -> Iterator[Path]:
        with original(prefix) as folder:
            folders.append(folder)
            yield folder

    monkeypatch.setattr(ranks, "temporary_folder", noted)
    with LLM(model, tensor_parallel_size=size, **SMALL | options) as llm:
        assert ("with the checkpoint's scales" in llm.description) == (model is scaled_model)
        pids = children(llm)
        assert len(pids) == size - 1
        assert f"rank 0 of {size}" in llm.description
        assert [folder.exists() for folder in folders] == [False]  # all have met: it is gone
        assert workload(llm) == expected[model]
        if options["speculation"] == "ngram":
            check_sleep(llm)
            check_interrupt(llm)
            check_fork(llm)
            check_end(llm, signal.SIGKILL, "is gone: killed by SIGKILL")
        elif options["speculation"] == "self":
            check_end(llm, signal.SIGSTOP, "hangs")
    assert are_gone(pids)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "name", ["model_with_states", pytest.param("kimi_model", marks=pytest.mark.slow)]
)
def test_a_model_with_states_answers_the_same_on_two_processes(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Prompts over several chunks, sampled and greedy, the second time from the cache."""
    model: Path = request.getfixturevalue(name)
    options = SMALL | {"kv_cache_memory": "8MiB"}
    params = [
        SamplingParams(max_tokens=8, temperature=i % 2, seed=i, logprobs=2, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    found = []
    for size in (1, 2):
        with LLM(model, tensor_parallel_size=size, **options) as llm:
            outputs = [output for _ in range(2) for output in llm.generate(PROMPTS, params)]
        assert [output.error for output in outputs] == [None] * len(outputs)
        found.append([(one.token_ids, one.logprobs) for o in outputs for one in o.completions])
    assert found[0] == found[1]


def check_sleep(llm: LLM) -> None:
    """All ranks sleep and wake, and the group lives on."""
    params = [SamplingParams(max_tokens=6, temperature=0)] * len(PROMPTS)
    before = [output.token_ids for output in llm.generate(PROMPTS, params)]
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(EngineError, match="asleep"):
            llm.generate(PROMPTS, params)
        llm.wake_up()
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == before
    with pytest.raises(EngineError, match="was not prepared"):
        llm.engine.update_weights({})
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == before


@pytest.mark.slow
def test_a_real_model_in_blocks_with_heads_that_do_not_come_out_even(smollm2_gguf: Path) -> None:
    """Logits too, of SmolLM2: nine query heads, three key heads, on two ranks."""
    params = [SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=6, seed=3)]
    seen: list[tuple[dict[tuple[str, int], Tensor], list[tuple[int, ...]]]] = []
    for size in (1, 2):
        logits: dict[tuple[str, int], Tensor] = {}

        def observe(
            scheduled: Sequence[ScheduledRequest],
            positions: Indices,
            rows: Tensor,
            logits: dict[tuple[str, int], Tensor] = logits,
        ) -> None:
            for entry, position, row in zip(scheduled, positions.tolist(), rows, strict=True):
                logits[entry.request_id, position] = row.clone()

        with LLM(smollm2_gguf, device="cpu", tensor_parallel_size=size, max_model_len=256) as llm:
            llm.engine.runner.observe_logits = observe
            outputs = llm.generate(["The capital of France is", "Once upon a time"], params)
        seen.append((logits, [output.token_ids for output in outputs]))
    (first, tokens), (second, others) = seen
    assert tokens == others
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def check_interrupt(llm: LLM) -> None:
    """Ctrl-C ends a call, not the group: all ranks finish the step they are in."""
    params = SamplingParams(max_tokens=12, temperature=0)
    (before,) = llm.generate(PROMPTS[0], params)
    for delay in (0.05, 0.11, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(max_tokens=900, ignore_eos=True))
        timer.join()
        (after,) = llm.generate(PROMPTS[0], params)
        assert after.error is None
        assert after.token_ids == before.token_ids


def check_fork(llm: LLM) -> None:
    """At its end a process ends its ranks; one that was forked from it has none, and leaves its
    parent's alone.
    """
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        runner._processes.close()
    (output,) = llm.generate("a", SamplingParams(max_tokens=3))
    assert output.error is None


def check_end(llm: LLM, number: signal.Signals, words: str) -> None:
    """A signal to rank 1 ends the group, and its name is said."""
    pids = children(llm)
    os.kill(pids[0], number)
    started = time.monotonic()
    (output,) = llm.generate("a", SamplingParams(max_tokens=1000))
    assert output.finish_reason == "error"
    assert f"rank 1 (process {pids[0]}) {words}" in str(output.error)
    assert time.monotonic() - started < 120
    (again,) = llm.generate("b", SamplingParams(max_tokens=3))  # nothing more, with the same words
    assert again.error == output.error
    assert llm.engine.runner.broken is not None
    assert are_gone(pids)


_KILLED = """
import sys, time
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, kv_cache_memory="1MiB")
print(*[one.child.pid for one in llm.engine.runner._processes.processes], flush=True)
if sys.argv[2] == "exits":
    sys.exit()
while True:
    llm.generate("a", SamplingParams(max_tokens=500))
"""


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("end", ["is killed", "exits"] if IS_LONG else ["is killed"])
def test_nothing_is_left_behind_when_rank_0_ends(end: str, random_model: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(random_model), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1
        if end == "is killed":
            process.kill()
        process.wait(60)
    deadline = time.monotonic() + 120
    while not are_gone(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert are_gone(pids)


@pytest.mark.slow
def test_what_a_rank_can_not_do_is_said(random_model: Path) -> None:
    """Errors of users come as what they are, and from rank 0, though other ranks found them, too."""
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match="only 4 query heads"):
        LLM(random_model, device="cpu", tensor_parallel_size=800)
    assert time.monotonic() - started < 60  # before 800 processes are started
    with pytest.raises(CapacityError, match="does not fit"):
        LLM(
            random_model,
            device="cpu",
            tensor_parallel_size=2,
            kv_cache_memory="1KiB",
            max_model_len=1024,
        )
    with pytest.raises(InvalidRequestError, match="tensor_parallel_size"):
        EngineConfig(tensor_parallel_size=0)
    with pytest.raises(DeviceError, match="0 GPUs"):
        ranks.rank_device("cuda", 0, 2)


@pytest.mark.slow
def test_a_rank_that_fails_while_loading_is_named(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not there, for the other ranks only."""
    source = resolve(str(random_model))
    original = ranks.Task

    def elsewhere(rank: int, source: Any, *rest: Any) -> ranks.Task:
        return original(
            rank, type(source)(source.name, source.kind, source.path / "gone", source.origin), *rest
        )

    monkeypatch.setattr(ranks, "Task", elsewhere)
    with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) failed: .*gone"):
        build_engine(source, EngineConfig(tensor_parallel_size=2, **SMALL))  # type: ignore[arg-type]
