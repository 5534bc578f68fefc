"""What steps take, as a plane over their tokens and pairs (of a query and a key that it reads)."""

from __future__ import annotations

_TRUST = 0.02
"""Weight of what was fitted before: it decides where the last steps were all alike."""
_NOISE = 4.0
"""What pairs seem to explain counts less the nearer it is to so many times the noise; below that,
not at all. In a few dozen steps pairs may hardly differ, or only as the tokens do: then noise alone
makes a slope, and steps with ten times as many pairs would be planned by it.
"""

Plane = tuple[float, float, float]
"""Seconds of a step, of each token, of each pair."""
Sums = tuple[float, float, float, float, float, float, float, float, float, float]
"""Over steps: how many, tokens, pairs, tokens squared, tokens times pairs, pairs squared, seconds, tokens
times seconds, pairs times seconds, seconds squared.
"""


def fit_plane(sums: Sums, before: Plane) -> Plane:
    """The plane with the least squares, none of whose parts is negative; pairs count only for
    what noise does not explain.
    """
    (
        count, tokens, pairs, tokens2, both, pairs2, seconds, tokens_total, pairs_total, squared,
    ) = sums  # fmt: skip
    base, per_token, per_pair = before
    # The three equations, with a little trust in each part as it was.
    trust = (_TRUST if base else 1e-9) * count + 1e-300
    count_squared, base_total = count + trust, seconds + trust * base
    squared += trust * base * base
    trust = (_TRUST if per_token else 1e-9) * tokens2 + 1e-300
    tokens2, tokens_total = tokens2 + trust, tokens_total + trust * per_token
    squared += trust * per_token * per_token
    trust = (_TRUST if per_pair else 1e-9) * pairs2 + 1e-300
    pairs2, pairs_total = pairs2 + trust, pairs_total + trust * per_pair
    squared += trust * per_pair * per_pair
    # Solved by elimination.
    by_tokens, by_pairs = tokens / count_squared, pairs / count_squared
    tokens2 -= by_tokens * tokens
    both -= by_tokens * pairs
    tokens_total -= by_tokens * base_total
    by_both = both / tokens2
    pairs2 -= by_pairs * pairs + by_both * both
    pairs_total -= by_pairs * base_total + by_both * tokens_total
    per_pair = pairs_total / pairs2
    by_pairs_alone = per_pair * pairs_total
    if by_pairs_alone > 0:
        explained = base_total * base_total / count_squared
        explained += tokens_total * tokens_total / tokens2
        noise = max(0.0, squared - explained - by_pairs_alone) / count
        per_pair *= max(0.0, 1 - _NOISE * noise / by_pairs_alone)
    per_token = (tokens_total - both * per_pair) / tokens2
    per_token, per_pair = max(per_token, 0.0), max(per_pair, 0.0)
    base = (seconds - per_token * tokens - per_pair * pairs) / count
    if base < 0:  # then all of it is the tokens'
        scale = seconds / (per_token * tokens + per_pair * pairs)
        return 0.0, per_token * scale, per_pair * scale
    return base, per_token, per_pair
