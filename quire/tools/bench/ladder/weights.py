"""Rung 7 in isolation: weights in different formats, their memory, speed and quality, and what each
rounds away.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.tools.bench.jobs import Lengths, random_jobs
from quire.tools.bench.ladder.engines import LadderEngines
from quire.tools.bench.ladder.settings import ClimbSettings
from quire.tools.bench.offline import run_together, time_to_first_token, token_source
from quire.tools.bench.quality import (
    OWN_TEXT,
    open_weights,
    perplexity,
    read_text,
    score,
    weight_formats,
    windows_of,
)
from quire.tools.bench.report import EMPTY, Bytes, Number, Row, Table
from quire.tools.bench.spread import Spread
from quire.tools.ladder.quantized import BLOCK, absmax, to_q4_0


def compare_weights(engines: LadderEngines, settings: ClimbSettings) -> Table:
    """One request's speed with each format the model can run in, and how well each predicts a text."""
    with ExitStack() as opened:
        full = opened.enter_context(_open(engines, engines.dtype_name))
        llms = {engines.dtype_name: full}
        for form in _other_forms(engines, full):
            llms[form] = opened.enter_context(_open(engines, form))
        runs = _run_in_turn(llms, settings)
        windows = windows_of(read_text(OWN_TEXT), full.engine.tokenizer, engines.max_model_len)
        windows = windows[: settings.quality_windows]
        rows: list[Row] = []
        for form, llm in llms.items():
            decoder = llm.engine.decoder
            scores = score(full.engine.decoder, decoder, windows)
            distance = [
                Number(scores.divergence.mean().item()),
                Number(100 * scores.same_top.mean().item(), "%"),
            ]
            rows.append(
                (
                    _name(form, llm),
                    Bytes(decoder.nbytes),
                    Number(8 * decoder.nbytes / decoder.spec.num_parameters),
                    Spread.of(
                        (settings.weights_prompt / time_to_first_token(run) for run in runs[form]),
                        "tok/s",
                    ),
                    Spread.of(map(_decode_rate, runs[form]), "tok/s"),
                    Number(perplexity(scores.model)),
                    *([EMPTY] * 2 if llm is full else distance),
                )
            )
    columns = (
        "weights",
        "size",
        "bits per weight",
        "prompt",
        "answer",
        "perplexity",
        "mean KL",
        "same top token",
    )
    note = (
        f"One request of {settings.weights_prompt} prompt tokens and {settings.weights_new_tokens} new ones, "
        f"{settings.repeats} repeats in turn. Perplexity of {scores.num_tokens} tokens of a text of our own, the lower "
        "the better; KL is the divergence of the next token's distribution from that of the first line, in nats, and "
        "the same top token how often both think the same one likeliest."
    )
    return Table("Weights in other formats", note, columns, tuple(rows))


def compare_rounding() -> Table:
    """What formats lose of made-up numbers, with and without a few that are far larger than the
    rest.
    """
    generator = torch.Generator().manual_seed(0)
    plain, x = (
        torch.randn(256, 1024, generator=generator),
        torch.randn(64, 1024, generator=generator),
    )
    outliers = torch.where(torch.rand(plain.shape, generator=generator) < 0.002, 20 * plain, plain)
    rows: list[Row] = []
    for name, (bits, rounded) in _ROUNDINGS.items():
        exact, product = outliers @ x.T, rounded(outliers)
        weights = [Number(_error(rounded(numbers), numbers), "%") for numbers in (plain, outliers)]
        inputs = (x, _in_blocks(x, 127))
        rows.append(
            (
                name,
                Number(bits),
                *weights,
                *(Number(_error(product @ i.T, exact), "%") for i in inputs),
            )
        )
    note = (
        "The root of the mean squared error over that of the numbers, in percent: of 256 rows of 1,024 normal numbers, "
        "of the same with one in 500 twenty times as large, and of the latter's products with rows of normal numbers, "
        "in full and in 8 bits (blocks of 32)."
    )
    columns = (
        "format",
        "bits per number",
        "plain rows",
        "rows with outliers",
        "their products",
        "with x in 8 bits",
    )
    return Table("What formats round away", note, columns, tuple(rows))


def _in_rows(numbers: Tensor, top: int) -> Tensor:
    codes, scales = absmax(numbers, top)
    return codes * scales.unsqueeze(-1)


def _in_blocks(numbers: Tensor, top: int) -> Tensor:
    return _in_rows(numbers.reshape(-1, BLOCK), top).view(numbers.shape)


_ROUNDINGS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "plain numbers": (32, lambda numbers: numbers),
    "8 bits, a scale per row": (8 + 32 / 1024, lambda numbers: _in_rows(numbers, 127)),
    "8 bits, a scale per 32": (8.5, lambda numbers: _in_blocks(numbers, 127)),
    "4 bits, a scale per row": (4 + 32 / 1024, lambda numbers: _in_rows(numbers, 7)),
    "4 bits, a scale per 32 (Q4_0)": (4.5, lambda numbers: to_q4_0(numbers).numbers()),
}
"""The bits a number takes, and from numbers to what is left of them."""


def _error(got: Tensor, expected: Tensor) -> float:
    return 100 * float((got - expected).double().norm() / expected.double().norm())


def _open(engines: LadderEngines, form: str) -> LLM:
    return open_weights(engines.model, form, engines.max_model_len, device=str(engines.device))


def _other_forms(engines: LadderEngines, full: LLM) -> list[str]:
    """All that differ from the weights of the ladder's other rungs."""
    plain = ["bfloat16"] if engines.dtype != torch.bfloat16 else []
    return [*plain, *engines.quantizations(full.engine.decoder.kernels)]


def _run_in_turn(llms: dict[str, LLM], settings: ClimbSettings) -> dict[str, list[RequestOutput]]:
    """The same request, once unmeasured and then in each of several passes, by every engine."""
    runs: dict[str, list[RequestOutput]] = {form: [] for form in llms}
    prompt, new = settings.weights_prompt, settings.weights_new_tokens
    for repeat in range(settings.repeats + 1):
        for form, llm in llms.items():
            jobs = random_jobs(1, Lengths(prompt, prompt), Lengths(new, new), token_source(llm))
            outputs = run_together(llm, jobs, salt=f"weights {repeat}")
            runs[form] += outputs if repeat else []
    return runs


def _decode_rate(output: RequestOutput) -> float:
    """Tokens a second, from the first token on."""
    seconds = output.metrics.time_per_output_token
    assert seconds is not None
    return 1 / seconds


def _name(form: str, llm: LLM) -> str:
    return f"as stored: {weight_formats(llm.engine.decoder)}" if form == "auto" else form
