"""What every sampling parameter means, in float64 and plain Python, one token at a time."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from quire.kernels.noise import chances
from tests.runner.sampling_support import Job

NEVER = -math.inf


class Unclear(Exception):  # noqa: N818
    """A number lies so near a limit that float32 may decide otherwise."""


def before_temperature(logits: list[float], job: Job) -> list[float]:
    """Masks, bias, penalties, DRY."""
    params, history, answer = job.params, job.history, list(job.answer)
    scores = list(logits)
    for token in range(len(scores)):
        if forbidden(token, job):
            scores[token] = NEVER
    for token, bias in dict(params.logit_bias or ()).items():
        scores[token] += bias
    counts = Counter(answer)
    for token in set(history):
        if params.repetition_penalty != 1:
            positive = scores[token] > 0
            scores[token] = (
                scores[token] / params.repetition_penalty
                if positive
                else scores[token] * params.repetition_penalty
            )
    for token, count in counts.items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    for token in range(len(scores)):
        scores[token] -= dry_penalty(token, job)
    return scores


def forbidden(token: int, job: Job) -> bool:
    params, history, answer = job.params, job.history, list(job.answer)
    if job.mask is not None and not job.mask[token]:
        return True
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return True
    ends = [*([] if params.ignore_eos else job.eos), *params.stop_token_ids]
    if len(answer) < params.min_tokens and token in ends:
        return True
    for word in job.resolved.bad_word_ids:
        if [*answer, token][-len(word) :] == list(word):
            return True
    n = params.no_repeat_ngram_size
    ngram = [*history, token][-n:]
    return 0 < n <= len(history) and any(
        history[i : i + n] == ngram for i in range(len(history) - n + 1)
    )


def dry_penalty(token: int, job: Job) -> float:
    params, history, breakers = job.params, job.history, job.resolved.dry_breaker_ids
    if not params.dry_multiplier or token in breakers:
        return 0.0
    longest = 0
    for place in range(len(history) - 1):
        if history[place + 1] != token:
            continue
        n = 0
        while (
            n <= place
            and history[place - n] == history[-1 - n]
            and history[place - n] not in breakers
        ):
            n += 1
        longest = max(longest, n)
    if longest < params.dry_allowed_length:
        return 0.0
    excess = min(longest - params.dry_allowed_length, 64)
    return min(params.dry_multiplier * params.dry_base**excess, 1e30)


def kept(scores: list[float], job: Job, near: float = 1e-4) -> list[float]:
    """What the filters leave of scores already divided by the temperature. Raises Unclear where a
    decision hangs on less than `near`.
    """
    params = job.params
    if params.top_n_sigma:
        scores = within_sigma(scores, params.top_n_sigma, near)
    if params.top_k:
        scores = likeliest(scores, params.top_k)
    if params.top_p < 1:
        scores = nucleus(scores, [-score for score in scores], params.top_p, near)
    if params.min_p:
        scores = above(scores, max(scores) + math.log(params.min_p), near)
    if params.typical_p < 1:
        scores = nucleus(scores, distances(scores), params.typical_p, near)
    return without_top_choices(scores, job, near)


def probabilities(scores: list[float]) -> list[float]:
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def above(scores: list[float], limit: float, near: float) -> list[float]:
    if any(abs(score - limit) < near for score in scores):
        raise Unclear
    return [score if score >= limit else NEVER for score in scores]


def within_sigma(scores: list[float], n: float, near: float) -> list[float]:
    known = [score for score in scores if score != NEVER]
    mean = sum(known) / len(known)
    spread = math.sqrt(sum((score - mean) ** 2 for score in known) / len(known))
    return above(scores, max(scores) - n * spread, near)


def likeliest(scores: list[float], k: int) -> list[float]:
    limit = sorted(scores, reverse=True)[min(k, len(scores)) - 1]
    return [score if score >= limit else NEVER for score in scores]


def distances(scores: list[float]) -> list[float]:
    p = probabilities(scores)
    entropy = -sum(x * math.log(x) for x in p if x)
    return [abs(-math.log(x) - entropy) if x else math.inf for x in p]


def nucleus(scores: list[float], costs: list[float], wanted: float, near: float) -> list[float]:
    """The cheapest tokens until their probability reaches `wanted`, and those that cost the same."""
    p = probabilities(scores)
    reached, last = 0.0, 0
    for last in sorted(range(len(scores)), key=lambda i: costs[i]):
        reached += p[last]
        if abs(reached - wanted) < near:
            raise Unclear
        if reached >= wanted:
            break
    for score, cost in zip(scores, costs, strict=True):
        if score not in (scores[last], NEVER) and abs(cost - costs[last]) < near:
            raise Unclear
    return [
        score if cost <= costs[last] else NEVER for score, cost in zip(scores, costs, strict=True)
    ]


def without_top_choices(scores: list[float], job: Job, near: float) -> list[float]:
    seed, position = np.array([job.params.seed or 0], np.uint64), np.array([len(job.history)])
    if chances(seed, position)[0] >= job.params.xtc_probability:
        return scores
    p = probabilities(scores)
    if any(abs(x - job.params.xtc_threshold) < near * x for x in p):
        raise Unclear
    likely = [score for score, x in zip(scores, p, strict=True) if x >= job.params.xtc_threshold]
    return [NEVER if likely and score > min(likely) else score for score in scores]
