"""A promise of time: how many prompt tokens a step may compute so that whoever is being answered
gets the next token in time.

How long a step takes is a plane over its numbers of tokens and of pairs (a query and a key it
reads), fitted to the last few dozen steps. Times enter as everything else does, by the `now` of
calls, so a replay with the same times decides the same. Answers don't depend on any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter

from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.step import ScheduledRequest, Step, StepPromise

_FORGET = 0.95
"""Each step counts this much of the next one."""
_TRUST = 0.02
"""Weight of what was fitted before: it decides where the last steps were all alike."""
_NOISE = 4.0
"""What pairs seem to explain counts less the nearer it is to so many times the noise; below that,
not at all. In a few dozen steps pairs may hardly differ, or only as the tokens do: then noise alone
makes a slope, and steps with ten times as many pairs would be planned by it.
"""
_OUTLIER = 1.5
"""A step that took so many times the expected time, or less than that part of it, counts as this
long: it was disturbed. If steps have become slower, they are believed after some dozen.
"""
_FIRST_OUTLIER = 3.0
"""The same while little is known: of the first steps, and of those larger than any before."""
_FEW_STEPS = 17.0
"""Sum of the steps' weights, which tends to 20: the first 37 are few."""
_FIT_EVERY = 4
"""Steps: the fit takes longer than everything else here."""
AIM = 0.9
"""The part of the promised time that a step is planned to take, if steps are as long as expected."""
_LEAST_AIM = 0.6
"""The same where they often are not: below it prompts would take too long."""
_MARGIN_STEPS = 64
"""The last steps that were promised: their errors decide how much is left free."""
_LATE = 2
"""Of these so many may take longer than the target."""
_FIRST_PROMPT_TOKENS = 64
"""Planned for the first step, and at most twice the largest step so far after it: sizes that were
never seen are approached, not jumped at.
"""
LEAST_PROMPT_TOKENS = 16
"""Computed whatever was promised, so that prompts get on."""

_position = itemgetter(2)
assert ScheduledRequest._fields[2:4] == ("start", "num_tokens")


