"""How many guesses are worth checking: as many as are right often enough for what a further token costs a step.

Everything here follows the clock and so differs from run to run. It decides how many tokens a step checks, never which
tokens come out of it.
"""

from __future__ import annotations

from functools import lru_cache

from quire.step import StepLogEntry

_FORGET = 0.98
"""Of the weight of a step when the next one comes."""
_FIRST_SHARE = 0.1
"""A further token's cost as a part of a whole step's, until it was measured."""
_CERTAINTY = 0.3
"""Of that: as that of steps whose numbers of tokens have this variance."""
_MARGIN = 1.02
"""A guess must gain so many times what it costs: neither is known well."""
_OUTLIER = 1.5
"""A step that takes so many times as long as expected met something else, too: it counts as so long."""
_TRIALS = 0.005
"""Of all time, at most, for guesses that find out whether it has become worthwhile to guess."""
_MOST_RECORDED = 128
"""Steps of so many tokens may take longer when the first of a size comes."""
_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 11, 15, 23, 31)
"""Of guesses for a request and step; few, since a step of every new size takes longer once."""
MAX_GUESSES = _NUMBERS[-1]
_MOST_CERTAIN = 0.998
"""No more is believed of guesses that were all right: a copy ends somewhere."""


class StepCosts:
    """What a step costs by the number of its tokens: a line through the last few dozen steps of answers."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Of the last steps: how many, their tokens and seconds, the squares of the first, the products of both."""
        self._last_end = float("-inf")
        self._seen: set[float] = set()
        """Numbers of tokens that steps have had."""
        self.share = _FIRST_SHARE
        """What a guess for each request adds to the time of a step without guesses, as a part of that."""
        self.num_requests = 1
        """In the last step."""
        self.seconds = 0.01
        """That the last steps took, in the mean."""
        self._share = _FIRST_SHARE
        """A token's part of a step's time as last known, for when steps have long been alike."""

    def observe(self, entry: StepLogEntry) -> None:
        """A step that is over; those with prompts in them say little about guesses."""
        step, result = entry.step, entry.result
        begin, self._last_end = max(step.now, self._last_end), entry.committed
        if result is None or not step.scheduled or step.admitted:
            return
        others = step.scheduled[step.num_decodes :]
        if any(not one.samples or one.num_tokens != 1 + len(one.guesses) for one in others):
            return
        tokens = float(step.num_decodes + sum(one.num_tokens for one in others))
        seconds = entry.committed - begin
        if tokens <= _MOST_RECORDED and tokens not in self._seen:
            self._seen.add(tokens)  # it was recorded, which takes longer than computing it
            return
        if self._sums[0] > 4:
            base, slope, _ = self._line()
            seconds = min(seconds, _OUTLIER * (base + slope * tokens))
        found = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_FORGET * old + new for old, new in zip(self._sums, found, strict=True)]
        base, slope, variance = self._line()
        share = slope * tokens / max(base + slope * tokens, 1e-9)
        self._share += 0.2 * (share - self._share) * variance / (variance + _CERTAINTY)
        self._share += 0.001 * (_FIRST_SHARE - self._share)  # what was measured long ago may be otherwise by now
        self.num_requests, self.seconds = len(step.scheduled), self._sums[2] / self._sums[0]
        share = _MARGIN * slope * self.num_requests / max(base + slope * self.num_requests, 1e-9)
        self.share = round(share, 3)  # so that few are looked at

    def _line(self) -> tuple[float, float, float]:
        """A step's cost without tokens, that of each, and the variance of the numbers of tokens behind that."""
        mean, seconds, squares, products = (one / self._sums[0] for one in self._sums[1:])
        variance = squares - mean * mean
        # As if a little had been measured before: times are noisy, and often all steps are alike.
        slope = products - mean * seconds + _CERTAINTY * self._share * seconds / mean
        slope = min(max(slope / (variance + _CERTAINTY), 0.0), seconds / mean)
        return seconds - slope * mean, slope, variance


@lru_cache(10_000)
def best_number(chance: float, share: float) -> int:
    """How many guesses bring the most tokens a second, if each is right with this chance once those before it are, and
    adds this share to a step's time: where (1 + chance + chance ** 2 ...) / (1 + share * number) is largest."""
    best, most = 0, 1.0
    for number in _NUMBERS[1:]:
        speed = (1 - chance ** (number + 1)) / (1 - chance) / (1 + share * number)
        if speed <= most:
            break
        best, most = number, speed
    return best


class Acceptance:
    """How often one request's guesses have been right lately, and so how many are worth checking."""

    __slots__ = ("_right", "_skip", "_tried", "_wait", "chance", "num_right", "num_wrong")

    def __init__(self, chance: float = 0.7) -> None:
        self._right, self._tried = chance, 1.0  # as if one had been tried
        self.chance = chance
        """Of the next guess to be right."""
        self.num_right = self.num_wrong = 0
        """All guesses so far that were right, and that were the first wrong one of a step."""
        self._wait = 2
        """Once nothing is worth it: so many chances are let go before one guess is tried again."""
        self._skip = 0

    def learn(self, num_right: int, num_wrong: int) -> None:
        right, wrong = num_right - self.num_right, num_wrong - self.num_wrong
        self.num_right, self.num_wrong = num_right, num_wrong
        self._right = self._right * 0.8 + right
        self._tried = self._tried * 0.8 + right + wrong
        before, chance = self.chance, min(self._right / self._tried, _MOST_CERTAIN)
        self.chance = round(chance, 2 if chance < 0.98 else 3)  # so that few are looked at
        if self.chance > before + 0.1:  # that was news: the next trial comes sooner
            self._wait = max(self._wait // 4, 2)

    def count(self, costs: StepCosts, most: int) -> int:
        """How many guesses to check, if there are some."""
        number = best_number(self.chance, costs.share)
        if number:
            self._wait = 2
            return min(number, most)
        if self._skip < self._wait:
            self._skip += 1
            return 0
        self._skip, self._wait = 0, min(2 * self._wait, 2 + int(costs.share / _TRIALS))
        return min(most, 1)

    def rest(self, most: int) -> int:
        """After none: how many times, at most so many, there will be none again, which need not be asked for."""
        times = min(self._wait - self._skip, most)
        self._skip += times
        return times
