"""What adapters cost on a CPU: decodes of one batch without any, and over some number of them.

    python -m quire.tools.bench.engine.adapters [--shape qwen3-0.6b] [--layers 8] [--rows 32]
        [--adapters 1 8 32] [--rank 16]

A few layers of a true shape with random weights; adapters are on all of attention's and the MLP's
products. Batches take turns step by step, so that whatever else the machine does hits all of them;
a figure is the median over the turns of a step's time, by that of the step without adapters in the
same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.assemble import Engine, assemble
from quire.backends.cpu.kernels import CpuKernels
from quire.config import EngineConfig
from quire.engine import make_requests
from quire.models.decoder import Decoder
from quire.models.spec import MlpSpec, ModelSpec
from quire.sampling_params import ResolvedTokens
from quire.tools.bench.machine import report_facts
from quire.tools.bench.random_engine import random_decoder, random_prompts, requests_for
from quire.tools.bench.shapes import CONFIGS, spec_of

PROMPT = 32
_CONFIG = '{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": %d, "lora_alpha": %d}'


def write_adapter(folder: Path, decoder: Decoder, rank: int, seed: int) -> Path:
    """A PEFT folder for all products of attention and of plain MLPs."""
    source, spec, tensors = torch.Generator().manual_seed(seed), decoder.spec, {}

    def add(module: str, outputs: int, inputs: int) -> None:
        name = f"base_model.model.model.layers.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=source) * 0.02
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=source) * 0.02

    for number, layer in enumerate(spec.layers):
        assert layer.attention is not None
        assert isinstance(layer.mlp, MlpSpec)
        heads, inner = layer.attention.heads, layer.mlp.intermediate_size
        query, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        for side, width in (("q", query), ("k", kv), ("v", kv)):
            add(f"{number}.self_attn.{side}_proj", width, spec.hidden_size)
        add(f"{number}.self_attn.o_proj", spec.hidden_size, query)
        add(f"{number}.mlp.gate_proj", inner, spec.hidden_size)
        add(f"{number}.mlp.up_proj", inner, spec.hidden_size)
        add(f"{number}.mlp.down_proj", spec.hidden_size, inner)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(_CONFIG % (rank, 2 * rank))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def open_engine(decoder: Decoder, rows: int, max_loras: int) -> Engine:
    config = EngineConfig(
        device="cpu",
        dtype=str(decoder.dtype).removeprefix("torch."),
        kernels="cpu",
        max_model_len=1024,
        max_num_seqs=rows,
        kv_cache_memory="512MiB",
        max_loras=max_loras,
    )
    return assemble(decoder, config, name=decoder.spec.family)


def start(engine: Engine, rows: int, tokens: int, digests: list[str]) -> None:
    """Requests over these adapters in turn (none, if there are none), past their first token and
    the step that is recorded.
    """
    prompts = random_prompts(rows, PROMPT, seed=rows)
    made = requests_for(prompts, [tokens + 2] * rows, f"{len(digests)}", temperature=0.0)
    for number, request in enumerate(made):
        digest = digests[number % len(digests)] if digests else ""
        resolved = ResolvedTokens(adapter=digest)
        prompt, params = request.prompt_token_ids, request.params
        (adapted,) = make_requests(request.request_id, prompt, params, number, resolved=resolved)
        engine.core.add_request(adapted, 0.0)
    answered = 0
    while answered < rows:
        answered += sum(len(update.new_token_ids) for update in engine.core.step(0.0))
    engine.core.step(0.0)


def measure(spec: ModelSpec, options: argparse.Namespace, folder: Path) -> dict[int, list[float]]:
    """Seconds of each turn's step, by the number of adapters; 0 is none."""
    kernels, dtype = CpuKernels(), getattr(torch, options.dtype)
    engines: dict[int, Engine] = {}
    for count in (0, *options.adapters):
        decoder = random_decoder(spec, kernels, dtype, torch.device("cpu"))
        engine = engines[count] = open_engine(decoder, options.rows, max(1, count))
        digests = []
        for number in range(count):
            path = folder / str(number)
            if not path.exists():
                write_adapter(path, decoder, options.rank, number)
            digests.append(engine.adapters.add(str(number), path).digest)
        start(engine, options.rows, options.turns, digests)
    found: dict[int, list[float]] = {count: [] for count in engines}
    for _ in range(options.turns):
        for count, engine in engines.items():
            begin = time.perf_counter()
            engine.core.step(0.0)
            found[count].append(time.perf_counter() - begin)
    return found


def report(found: dict[int, list[float]]) -> str:
    lines = [f"none: {1000 * statistics.median(found[0]):.1f} ms a step"]
    for count, times in found.items():
        if count:
            ratio = statistics.median(own / none for own, none in zip(times, found[0], strict=True))
            median = 1000 * statistics.median(times)
            lines.append(f"{count} adapters: {median:.1f} ms a step, {ratio:.3f} of none")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="requests that decode")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    for name, value in report_facts(torch.device("cpu"), "adapters").items():
        print(f"{name}: {value}")
    spec = spec_of(options.shape)
    spec = replace(spec, layers=spec.layers[: options.layers], vocab_size=16_384)
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{options.rows} rows, rank {options.rank}, {options.layers} layers of {options.shape}"
        )
        print(report(measure(spec, options, Path(folder))))
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
