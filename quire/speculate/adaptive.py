"""How many guesses are worth checking: as many as are right often enough for what a further token costs a step.

Everything here follows the clock and so differs from run to run. It decides how many tokens a step checks, never which
tokens come out of it.
"""

from __future__ import annotations

import math

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


_MOST_RECORDED = 64
"""Steps of so many tokens may take longer when the first of a size comes."""
_NUMBERS = (0, 1, 2, 3, 4, 4, 6, 6, 8, 8, 8, 11, 11, 11, 11, 15)
"""By number of guesses, the next lower one of a few: a step of every new size takes longer once."""


class StepCosts:
    """What a step costs by the number of its tokens: a line through the last few dozen steps of answers."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._last_end = float("-inf")
        self._seen: set[float] = set()
        """Numbers of tokens that steps have had."""
        self._gained = self._spent = 0.0
        """Tokens that came of the last few steps, and their seconds."""
        self.least_chance = _FIRST_SHARE
        """How probable it must be that a guess is right, so that checking it makes answers come sooner: a further
        token's cost, over the cost per token that comes out of steps as they are (both settle where that is least)."""
        self.num_requests = 1
        """In the last step."""
        self._share = _FIRST_SHARE
        """What was last known of that, for when steps have long been alike."""

    def observe(self, entry: StepLogEntry) -> None:
        """A step that is over; those with prompts in them say little about guesses."""
        step, result = entry.step, entry.result
        begin, self._last_end = max(step.now, self._last_end), entry.committed
        if result is None or not step.scheduled or step.admitted:
            return
        if any(not one.samples or one.num_tokens != 1 + len(one.guesses) for one in step.scheduled):
            return
        tokens, seconds = float(step.num_tokens), entry.committed - begin
        if tokens <= _MOST_RECORDED and tokens not in self._seen:
            self._seen.add(tokens)  # it was recorded, which takes longer than computing it
            return
        gain = float(sum(map(len, result.tokens.values()))) or 1.0
        if self._weight > 4:
            base, slope = self._base_and_slope()
            seconds = min(seconds, _OUTLIER * (base + slope * tokens))
        self._weight = self._weight * _FORGET + 1
        self._tokens = self._tokens * _FORGET + tokens
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + tokens * tokens
        self._products = self._products * _FORGET + tokens * seconds
        base, slope = self._base_and_slope()
        share = slope * tokens / max(base + slope * tokens, 1e-9)
        mean = self._tokens / self._weight
        spread = self._squares / self._weight - mean * mean
        self._share += 0.2 * (share - self._share) * spread / (spread + _CERTAINTY)
        self._share += 0.001 * (_FIRST_SHARE - self._share)  # what was measured long ago may be otherwise by now
        self._gained = self._gained * 0.95 + gain
        self._spent = self._spent * 0.95 + seconds
        self.least_chance = _MARGIN * slope * self._gained / max(self._spent, 1e-9)
        self.num_requests = len(step.scheduled)

    def _base_and_slope(self) -> tuple[float, float]:
        mean, seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - mean * mean
        covariance = self._products / self._weight - mean * seconds
        # As if a little had been measured before: times are noisy, and often all steps are alike.
        slope = (covariance + _CERTAINTY * self._share * seconds / mean) / (variance + _CERTAINTY)
        slope = min(max(slope, 0.0), seconds / mean)
        return seconds - slope * mean, slope


class Acceptance:
    """How often one request's guesses have been right lately, and so how many are worth checking."""

    __slots__ = ("_right", "_skip", "_tried", "_wait", "chance", "num_right", "num_wrong")

    def __init__(self) -> None:
        self._right, self._tried = 1.4, 2.0  # as if two had been tried
        self.chance = self._right / self._tried
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
        self.chance = min(self._right / self._tried, 0.99)

    def count(self, least_chance: float, most: int) -> int:
        """How many guesses to check, if there are some."""
        chance = self.chance
        if least_chance <= 0:
            return most
        if chance > least_chance:
            self._wait = 2
            return _NUMBERS[min(most, int(math.log(least_chance) / math.log(chance)))]
        if self._skip < self._wait:
            self._skip += 1
            return 0
        self._skip, self._wait = 0, min(2 * self._wait, 512)
        return min(most, 1)
