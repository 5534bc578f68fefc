"""Options that several commands share: singly, and in groups (see `option_groups.py`).

An engine option for `run`, `chat` and `serve` is a field of `EngineOptions`, with its name in
`EngineConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from typer import Option

from quire.cli.option_groups import MODEL_HELP, ByPlace, OptionGroup
from quire.config import EngineConfig
from quire.errors import InvalidRequestError
from quire.sampling_params import SamplingParams, StructuredOutput

DEFAULT_MODEL = "smollm2"

Model = Annotated[str, Option("--model", "-m", metavar="M", help=MODEL_HELP)]
ModelByPlace = Annotated[
    str, Option("--model", "-m", metavar="M", help="Another way to name it."), ByPlace()
]
"""For commands whose one argument is the model: with `with_groups`."""
MaxTokens = Annotated[
    int, Option("--max-tokens", "-n", metavar="N", help="At most this many new tokens.")
]
Temperature = Annotated[
    float, Option(metavar="T", help="0 always takes the most likely token; higher is more varied.")
]
TopK = Annotated[int, Option(metavar="K", help="Choose among the K most likely tokens; 0: all.")]
TopP = Annotated[
    float, Option(metavar="P", help="Choose among the tokens that make up probability P.")
]
Seed = Annotated[
    int,
    Option(metavar="S", help="The same prompt and seed always give the same answer; try another."),
]
Device = Annotated[str, Option(metavar="auto|cpu|cuda[:i]", help="Where to compute.")]
Dtype = Annotated[
    str,
    Option(
        metavar="auto|float32|bfloat16|float16",
        help="Number format; auto: the fastest on the device.",
    ),
]
Quantization = Annotated[
    str,
    Option(
        metavar="auto|none|int8|int4|fp8",
        help="auto: quantised weights as they are; none: expand them; int8, int4, fp8 (GPU): quantise plain ones.",
    ),
]
KVCacheDtype = Annotated[
    str,
    Option(
        "--kv-cache-dtype",
        metavar="auto|model|int8|fp8",
        help="Keys and values; int8: on a CPU; fp8: half of bfloat16; auto: on a GPU fp8 if the checkpoint says so.",
    ),
]
Speculation = Annotated[
    str,
    Option(
        metavar="off|ngram|self|draft:M",
        help="Guess tokens and check several at once: from repetitions, 4-bit weights or model M. Same answers.",
    ),
]
TensorParallelSize = Annotated[
    int,
    Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        help="Divide the model among N GPUs (on a CPU: N processes). Same answers.",
    ),
]
Verbose = Annotated[
    bool, Option("--verbose", "-v", help="Tell what came of guesses and of the cache.")
]
System = Annotated[str | None, Option(metavar="TEXT", help="A system message for chat models.")]

_CACHE_HELP = "Memory for keys and values: 2GiB, or a fraction of what is free; default 0.25 on a CPU, 0.9 on a GPU."


@dataclass(frozen=True)
class EngineOptions(OptionGroup):
    """How the engine computes."""

    section: ClassVar[str] = "engine"
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    max_model_len: Annotated[
        int | None,
        Option(metavar="N", help="Longest sequence, prompt and answer; default: the model's own."),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(metavar="N", help="Answers computed at once; default 64 on a CPU, 256 on a GPU."),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        Option(
            metavar="N",
            help="Tokens computed in one step; default 512 on a CPU, on a GPU 16384 (serve: 8192).",
        ),
    ] = None
    kv_cache_dtype: KVCacheDtype = "auto"
    speculation: Speculation = "off"
    tensor_parallel_size: TensorParallelSize = 1
    kv_cache_memory: Annotated[str | None, Option(metavar="M", help=_CACHE_HELP)] = None
    host_cache_memory: Annotated[
        str, Option(metavar="M", help="Host memory below the prefix cache, such as 4GiB; 0: none.")
    ] = "0"
    prefix_caching: Annotated[bool, Option(help="Share the computed blocks of equal prefixes.")] = (
        True
    )
    skip_tokenizer_init: Annotated[
        bool,
        Option(
            "--skip-tokenizer-init", help="Load no tokenizer: prompts and answers are token ids."
        ),
    ] = False
    policy: Annotated[str, Option(metavar="fcfs|priority", help="Who goes first.")] = "fcfs"
    step_log: Annotated[
        Path | None, Option(metavar="FILE", help="Write every step to this file.")
    ] = None

    def keywords(self) -> dict[str, Any]:
        """For `LLM`, or `EngineConfig`."""
        found = {name: getattr(self, name) for name in self.options()} | self.others
        if self.kv_cache_memory is not None:
            found["kv_cache_memory"] = _fraction_or_bytes(self.kv_cache_memory)
        if self.step_log is not None:
            found["step_log"] = str(self.step_log.absolute())
        return found

    def check(self) -> None:
        EngineConfig.of(self.keywords())


def _fraction_or_bytes(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if number <= 1 else text


@dataclass(frozen=True)
class SamplingOptions(OptionGroup):
    """How an answer is drawn, and where it ends."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.7
    top_k: TopK = 0
    top_p: TopP = 0.95
    seed: Seed = 0
    stop: Annotated[
        list[str] | None,
        Option(metavar="TEXT", help="End an answer where it says this. Repeat for several."),
    ] = None
    json_schema: Annotated[
        Path | None,
        Option(metavar="FILE", help="Answers are JSON that fits the schema in this file."),
    ] = None

    def params(self) -> SamplingParams:
        structured = None
        if self.json_schema is not None:
            try:
                structured = StructuredOutput(
                    json_schema=self.json_schema.read_text(encoding="utf-8")
                )
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(
                    "--json-schema", f"{self.json_schema} can't be read: {error}"
                ) from None
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            structured=structured,
        )
