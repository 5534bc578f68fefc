"""Other engines that run the same jobs. All are optional: what is missing says how to install it."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from quire.bench.http_client import HttpClient, HttpError
from quire.bench.jobs import Job
from quire.errors import InvalidRequestError, QuireError
from quire.models.sources import resolve

Answers = list[tuple[int, ...]] | int
"""Every job's new tokens, or just how many there were if an engine keeps them to itself."""


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """What a peer needs to know to run the same model in the same way."""

    model: str
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    max_model_len: int
    url: str | None = None


class Peer(Protocol):
    """An engine that is not ours."""

    @property
    def name(self) -> str:
        """With whatever a reader must know to judge the comparison."""

    def run(self, jobs: Sequence[Job]) -> Answers:
        """Answers all jobs, greedily."""


def open_peer(kind: str, setting: PeerSetting) -> Peer:
    """The peer called `kind`, with the model loaded."""
    makers: dict[str, Callable[[PeerSetting], Peer]] = {
        "transformers": Transformers,
        "llama-cpp": LlamaCpp,
        "vllm": Vllm,
        "openai-url": OpenAiUrl,
    }
    if kind not in makers:
        raise InvalidRequestError("--peer", f"must be one of {', '.join(makers)}, not {kind!r}")
    if (setting.url is None) == (kind == "openai-url"):
        raise InvalidRequestError("--url", "goes with --peer openai-url, and that needs one: http://localhost:8000/v1")
    return makers[kind](setting)


class Transformers:
    """Hugging Face transformers: left-padded batches, each until its longest request is done."""

    def __init__(self, setting: PeerSetting) -> None:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")  # its bars would run into ours
        transformers = _import("transformers", "transformers", "transformers accelerate")
        path = resolve(setting.model).path
        place = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if place else path
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=setting.dtype, **place)
        self._model = loaded.eval().to(setting.device)
        self._device = setting.device
        self.batch_size = setting.batch_size
        self.name = f"transformers {transformers.__version__}, padded batches of {setting.batch_size}"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        answers: list[tuple[int, ...]] = []
        for start in range(0, len(jobs), self.batch_size):
            answers += self._run_batch(jobs[start : start + self.batch_size])
        return answers

    def _run_batch(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        width, longest = max(len(job.prompt) for job in jobs), max(job.max_tokens for job in jobs)
        padding = [width - len(job.prompt) for job in jobs]
        ids = [[0] * gap + list(job.token_ids) for gap, job in zip(padding, jobs, strict=True)]
        mask = [[0] * gap + [1] * (width - gap) for gap in padding]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        new = output[:, width:].tolist()
        return [tuple(tokens[: job.max_tokens]) for tokens, job in zip(new, jobs, strict=True)]


class LlamaCpp:
    """llama.cpp through llama-cpp-python: one request at a time, on the file's own quantised weights."""

    def __init__(self, setting: PeerSetting) -> None:
        llama_cpp = _import("llama-cpp", "llama_cpp", "llama-cpp-python")
        source = resolve(setting.model)
        if source.path.suffix != ".gguf":
            raise InvalidRequestError("--model", f"llama.cpp reads .gguf files only, and {source.name} is none")
        layers = -1 if setting.device.type == "cuda" else 0
        threads = torch.get_num_threads()  # for prompts, too: it would take all cores for those
        self._model = llama_cpp.Llama(
            str(source.path),
            n_ctx=setting.max_model_len,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=layers,
            verbose=False,
        )
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), one by one, weights as in the file"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        answers = []
        for job in jobs:
            self._model.reset()
            tokens = self._model.generate(list(job.token_ids), temp=0.0, repeat_penalty=1.0)
            answers.append(tuple(islice(tokens, job.max_tokens)))
        return answers


class Vllm:
    """vLLM's offline API: all jobs at once."""

    def __init__(self, setting: PeerSetting) -> None:
        vllm = _import("vllm", "vllm", "vllm")
        self._vllm = vllm
        dtype = str(setting.dtype).removeprefix("torch.")
        path = str(resolve(setting.model).path)
        # Not the nine tenths of the GPU it would take by itself: Quire is to fit beside it.
        self._llm = vllm.LLM(model=path, dtype=dtype, max_model_len=setting.max_model_len, gpu_memory_utilization=0.45)
        self.name = f"vLLM {vllm.__version__}, all at once"

    def run(self, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
        params = [self._vllm.SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True) for job in jobs]
        prompts = [{"prompt_token_ids": list(job.token_ids)} for job in jobs]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]


class OpenAiUrl:
    """Any server with OpenAI's completions over HTTP: `batch_size` requests at once, prompts as token ids.

    Its answers may end early, since OpenAI's API can't ask otherwise; so tokens are counted as the server reports them.
    """

    def __init__(self, setting: PeerSetting) -> None:
        assert setting.url is not None
        self._url = setting.url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise InvalidRequestError("--url", f"must begin with http:// or https://, not {setting.url!r}")
        self._model = setting.model
        self._batch_size = setting.batch_size
        self.name = f"{setting.url}, {setting.batch_size} at once"

    def run(self, jobs: Sequence[Job]) -> int:
        try:
            return asyncio.run(self._complete(jobs))
        except HttpError as error:
            if error.status is None:
                raise QuireError(f"{self._url}/completions can't be reached: {error}. Is the server running?") from None
            hint = " (does --url end with /v1?)" if error.status == 404 else ""
            raise QuireError(f"{self._url}/completions answered {error.status}: {error}{hint}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise QuireError(f"{self._url} did not answer as OpenAI's completions do: {error!r}") from None

    async def _complete(self, jobs: Sequence[Job]) -> int:
        slots = asyncio.Semaphore(self._batch_size)
        async with HttpClient(self._url, os.environ.get("OPENAI_API_KEY")) as client:

            async def complete(job: Job) -> int:
                body = {"model": self._model, "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0}
                async with slots:
                    return int((await client.post_json("/completions", body))["usage"]["completion_tokens"])

            return sum(await asyncio.gather(*map(complete, jobs)))


def _import(peer: str, module: str, packages: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise QuireError(f"the peer {peer} is not installed here: pip install {packages}") from None
