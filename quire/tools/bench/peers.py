"""Other engines that run the same jobs. All are optional: what is missing says how to install it.

Each is measured in a process of its own (`engine_process`), which may belong to another virtual
environment. So this module and those it imports need nothing but Python until a peer is opened: its
memory is then its own.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from quire.errors import InvalidRequestError, QuireError
from quire.tools.bench.http_client import HttpClient, HttpError
from quire.tools.bench.jobs import Job

Answers = list[tuple[int, ...]] | int
"""Every job's new tokens, or just how many there were if an engine keeps them to itself."""


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """What a peer needs to know to run the same model in the same way."""

    model: str
    """As the user calls it."""
    path: str
    """The folder or `.gguf` file it was found at."""
    device: str
    dtype: str
    threads: int
    batch_size: int
    """How many requests it gets at once, if it can't tell itself."""
    max_model_len: int
    url: str | None = None

    @property
    def gguf(self) -> str:
        """The file, for peers that read nothing else."""
        if not self.path.endswith(".gguf"):
            raise InvalidRequestError(
                "--model", f"this peer reads .gguf files only, and {self.model} is none"
            )
        return self.path


class Peer(Protocol):
    """An engine that is not ours."""

    @property
    def name(self) -> str:
        """With whatever a reader must know to judge the comparison."""

    def run(self, jobs: Sequence[Job]) -> Answers:
        """Answers all jobs, greedily."""


def check_peer(kind: str, url: str | None) -> None:
    """Raises InvalidRequestError for a peer that can't be opened so."""
    if kind not in _PEERS:
        raise InvalidRequestError("--peer", f"must be one of {', '.join(_PEERS)}, not {kind!r}")
    if (url is None) == (kind == "openai-url"):
        raise InvalidRequestError(
            "--url", "goes with --peer openai-url, and that needs one: http://localhost:8000/v1"
        )


def open_peer(kind: str, setting: PeerSetting) -> Peer:
    """The peer called `kind`, with the model loaded."""
    check_peer(kind, setting.url)
    return _PEERS[kind](setting)


class Transformers:
    """Hugging Face transformers: left-padded batches, each until its longest request is done."""

    def __init__(self, setting: PeerSetting) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")  # its bars would run into ours
        transformers = _import("transformers", "transformers", "transformers accelerate")
        self._torch = _import("transformers", "torch", "torch")
        self._torch.set_num_threads(setting.threads)
        path = Path(setting.path)
        place = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if place else path
        dtype = getattr(self._torch, setting.dtype)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, **place
        )
        loaded.generation_config.eos_token_id = None  # end tokens are tokens like all others here
        self._model = loaded.eval().to(setting.device)
        self._device = setting.device
        self.batch_size = setting.batch_size
        self.name = (
            f"transformers {transformers.__version__}, padded batches of {setting.batch_size}"
        )

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        return [
            answer for some in _batches(jobs, self.batch_size) for answer in self._run_batch(some)
        ]

    def _run_batch(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        ids, mask = _padded(jobs)
        with self._torch.inference_mode():
            output = self._model.generate(
                self._torch.tensor(ids, device=self._device),
                attention_mask=self._torch.tensor(mask, device=self._device),
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=0,
            )
        new = output[:, len(ids[0]) :].tolist()
        return [tuple(tokens[: job.max_tokens]) for tokens, job in zip(new, jobs, strict=True)]


class LlamaCpp:
    """llama.cpp through llama-cpp-python: one request at a time, on the file's own quantised
    weights.
    """

    def __init__(self, setting: PeerSetting) -> None:
        llama_cpp = _import("llama-cpp", "llama_cpp", "llama-cpp-python")
        self._model = llama_cpp.Llama(
            setting.gguf,
            n_ctx=setting.max_model_len,
            n_threads=setting.threads,
            n_threads_batch=setting.threads,  # it would take all cores for prompts
            n_gpu_layers=0 if setting.device == "cpu" else -1,
            verbose=False,
        )
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), one by one, weights as in the file"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        answers = []
        for job in jobs:
            # What the prompt has in common with the last one it keeps by itself.
            tokens = self._model.generate(list(job.token_ids), temp=0.0, repeat_penalty=1.0)
            answers.append(tuple(islice(tokens, job.max_tokens)))
        return answers


