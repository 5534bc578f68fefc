"""What weights in another format cost in quality: the perplexity of a text, and how far the
next-token distributions are from those of the full-precision weights.

Two models are in memory at once, but never their distributions over the whole text: it is read
window by window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError, InvalidRequestError
from quire.frontend.progress import BenchmarkBar
from quire.frontend.tokenizer import Tokenizer
from quire.kernels.formats import PLAIN
from quire.kernels.ops import PagedBatch
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.runner.kv_cache import KVCache
from quire.tools.bench.machine import report_facts
from quire.tools.bench.report import EMPTY, Bytes, Number, Report, Row, Table

OWN_TEXT = Path(__file__).with_name("quality.txt")
"""Prose, dialogue, letters, a little code and some numbers, written for this benchmark."""

_PLAIN = ("float32", "bfloat16", "float16")
_PLAIN_NAMES = {str(dtype).removeprefix("torch."): format.name for dtype, format in PLAIN.items()}
_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 64
"""Of distributions: two in float64 over a large vocabulary take 150 MB then."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What was found at every scored token of a text, float64 [tokens] each."""

    baseline: Tensor
    """Log-probability that the baseline gives the text's next token."""
    model: Tensor
    """Log-probability that the model gives it."""
    divergence: Tensor
    """Kullback-Leibler divergence of the model's distribution from the baseline's, in nats."""
    same_top: Tensor
    """1 where both think the same token likeliest, else 0."""

    @property
    def num_tokens(self) -> int:
        return len(self.model)


def perplexity(logprobs: Tensor) -> float:
    """exp of the mean negative log-probability."""
    return math.exp(-logprobs.mean().item())


def open_weights(model: str, weights: str, max_model_len: int, **options: Any) -> LLM:
    """A model with weights as a quantization (auto, none, int8, int4) makes them, or as plain
    numbers of a dtype (float32, bfloat16).
    """
    options |= (
        {"dtype": weights, "quantization": "none"}
        if weights in _PLAIN
        else {"quantization": weights}
    )
    # One request's cache: what is scored here lies in a cache of its own.
    return LLM(model, max_model_len=max_model_len, max_num_seqs=1, kv_cache_memory=0.05, **options)