class TokenTimes:
    """Learns how long steps take, and says how many prompt tokens the next one may compute."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.target_token_time is not None
        self._token_time = config.target_token_time
        self._first_token = config.target_first_token
        self._gives_way = config.gives_way
        self._sums = (0.0,) * 10
        """Of the last steps: their number, tokens, pairs; tokens times tokens, tokens times pairs,
        pairs times pairs; seconds, and these times tokens, times pairs, times seconds.
        """
        self._new: list[tuple[int, float, float]] = []
        """Tokens, pairs and seconds of steps that are not among these yet."""
        self._plane = (0.0, 0.0, 0.0)
        """Seconds of a step, of each token, of each pair."""
        self._last_commit = float("-inf")
        self._most_tokens = 0
        """Of any step so far."""
        self._decoding: list[Request] = []
        """Those that decoded in the last step, and their pairs."""
        self._decoding_pairs = 0.0
        self._errors: deque[float] = deque([1.0] * _MARGIN_STEPS, _MARGIN_STEPS)
        """Of the last steps that were promised: the time they took by that expected."""
        self._num_errors = 0
        self.aim = AIM
        """The part of the promised time that a step is planned to take now."""

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """How long such a step takes, by what is known now."""
        base, per_token, per_pair = self._plane
        return base + per_token * num_tokens + per_pair * num_pairs

    def observe(self, step: Step, requests: list[Request], now: float) -> None:
        """A step of these requests came back: it began when it was scheduled or when the one before
        it was done.
        """
        began = max(step.now, self._last_commit)
        self._last_commit = now
        seconds = now - began
        if seconds <= 0 or not requests:
            self._decoding = []
            return  # nobody tells the time
        num_tokens = step.num_decodes
        decoding = requests if num_tokens == len(requests) else requests[:num_tokens]
        if decoding == self._decoding:  # each is a token further
            num_pairs = self._decoding_pairs = self._decoding_pairs + num_tokens
        else:
            num_pairs = self._decoding_pairs = _pairs_of(step.scheduled, num_tokens)
            self._decoding = decoding
        if num_tokens < len(requests):
            for _, _, start, count, *_ in step.scheduled[num_tokens:]:
                num_tokens += count
                num_pairs += count * (start + count / 2)
        base, per_token, per_pair = self._plane
        expected = base + per_token * num_tokens + per_pair * num_pairs
        is_known = self._sums[0] >= _FEW_STEPS and num_tokens <= self._most_tokens
        if expected > 0:
            if is_known and step.promise is not None:
                self._note_error(seconds / expected)
            outlier = _OUTLIER if is_known else _FIRST_OUTLIER
            if seconds > outlier * expected:
                seconds = outlier * expected
            elif seconds * outlier < expected:
                seconds = expected / outlier
        if num_tokens > self._most_tokens:
            self._most_tokens = num_tokens
        self._new.append((num_tokens, num_pairs, seconds))
        if not is_known or len(self._new) == _FIT_EVERY:
            self._learn()

    def _note_error(self, error: float) -> None:
        """Leaves so much of the target free that few of the last steps would have missed it."""
        self._errors.append(error)
        self._num_errors += 1
        if self._num_errors % _FIT_EVERY == 0:
            late = sorted(self._errors)[-1 - _LATE]
            self.aim = min(AIM, max(_LEAST_AIM, 1 / late))

    def _learn(self) -> None:
        """Takes the new steps into the sums, and fits the plane to these."""
        (
            count, tokens, pairs, tokens2, both, pairs2, total, tokens_total, pairs_total, total2,
        ) = self._sums  # fmt: skip
        for num_tokens, num_pairs, seconds in self._new:
            count = _FORGET * count + 1.0
            tokens = _FORGET * tokens + num_tokens
            pairs = _FORGET * pairs + num_pairs
            tokens2 = _FORGET * tokens2 + num_tokens * num_tokens
            both = _FORGET * both + num_tokens * num_pairs
            pairs2 = _FORGET * pairs2 + num_pairs * num_pairs
            total = _FORGET * total + seconds
            tokens_total = _FORGET * tokens_total + num_tokens * seconds
            pairs_total = _FORGET * pairs_total + num_pairs * seconds
            total2 = _FORGET * total2 + seconds * seconds
        self._new.clear()
        self._sums = (
            count, tokens, pairs, tokens2, both, pairs2, total, tokens_total, pairs_total, total2,
        )  # fmt: skip
        self._plane = self._fit()

    def _fit(self) -> tuple[float, float, float]:
        """The plane with the least squares, none of whose parts is negative; pairs count only for
        what noise does not explain.
        """
        (
            count, tokens, pairs, tokens2, both, pairs2, seconds, tokens_total, pairs_total, squared,
        ) = self._sums  # fmt: skip
        # The upper half of the three equations, with a little trust in each part as it was.
        squares = [count, tokens2, pairs2]
        totals = [seconds, tokens_total, pairs_total]
        for index, before in enumerate(self._plane):
            trust = _TRUST * squares[index] if before else 1e-9 * squares[index] + 1e-300
            squares[index] += trust
            totals[index] += trust * before
            squared += trust * before * before
        # Solved by elimination.
        by_tokens, by_pairs = tokens / squares[0], pairs / squares[0]
        squares[1] -= by_tokens * tokens
        squares[2] -= by_pairs * pairs
        both -= by_tokens * pairs
        totals[1] -= by_tokens * totals[0]
        totals[2] -= by_pairs * totals[0]
        by_both = both / squares[1]
        squares[2] -= by_both * both
        totals[2] -= by_both * totals[1]
        per_pair = totals[2] / squares[2]
        by_pairs_alone = per_pair * totals[2]
        if by_pairs_alone > 0:
            explained = totals[0] * totals[0] / squares[0] + totals[1] * totals[1] / squares[1]
            noise = max(0.0, squared - explained - by_pairs_alone) / count
            per_pair *= max(0.0, 1 - _NOISE * noise / by_pairs_alone)
        per_token = (totals[1] - both * per_pair) / squares[1]
        per_token, per_pair = max(per_token, 0.0), max(per_pair, 0.0)
        base = (seconds - per_token * tokens - per_pair * pairs) / count
        if base < 0:  # then all of it is the tokens'
            scale = seconds / (per_token * tokens + per_pair * pairs)
            return 0.0, per_token * scale, per_pair * scale
        return base, per_token, per_pair

    def promise(
        self, decodes: Sequence[ScheduledRequest], prompt: Request | None, now: float, most: int
    ) -> StepPromise:
        """How many prompt tokens may be computed beside these decodes; `prompt` is the first that
        waits for more of its tokens.
        """
        start = 0 if prompt is None else prompt.num_computed_tokens
        num_decodes, positions = len(decodes), float(sum(map(_position, decodes)))
        base, per_token, per_pair = self._plane
        beside = base + per_token * num_decodes + per_pair * positions
        left = self.aim * self._token_time - beside
        each = per_token + per_pair * start
        count = 0.0 if left <= 0 else float(most)
        if left > 0 and (each > 0 or per_pair > 0):
            # left = each * count + per_pair * count ** 2 / 2
            root = (each * each + 2 * per_pair * left) ** 0.5
            count = min(count, 2 * left / (each + root))
        least = min(LEAST_PROMPT_TOKENS, most)
        allowed = int(count)
        if allowed < least:
            allowed = least
        elif allowed > _FIRST_PROMPT_TOKENS:
            known = 2 * self._most_tokens - num_decodes
            allowed = min(allowed, max(known, _FIRST_PROMPT_TOKENS))
        gave_way: str | None = "first_token" if count < least else None
        needed = self._needed(prompt, now)
        if needed > allowed:
            gave_way = self._gives_way
            if gave_way == "token_time":
                allowed = min(needed, most)
        seconds = beside + per_token * allowed + per_pair * allowed * (start + allowed / 2)
        return StepPromise(allowed, seconds, gave_way)

    def _needed(self, prompt: Request | None, now: float) -> int:
        """Tokens of this prompt that each step has to compute for its first token to come in time;
        0 if nobody promised one.
        """
        if prompt is None or self._first_token is None or prompt.first_token is not None:
            return 0
        tokens = prompt.num_tokens - prompt.num_computed_tokens
        left = prompt.arrival + self._first_token - now
        steps = max(1, int(left / self._token_time))
        return -(-tokens // steps)


def work_of(step: Step) -> tuple[int, float]:
    """A step's tokens and pairs: each query with every key that it reads, but for windows."""
    num_tokens = step.num_decodes
    num_pairs = _pairs_of(step.scheduled, num_tokens)
    for _, _, start, count, *_ in step.scheduled[num_tokens:]:
        num_tokens += count
        num_pairs += count * (start + count / 2)
    return num_tokens, num_pairs


def _pairs_of(scheduled: Sequence[ScheduledRequest], num_decodes: int) -> float:
    """Of the first entries, which compute one token each."""
    return 0.5 * num_decodes + float(sum(map(_position, scheduled[:num_decodes])))