class OpenVino:
    """OpenVINO GenAI on the weights of a GGUF file: continuous batching of all jobs with prefixes
    kept; where its paged attention has no kernel for the CPU (ARM without SVE), padded batches.
    """

    def __init__(self, setting: PeerSetting) -> None:
        self._genai = genai = _import("openvino", "openvino_genai", "openvino-genai")
        self._openvino, self._numpy = (
            _import("openvino", name, "openvino-genai") for name in ("openvino", "numpy")
        )
        if setting.device != "cpu":
            raise InvalidRequestError(
                "--device", "the peer openvino computes on CPUs: use --device cpu"
            )
        self._batch_size = setting.batch_size
        properties: dict[str, int | str] = {"INFERENCE_NUM_THREADS": setting.threads}
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        self.name = f"OpenVINO GenAI {genai.__version__}, from the GGUF file"
        self._pads = _is_arm_without_sve()
        if self._pads:
            properties |= {"ATTENTION_BACKEND": "SDPA", "INFERENCE_PRECISION_HINT": "f32"}
            self._pipeline = genai.LLMPipeline(setting.gguf, "CPU", **properties)
            self.name += (
                f", float32, without paged attention: padded batches of {setting.batch_size}"
            )
        else:
            self._pipeline = genai.ContinuousBatchingPipeline(
                setting.gguf, scheduler, "CPU", properties
            )
            self.name += ", all at once"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        if self._pads:
            return [
                answer
                for some in _batches(jobs, self._batch_size)
                for answer in self._run_padded(some)
            ]
        prompts = [self._tensor([job.token_ids]) for job in jobs]
        results = self._pipeline.generate(prompts, [self._config(job.max_tokens) for job in jobs])
        return [tuple(result.m_generation_ids[0]) for result in results]

    def _run_padded(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        ids, mask = _padded(jobs)
        inputs = self._genai.TokenizedInputs(self._tensor(ids), self._tensor(mask))
        found = self._pipeline.generate(
            inputs, self._config(max(job.max_tokens for job in jobs))
        ).tokens
        return [tuple(tokens[: job.max_tokens]) for tokens, job in zip(found, jobs, strict=True)]

    def _tensor(self, values: Sequence[Sequence[int]]) -> Any:
        return self._openvino.Tensor(self._numpy.array(values, dtype="int64"))

    def _config(self, max_tokens: int) -> Any:
        return self._genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )


class Vllm:
    """vLLM's offline API: all jobs at once."""

    def __init__(self, setting: PeerSetting) -> None:
        vllm = _import("vllm", "vllm", "vllm")
        self._vllm = vllm
        # Not the nine tenths of the GPU it would take by itself: Quire is to fit beside it.
        share = {"gpu_memory_utilization": 0.45}
        self._llm = vllm.LLM(
            setting.path, dtype=setting.dtype, max_model_len=setting.max_model_len, **share
        )
        self.name = f"vLLM {vllm.__version__}, all at once"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        params = [
            self._vllm.SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": list(job.token_ids)} for job in jobs]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]


class OpenAiUrl:
    """Any server with OpenAI's completions over HTTP: `batch_size` requests at once, prompts as
    token ids.

    Its answers may end early, since OpenAI's API can't ask otherwise; so tokens are counted as the
    server reports them.
    """

    def __init__(self, setting: PeerSetting) -> None:
        assert setting.url is not None
        self._url = setting.url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                "--url", f"must begin with http:// or https://, not {setting.url!r}"
            )
        self._model = setting.model
        self._batch_size = setting.batch_size
        self.name = f"{setting.url}, {setting.batch_size} at once"

    def run(self, jobs: Sequence[Job]) -> int:
        try:
            return asyncio.run(self._complete(jobs))
        except HttpError as error:
            if error.status is None:
                raise QuireError(
                    f"{self._url}/completions can't be reached: {error}. Is the server running?"
                ) from None
            hint = " (does --url end with /v1?)" if error.status == 404 else ""
            raise QuireError(
                f"{self._url}/completions answered {error.status}: {error}{hint}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise QuireError(
                f"{self._url} did not answer as OpenAI's completions do: {error!r}"
            ) from None

    async def _complete(self, jobs: Sequence[Job]) -> int:
        slots = asyncio.Semaphore(self._batch_size)
        async with HttpClient(self._url, os.environ.get("OPENAI_API_KEY")) as client:

            async def complete(job: Job) -> int:
                body = {
                    "model": self._model,
                    "prompt": job.prompt,
                    "max_tokens": job.max_tokens,
                    "temperature": 0,
                }
                async with slots:
                    return int(
                        (await client.post_json("/completions", body))["usage"]["completion_tokens"]
                    )

            return sum(await asyncio.gather(*map(complete, jobs)))


def _is_arm_without_sve() -> bool:
    if platform.machine() not in ("aarch64", "arm64"):
        return False
    features = Path("/proc/cpuinfo")
    return not features.exists() or " sve" not in features.read_text()


def _batches(jobs: Sequence[Job], size: int) -> Iterator[Sequence[Job]]:
    return (jobs[start : start + size] for start in range(0, len(jobs), size))


def _padded(jobs: Sequence[Job]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of one length, filled up on the left, and masks with 1 where a token is real."""
    width = max(len(job.prompt) for job in jobs)
    gaps = [width - len(job.prompt) for job in jobs]
    ids = [[0] * gap + list(job.token_ids) for gap, job in zip(gaps, jobs, strict=True)]
    return ids, [[0] * gap + [1] * (width - gap) for gap in gaps]


def _import(peer: str, module: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise QuireError(f"the peer {peer} is not installed here: pip install {packages}") from None


_PEERS: dict[str, Callable[[PeerSetting], Peer]] = {
    "transformers": Transformers,
    "llama-cpp": LlamaCpp,
    "openvino": OpenVino,
    "vllm": Vllm,
    "openai-url": OpenAiUrl,
}
