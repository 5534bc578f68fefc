"""What must not matter: each axis runs the same requests under another condition and compares them
with each alone.

An axis changes one thing. The reference, and every axis that is not about the prefix cache, runs
without it: so a fault shows where it is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from quire.sampling_params import SamplingParams
from quire.tools.verify.answers import Answer, Pair
from quire.tools.verify.cases import Case, draw_cases, structured_is_there
from quire.tools.verify.engines import Model, run_alone, run_cases
from quire.tools.verify.subject import Answers, Axis, AxisComparison, Sizes, pairs_of

_NUM_SEEDS = 8
_PROCESS_SECONDS = 4.0
"""Until another process has imported torch."""
_LONGEST = 72
"""Tokens of a prompt in the first round; in later ones, which are of the quick, four times that."""


class ModelSubject:
    """A model on this machine, as something that can be tried."""

    sizes = Sizes(fewest=6, first=12, most=192, least=3)

    def __init__(self, model: Model) -> None:
        self._model = model
        self._structured = structured_is_there()
        self.notes = () if self._structured else (_NO_GRAMMARS,)

    def axes(self) -> list[Axis]:
        model = self._model
        load = model.load_seconds
        start_seconds = {"devices": 2 * load + _PROCESS_SECONDS, "restarted": load}
        return [
            Axis(
                name,
                about,
                partial(compare, model),
                missing(model),
                passes,
                start_seconds.get(name, 0.0),
            )
            for name, about, compare, missing, passes in _AXES
        ]

    def draw(self, count: int, seed: int, is_first: bool) -> list[Case]:
        model = self._model
        longest = max(2, min(_LONGEST if is_first else 4 * _LONGEST, model.longest // 2))
        tokenizer = model.first_engine.tokenizer
        vocab_size = model.spec.vocab_size
        return draw_cases(count, seed, tokenizer, vocab_size, longest, self._structured)

    def reference(self, cases: Sequence[Case]) -> Answers:
        return _reference(self._model, cases)

    def tidy(self) -> None:
        if self._model.device.is_gpu:
            self._model.forget()  # caches lie there whether they are used or not


_NO_GRAMMARS = (
    "no request with a grammar: llguidance is not installed (pip install 'quire[structured]')"
)


def _reference(model: Model, cases: Sequence[Case]) -> Answers:
    """One row, the prompt in one chunk, nothing cached."""
    return run_alone(model.engine(cases), cases)


_Compare = Callable[[Model, Sequence[Case], Answers], AxisComparison]


def _num_rows(cases: Sequence[Case]) -> int:
    return sum(case.params.n for case in cases)


def _repeated(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    return AxisComparison(pairs_of(alone, run_alone(model.engine(cases), cases)))


def _seeds(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """Answer i of n is the request with seed + i; and a seed that is ignored gives one answer,
    always.
    """
    pairs = []
    for number, case in enumerate(cases):
        if case.params.n > 1:
            seed = case.params.seed or 0
            singles = [
                replace(case, params=replace(case.params, n=1, seed=seed + i))
                for i in range(case.params.n)
            ]
            answers = run_alone(model.engine(singles), singles)
            pairs += [
                Pair(number, index, expected, got)
                for index, (expected, (got,)) in enumerate(zip(alone[number], answers, strict=True))
            ]
    params = SamplingParams(temperature=2.0, max_tokens=6, ignore_eos=True)
    # A long prompt says so much that little is left to chance.
    some = [
        Case("seeds", cases[0].prompt[:4], replace(params, seed=seed)) for seed in range(_NUM_SEEDS)
    ]
    found = [answer for (answer,) in run_alone(model.engine(some), some)]
    num_distinct = len({tuple(answer.tokens) for answer in found})
    if num_distinct == 1:
        wanted = Answer({"distinct answers": ["more than one"]})
        pairs.append(Pair(0, 0, wanted, Answer({"distinct answers": [1]})))
    return AxisComparison(pairs, f"{_NUM_SEEDS} seeds, {num_distinct} answers")


def _together(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    engine = model.engine(cases, max_num_seqs=_num_rows(cases), max_batched_tokens=2048)
    return AxisComparison(
        pairs_of(alone, run_cases(engine, cases).answers), f"up to {_num_rows(cases)} at once"
    )


def _orders(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    order = list(range(len(cases)))
    random.Random(len(cases)).shuffle(order)
    engine = model.engine(cases, max_num_seqs=_num_rows(cases))
    run = run_cases(engine, cases, order=order, arrivals_per_step=2)
    return AxisComparison(pairs_of(alone, run.answers), "shuffled, arriving 2 a step")


def _chunks(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    pairs = []
    for rows, chunk in ((3, 7), (8, 50)):
        engine = model.engine(cases, max_num_seqs=rows, max_batched_tokens=chunk)
        pairs += pairs_of(alone, run_cases(engine, cases).answers)
    return AxisComparison(pairs, "steps of 7 and of 50 tokens")


def _rows(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    run = run_cases(model.engine(cases, max_num_seqs=3), cases)
    return AxisComparison(pairs_of(alone, run.answers), "max_num_seqs 3")


def _block_sizes(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    sizes = (32,) if model.device.is_gpu else (1, 64)
    pairs = []
    for size in sizes:
        engine = model.engine(cases, max_num_seqs=_num_rows(cases), block_size=size)
        pairs += pairs_of(alone, run_cases(engine, cases).answers)
    return AxisComparison(pairs, f"blocks of {', '.join(map(str, sizes))} tokens")


def _preempted(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    engine = model.engine(cases, max_num_seqs=_num_rows(cases), spare_tokens=32)
    run = run_cases(engine, cases, preempt_every=5)
    return AxisComparison(
        pairs_of(alone, run.answers), f"{run.preemptions} preemptions", run.preemptions > 0
    )


def _swapped(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """Whenever requests are preempted, a more important one takes all blocks: theirs are then on
    the host alone.
    """
    room = sum(case.num_tokens * case.params.n for case in cases)
    engine = model.engine(
        cases,
        max_num_seqs=_num_rows(cases),
        spare_tokens=0,
        host_tokens=2 * room,
        prefix_caching=True,
        policy="priority",
    )
    run = run_cases(engine, cases, preempt_every=8, displace=True)
    text = f"{run.preemptions} preemptions, {run.host_tokens} tokens back from the host"
    return AxisComparison(pairs_of(alone, run.answers), text, run.host_tokens > 0)


def _prefix_cache(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    engine = model.engine(cases, max_num_seqs=_num_rows(cases), prefix_caching=True)
    first = run_cases(engine, cases, arrivals_per_step=2)
    again = run_cases(engine, cases)
    found = first.cached_tokens + again.cached_tokens
    pairs = pairs_of(alone, first.answers) + pairs_of(alone, again.answers)
    return AxisComparison(pairs, f"{found} tokens from the cache", found > 0)


def _depths(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    depth = 2 if model.first_engine.core.depth == 1 else 1
    run = run_cases(model.engine(cases, max_num_seqs=4, depth=depth), cases)
    return AxisComparison(
        pairs_of(alone, run.answers), f"{depth} instead of {model.first_engine.core.depth}"
    )


def _without_graphs(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """All other axes have them."""
    engine = model.engine(cases, max_num_seqs=_num_rows(cases), cuda_graphs=False)
    return AxisComparison(pairs_of(alone, run_cases(engine, cases).answers), "without them")


def _no_graphs(model: Model) -> str | None:
    return None if model.device.is_gpu else "there are CUDA graphs on a GPU only"


def _recorded(model: Model) -> str | None:
    if model.device.is_gpu:
        return "a GPU has CUDA graphs instead"
    return None if model.has_recordings else "this model's steps can't be recorded"


def _drafted(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """N-grams, and predictions that are right but for every fifth token."""
    engine = model.engine(cases, max_num_seqs=_num_rows(cases), speculation="ngram")
    # All steps take as long by this clock: on a busy machine the true one would have nothing
    # drafted. In an engine that has been used before it goes on from where it was.
    began = engine.core.clock() if engine.core.clock is not None else 0.0
    engine.core.clock = partial(next, itertools.count(began, 1e-3))
    vocab_size = model.spec.vocab_size
    predictions = [
        [(token + (place % 5 == 4)) % vocab_size for place, token in enumerate(answers[0].tokens)]
        for answers in alone
    ]
    first = run_cases(engine, cases)
    then = run_cases(engine, cases, predictions=predictions)
    drafted = first.drafted_tokens + then.drafted_tokens
    accepted = first.accepted_tokens + then.accepted_tokens
    pairs = pairs_of(alone, first.answers) + pairs_of(alone, then.answers)
    return AxisComparison(
        pairs, f"{drafted} draft tokens, {accepted} of them right", drafted > accepted > 0
    )


def _devices(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """Each process has a part of the weights, and they gather what the others have computed."""
    with model.divided(cases, model.num_devices, _num_rows(cases)) as engine:
        ranks = engine.description.rpartition("rank 0 of ")[2]
        return AxisComparison(
            pairs_of(alone, run_cases(engine, cases).answers), f"divided among {ranks}"
        )


def _no_devices(model: Model) -> str | None:
    return model.no_devices(model.num_devices)


def _restarted(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    model.reload()
    return AxisComparison(
        pairs_of(alone, _reference(model, cases)), f"loaded again in {model.load_seconds:.1f} s"
    )


def _no_reload(model: Model) -> str | None:
    return None if model.can_reload else "these weights have no files"


def _scored_again(model: Model, cases: Sequence[Case], alone: Answers) -> AxisComparison:
    """The logprobs that an answer's tokens had when they were drawn are those they have as a part
    of a prompt.
    """
    whole: list[Case] = []
    expected: list[tuple[int, int, Answer]] = []
    for number, (case, answers) in enumerate(zip(cases, alone, strict=True)):
        for index, answer in enumerate(answers):
            if "logprobs" not in answer.values or not answer.tokens:
                continue
            params = SamplingParams(
                temperature=0.0, max_tokens=1, prompt_logprobs=case.params.logprobs
            )
            whole.append(Case("scored", (*case.prompt, *answer.tokens), params))
            kept = {
                name: list(values) for name, values in answer.values.items() if name != "tokens"
            }
            kept = {name: values for name, values in kept.items() if not name.startswith("prompt ")}
            expected.append((number, index, Answer(kept)))
    if not whole:
        return AxisComparison([], "no answer with logprobs", happened=False)
    run = run_cases(model.engine(whole, max_num_seqs=_num_rows(whole)), whole)
    pairs = []
    for (number, index, answer), (scored,) in zip(expected, run.answers, strict=True):
        tails = {
            name: scored.values.get(f"prompt {name}", [])[-len(values) :]
            for name, values in answer.values.items()
        }
        pairs.append(Pair(number, index, answer, Answer(tails)))
    return AxisComparison(pairs, f"{len(whole)} answers as prompts", bool(whole))


def _always(model: Model) -> str | None:
    return None


_AXES: tuple[tuple[str, str, _Compare, Callable[[Model], str | None], float], ...] = (
    ("repeated", "alone, a second time", _repeated, _always, 1.0),
    ("seeds", "n answers are n seeds, and seeds count", _seeds, _always, 1.0),
    ("together", "all requests in one batch", _together, _always, 0.8),
    ("orders", "in other orders, a few at a time", _orders, _always, 0.8),
    ("chunks", "prompts in chunks (max_batched_tokens)", _chunks, _always, 2.0),
    ("rows", "fewer requests at once (max_num_seqs)", _rows, _always, 0.8),
    ("blocks", "other block sizes of the cache", _block_sizes, _always, 2.5),
    ("preempted", "preempted and computed again", _preempted, _always, 2.0),
    ("swapped", "preempted, blocks kept on the host", _swapped, _always, 2.0),
    ("prefix cache", "prompts found in the prefix cache", _prefix_cache, _always, 1.5),
    ("in flight", "more or fewer steps in flight", _depths, _always, 1.0),
    ("CUDA graphs", "no step captured and launched as a whole", _without_graphs, _no_graphs, 1.0),
    ("recorded steps", "no CPU step recorded and made again", _without_graphs, _recorded, 1.0),
    ("drafted", "tokens drafted and checked (speculation)", _drafted, _always, 2.5),
    ("devices", "the model divided among processes", _devices, _no_devices, 1.0),
    ("scored again", "answers as prompts have their logprobs", _scored_again, _always, 1.0),
    ("restarted", "everything loaded again", _restarted, _no_reload, 1.0),
)
"""The last number: what an axis computes, in requests alone (SmolLM2 on two cores)."""