def read_text(path: Path) -> str:
    """The text to score."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("--text", f"{path} can't be read: {error}") from None
    if not text.strip():
        raise InvalidRequestError("--text", f"{path} is empty")
    return text


def windows_of(text: str, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The text's tokens in windows of at most `length`, each behind the beginning-of-sequence token
    where the model wants one. All of a window's tokens but the first are scored.
    """
    bos = tokenizer.bos_token_id
    lead = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
    tokens = tokenizer.encode_plain(text)
    step = length - len(lead)
    windows = [lead + tokens[i : i + step] for i in range(0, len(tokens), step)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        message = f"is too short: nothing follows its {len(tokens)} tokens. A few hundred words give steady figures"
        raise InvalidRequestError("--text", message)
    return windows


class _Reader:
    """A decoder with a cache for one window."""

    def __init__(self, decoder: Decoder, longest: int) -> None:
        self._decoder = decoder
        num_blocks = 1 + -(-longest // _BLOCK_SIZE)  # the first is nobody's, as in the engine
        self._tables = torch.arange(1, num_blocks, dtype=torch.int32, device=decoder.device)[None]
        by_dimension = decoder.kernels.keys_by_dimension(decoder.dtype, _BLOCK_SIZE)
        self._cache = KVCache(
            decoder.spec, num_blocks, 0, _BLOCK_SIZE, decoder.dtype, decoder.device, by_dimension
        )

    def logits(self, window: Sequence[int]) -> Iterator[Tensor]:
        """Float64 scores of the token after each of the window's but the last, some rows at a time."""
        decoder, length = self._decoder, len(window)
        bounds = torch.tensor([0, length], dtype=torch.int32, device=decoder.device)
        positions = torch.arange(length, device=decoder.device)
        batch = PagedBatch(
            query_start=bounds,
            context_lens=bounds[1:],
            block_tables=self._tables,
            table_rows=torch.zeros(1, dtype=torch.int32, device=decoder.device),
            slot_mapping=positions + _BLOCK_SIZE,
            max_context_len=length,
        )
        batches = (batch,) * self._cache.num_groups
        hidden = decoder(
            torch.tensor(window, device=decoder.device), positions, batches, self._cache.layers
        )
        for some in torch.split(hidden[:-1], _ROWS_AT_ONCE):
            yield decoder.logits(some).double()


@torch.inference_mode()
def score(
    baseline: Decoder,
    model: Decoder,
    windows: Sequence[Sequence[int]],
    done: Callable[[], None] = lambda: None,
) -> Scores:
    """Both models' view of every token; `done` is called after each window."""
    longest = max(map(len, windows))
    readers = _Reader(baseline, longest), _Reader(model, longest)
    found: list[Tensor] = []
    for window in windows:
        targets = torch.split(torch.tensor(window[1:], device=model.device), _ROWS_AT_ONCE)
        for expected, seen, target in zip(
            *(reader.logits(window) for reader in readers), targets, strict=True
        ):
            found.append(_logprobs_of_rows(expected.to(model.device), seen, target[:, None]).cpu())
        done()
    scores = Scores(*torch.cat(found, 1))
    if not all(
        values.isfinite().all() for values in (scores.baseline, scores.model, scores.divergence)
    ):
        raise EngineError("a model's scores are not all numbers; are its weights whole?")
    return scores


def _logprobs_of_rows(expected: Tensor, seen: Tensor, target: Tensor) -> Tensor:
    """The four figures of `Scores` for some tokens, [4, rows], from float64 logits [rows, vocab]."""
    same_top = expected.argmax(1) == seen.argmax(1)
    p, q = expected.log_softmax(1), seen.log_softmax(1)
    # rounding may leave equal ones a hair below it
    divergence = (p.exp() * (p - q)).sum(1).clamp_min(0)
    return torch.stack(
        (p.gather(1, target)[:, 0], q.gather(1, target)[:, 0], divergence, same_top.double())
    )


def measure_quality(
    model: str,
    forms: Sequence[str],
    against: str,
    against_form: str,
    text: str,
    window: int,
    device: str = "auto",
) -> Report:
    """Scores `model` with weights in each of `forms` next to the model `against` in `against_form`."""
    rows: list[Row] = []
    with open_weights(against, against_form, window, device=device) as full:
        facts = report_facts(full.engine.decoder.device) | {"baseline": full.description}
        windows = windows_of(text, full.engine.tokenizer, window)
        for form in forms:
            with open_weights(model, form, window, device=device) as other:
                facts[f"model, {form}"] = other.description
                _check_comparable(full, other, text, windows, window)
                with BenchmarkBar(len(windows)) as bar:
                    bar.begin(f"windows of the text, weights {form}")
                    scores = score(full.engine.decoder, other.engine.decoder, windows, bar.advance)
                if not rows:
                    first = (Number(perplexity(scores.baseline)), EMPTY, EMPTY, EMPTY)
                    rows.append(
                        (*_about(f"{against_form} (baseline)", full), *first, scores.num_tokens)
                    )
                rows.append((*_about(form, other), *_figures(scores), scores.num_tokens))
    columns = (
        "weights",
        "format",
        "size",
        "bits per weight",
        "perplexity",
        "mean KL",
        "worst KL",
        "same top token",
    )
    note = (
        f"Windows of up to {window} tokens; every token but a window's first is scored. KL is the divergence of the "
        "next-token distribution from the baseline's, in nats, over the whole vocabulary; the same top token is how "
        "often both think the same one likeliest. Baseline and model are in memory at the same time."
    )
    return Report("Quality", facts, (Table("Quality", note, (*columns, "tokens"), tuple(rows)),))


def _check_comparable(
    full: LLM, other: LLM, text: str, windows: list[list[int]], length: int
) -> None:
    sizes = full.engine.decoder.spec.vocab_size, other.engine.decoder.spec.vocab_size
    if sizes[0] != sizes[1]:
        message = f"has a vocabulary of {sizes[0]:,} tokens and the model one of {sizes[1]:,}: they can't be compared"
        raise InvalidRequestError("--against", message)
    if windows_of(text, other.engine.tokenizer, length) != windows:
        raise InvalidRequestError(
            "--against", "reads the text as other tokens than the model: they can't be compared"
        )


def _about(form: str, llm: LLM) -> Row:
    decoder = llm.engine.decoder
    return (
        form,
        weight_formats(decoder),
        Bytes(decoder.nbytes),
        Number(8 * decoder.nbytes / decoder.spec.num_parameters),
    )


def _figures(scores: Scores) -> Row:
    worst, same = scores.divergence.max().item(), 100 * scores.same_top.mean().item()
    return (
        Number(perplexity(scores.model)),
        Number(scores.divergence.mean().item()),
        Number(worst),
        Number(same, "%"),
    )


def weight_formats(decoder: Decoder) -> str:
    """The formats of the model's matrices, those that hold most of it first."""
    sizes: dict[str, int] = {}
    for weight in decoder.weights.values():
        if len(weight.shape) > 1:
            for part in weight.parts:
                # kernels call a layout after what it holds
                name = part.format.name.split("packed_")[-1]
                name = _PLAIN_NAMES.get(name, name)
                sizes[name] = sizes.get(name, 0) + sum(tensor.nbytes for tensor in part.tensors)
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))
