"""How many draft tokens are worth checking: a draft token must be right often enough to pay for
the time it adds to a step.

This depends on measured times and so differs from run to run. It decides how many draft tokens are
checked, nothing else.
"""

from __future__ import annotations

from functools import lru_cache

from quire.step import StepLogEntry

_FORGET = 0.98
"""Each step counts this much of the next one, in sums over the last steps."""
_FIRST_SHARE = 0.1
"""What one more token is assumed to add to a step's time, as a part of it, until it was measured."""
_CERTAINTY = 0.3
"""Weight of that assumption: as much as measured steps whose numbers of tokens have this variance."""
_MARGIN = 1.02
"""A draft token must gain this many times what it costs, as both are estimates."""
_OUTLIER = 1.5
"""A step that took longer than this many times the expected time was disturbed: it counts as this
long.
"""
_TRIALS = 0.005
"""At most this part of the time goes to single draft tokens that test whether speculation has
become worthwhile.
"""
_MOST_RECORDED = 128
"""Up to this many tokens, the first step of a size may take longer, since it is recorded."""
_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 11, 15, 23, 31)
"""The numbers of draft tokens that a request may have in a step; only a few, since the first step
of a new size is slow.
"""
MAX_DRAFT_TOKENS = _NUMBERS[-1]
_MOST_CERTAIN = 0.998
"""The highest chance assumed for a draft token, even if all were right: a repetition ends at some
point.
"""


class StepTimeModel:
    """A step's time by its number of tokens: a straight line through the last few dozen steps
    without prompts.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Over the last steps, older ones counting less: 1, tokens, seconds, tokens squared, tokens
        * seconds.
        """
        self._last_end = float("-inf")
        self._seen: set[float] = set()
        """Numbers of tokens that steps have had so far."""
        self.share = _FIRST_SHARE
        """What one draft token for each request adds to the time of a step without draft tokens,
        as a part of that time.
        """
        self.num_requests = 1
        """Of the last step."""
        self.seconds = 0.01
        """The mean time of the last steps."""
        self._share = _FIRST_SHARE
        """The tokens' part of a step's time as last measured, used when the last steps all had the
        same size.
        """

    def observe(self, entry: StepLogEntry) -> None:
        """Takes in the time of a step that is over. Steps with prompts are left out: they say
        little about draft tokens.
        """
        step, result = entry.step, entry.result
        begin, self._last_end = max(step.now, self._last_end), entry.committed
        if result is None or not step.scheduled or step.admitted:
            return
        tokens = float(step.num_decodes)
        for one in step.scheduled[step.num_decodes :]:
            if not one.samples or one.num_tokens != 1 + len(one.draft_tokens):
                return
            tokens += one.num_tokens
        seconds = entry.committed - begin
        if tokens <= _MOST_RECORDED and tokens not in self._seen:
            self._seen.add(tokens)  # this step was recorded, which takes longer than computing it
            return
        if self._sums[0] > 4:
            base, slope, _ = self._line()
            seconds = min(seconds, _OUTLIER * (base + slope * tokens))
        found = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = [_FORGET * old + new for old, new in zip(self._sums, found, strict=True)]
        base, slope, variance = self._line()
        share = slope * tokens / max(base + slope * tokens, 1e-9)
        self._share += 0.2 * (share - self._share) * variance / (variance + _CERTAINTY)
        # an old measurement slowly loses its weight
        self._share += 0.001 * (_FIRST_SHARE - self._share)
        self.num_requests, self.seconds = len(step.scheduled), self._sums[2] / self._sums[0]
        share = _MARGIN * slope * self.num_requests / max(base + slope * self.num_requests, 1e-9)
        self.share = round(share, 3)  # few different values, for the cache of `best_number`

    def _line(self) -> tuple[float, float, float]:
        """The line: a step's time without tokens, the time of a token, and the variance of the
        numbers of tokens.
        """
        mean, seconds, squares, products = (one / self._sums[0] for one in self._sums[1:])
        variance = squares - mean * mean
        # The assumed share counts as a few measurements: times are noisy, and often all steps have
        # one size.
        slope = products - mean * seconds + _CERTAINTY * self._share * seconds / mean
        slope = min(max(slope / (variance + _CERTAINTY), 0.0), seconds / mean)
        return seconds - slope * mean, slope, variance


@lru_cache(10_000)
def best_number(chance: float, share: float) -> int:
    """How many draft tokens give the most tokens per second, if a draft token is right with this
    chance once all before it are, and adds this share to a step's time: where (1 + chance + chance
    ** 2 ...) / (1 + share * number) is largest.
    """
    best, most = 0, 1.0
    for number in _NUMBERS[1:]:
        speed = (1 - chance ** (number + 1)) / (1 - chance) / (1 + share * number)
        if speed <= most:
            break
        best, most = number, speed
    return best


class Acceptance:
    """How often one request's draft tokens have been right lately, and so how many are worth
    checking.
    """

    __slots__ = ("_right", "_skip", "_tried", "_wait", "chance", "num_right", "num_wrong")

    def __init__(self, chance: float = 0.7) -> None:
        self._right, self._tried = chance, 1.0  # as if one had been tried
        self.chance = chance
        """That the next draft token is right."""
        self.num_right = self.num_wrong = 0
        """All draft tokens so far that were right, and all steps that had a wrong one."""
        self._wait = 2
        """While draft tokens are not worthwhile: how many steps go without, before a single draft
        token is tried again.
        """
        self._skip = 0
        """How many of these steps are over."""

    def learn(self, num_right: int, num_wrong: int) -> None:
        right, wrong = num_right - self.num_right, num_wrong - self.num_wrong
        self.num_right, self.num_wrong = num_right, num_wrong
        self._right = self._right * 0.8 + right
        self._tried = self._tried * 0.8 + right + wrong
        before, chance = self.chance, min(self._right / self._tried, _MOST_CERTAIN)
        # few different values, for the cache of `best_number`
        self.chance = int(500 * chance + 0.5) / 500
        if self.chance > before + 0.1:  # draft tokens have become better: try again sooner
            self._wait = max(self._wait // 4, 2)

    def count(self, costs: StepTimeModel, most: int) -> int:
        """How many draft tokens the next step should check."""
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
        """After `count` gave 0: for how many steps (`most` at most) it would give 0 again, so that
        it isn't called.
        """
        times = min(self._wait - self._skip, most)
        self._skip += times
        return times
