"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from typer import Option

DEFAULT_MODEL = "smollm2"

Model = Annotated[
    str,
    Option(
        "--model", "-m", metavar="M", help="An alias (smollm2), a folder, a .gguf file or a Hugging Face id (org/name)."
    ),
]
MaxTokens = Annotated[int, Option("--max-tokens", "-n", metavar="N", help="At most this many new tokens.")]
Temperature = Annotated[float, Option(metavar="T", help="0 always takes the most likely token; higher is more varied.")]
TopK = Annotated[int, Option(metavar="K", help="Choose among the K most likely tokens; 0: all.")]
TopP = Annotated[float, Option(metavar="P", help="Choose among the tokens that make up probability P.")]
Seed = Annotated[int, Option(metavar="S", help="The same prompt and seed always give the same answer; try another.")]
Device = Annotated[str, Option(metavar="auto|cpu|cuda[:i]", help="Where to compute.")]
Dtype = Annotated[
    str, Option(metavar="auto|float32|bfloat16|float16", help="Number format; auto: the fastest on the device.")
]
Quantization = Annotated[
    str,
    Option(
        metavar="auto|none|int8|int4",
        help="auto: quantised weights as they are; none: expand them; int8, int4: quantise plain ones while loading.",
    ),
]
KVCacheDtype = Annotated[
    str,
    Option("--kv-cache-dtype", metavar="auto|int8", help="Keys and values; int8: a quarter of the memory, on a CPU."),
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
System = Annotated[str | None, Option(metavar="TEXT", help="A system message for chat models.")]
