"""A promise of time: how many prompt tokens a step may compute so that whoever is being answered
gets the next token in time.

How long a step takes is a plane over its numbers of tokens and of pairs (a query and a key it
reads), fitted to the last few dozen steps. Times enter as everything else does, by the `now` of
calls, so a replay with the same times decides the same. Answers don't depend on any of it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from operator import itemgetter

from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.engine.step_plan import StepPlan
from quire.engine.step_plane import Sums, fit_plane
from quire.step import ScheduledRequest, Step, StepPromise, new_tuple

_FORGET = 0.95
"""Each step counts this much of the next one."""
_RECENT = 15
"""Steps: the median of their errors is the usual one."""
_OUTLIER = 4.0
"""A step whose error is more than so many times the usual one was disturbed, and counts as if it
were that many. If steps have become slower, or estimates are wrong, the usual error grows at once
and they are believed.
"""
_LEAST_OUTLIER, _MOST_OUTLIER = 0.1, 3.0
"""Relative errors that are believed always and never."""
_FIRST_OUTLIER = 1.0
"""The same while little is known: of the first steps, and of those larger than any before."""
_LARGER = 1.5
"""A step with so many times the pairs of the last ones is rare, as is one of a size that is new: what a
plane through the others says of it is hardly an estimate.
"""
_RARE_ALONE = 1.5
"""A rare step that took less than expected by more than this factor counts as if it were that; beyond,
it is believed as far as the last rare one took less, too. A single one may have been disturbed, and
would bend the plane until the next one comes.
"""
_FEW_STEPS = 37
"""Of which the first are learnt from one by one."""
FIT_EVERY = 4
"""Steps that are looked at: the fit takes longer than everything else here."""
_SKIPPED = 31
"""Steps of the same requests that are not looked at after one that took as long as expected, while
estimates are good, and each takes about as long.
"""
_GOOD = 0.05
"""Estimates are: the last steps together took what was expected, but for this part, ..."""
_REGULAR = 0.15
"""...and single ones are usually as near to it as this. As soon as one is not, all are looked at."""
_DRIFT = 0.01
"""A promise stands until what was computed of the prompt since makes the step take this part of the
target longer.
"""
_MOST_UNREAD = 16
"""So many times these steps are kept until somebody wants to know."""
AIM = 0.9
"""The part of the promised time that a step is planned to take, if steps are as long as expected."""
_LEAST_AIM = 0.6
"""The same where they often are not: below it prompts would take too long."""
_MARGIN_EVERY = 16
"""Steps: how often that is looked at."""
_MARGIN_STEPS = 64
"""The last steps that were promised: their errors decide how much is left free."""
_LATE = 2
"""Of these so many may take longer than the target."""
_FIRST_PROMPT_TOKENS = 64
"""Planned for the first step, and at most twice the largest step so far after it: sizes that were
never seen are approached, not jumped at.
"""
LEAST_PART = 0.1
"""Of the promised time prompts get so much, and..."""
LEAST_PROMPT_TOKENS = 4
"""...so many tokens, however little decodes leave: so that prompts get on."""
_ALONE_LOSS = 0.05
"""A step without decodes is so long that of its time this part would be saved by a longer one..."""
MOST_ALONE = 4.0
"""...but at most so many times the promised time: whoever comes meanwhile waits for its end."""

SeenStep = tuple[int, float, float, bool, bool, bool]
"""Tokens, pairs and seconds of a step; whether there were enough of that size before, whether it has
many more pairs than the last ones, and whether it was promised.
"""
_INFINITY = float("inf")
_position = itemgetter(2)
assert ScheduledRequest._fields[2:4] == ("start", "num_tokens")
assert StepPromise._fields == ("prompt_tokens", "seconds", "gave_way")


class TokenTimes:
    """Learns how long steps take, and says how many prompt tokens the next one may compute."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.target_token_time is not None
        self._token_time = config.target_token_time
        self._first_token = config.target_first_token
        self._gives_way = config.gives_way
        self._sums: Sums = (0.0,) * 10
        """Of the last steps: their number, tokens, pairs; tokens times tokens, tokens times pairs,
        pairs times pairs; seconds, and these times tokens, times pairs, times seconds.
        """
        self._new: list[SeenStep] = []
        """The last steps."""
        self._unread: list[list[SeenStep]] = []
        """Steps before these which are not among the sums yet: after each list the plane is fitted."""
        self._num_seen = 0
        self._rare_part = 1.0
        """The time expected of the last step of a size that is rare, over the time it took."""
        self._plane = (0.0, 0.0, 0.0)
        """Seconds of a step, of each token, of each pair."""
        self._last_commit = -_INFINITY
        self._most_tokens = 0
        """Of any step so far."""
        self._usual_pairs = 0.0
        """Of the step with the most of the last ones, less the longer ago it was."""
        self._decoding: list[Request] = []
        """Those that decoded in the last step that was looked at, and their pairs in the one before
        the next that will be.
        """
        self._decoding_pairs = 0.0
        self._is_sure = False
        """Whether estimates are good. Then a step that took as long as expected is the last that is
        looked at for a while, ...
        """
        self._num_skipped = 0
        """...for so many, ..."""
        self._skipped: list[Request] = []
        """...if they are of the same requests, and take about as long."""
        self._least_skipped, self._most_skipped = 0.0, 0.0
        self._is_growing = False
        """Whether the prompt would have more tokens in a step if one as large had been seen."""
        self._promise = StepPromise(0, 0.0, None)
        """The last one; for how long, to whom, and beside which decodes it was made."""
        self._promised_from, self._promised_up_to = 0, -1.0
        """Tokens of the prompt; up to -1 while every promise is made anew."""
        self._promised_to: Request | None = None
        self._planned: list[Request] = []
        self._errors: deque[float] = deque([1.0] * _MARGIN_STEPS, _MARGIN_STEPS)
        """Of the last steps that were promised: the time they took by that expected."""
        self._num_errors = 0
        self._recent: deque[float] = deque([_LEAST_OUTLIER] * _RECENT, _RECENT)
        """Relative errors of the last steps."""
        self.aim = AIM
        """The part of the promised time that a step is planned to take now."""

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """How long such a step takes, by what is known now. Asking changes nothing: what is learnt
        when decides what is looked at, and so what is promised.
        """
        times = self._with_all_read() if self._unread else self
        base, per_token, per_pair = times._plane
        return base + per_token * num_tokens + per_pair * num_pairs

    def _with_all_read(self) -> TokenTimes:
        """A copy that has learnt from everything seen so far."""
        times = copy.copy(self)
        times._unread = self._unread.copy()
        times._errors, times._recent = self._errors.copy(), self._recent.copy()
        times._learn()
        return times

    def observe(self, step: Step, requests: list[Request], now: float) -> None:
        """A step of these requests came back: it began when it was scheduled or when the one before
        it was done. Unless it is news, it is learnt from when the next promise is made.
        """
        began, before = step.now, self._last_commit
        self._last_commit = now
        seconds = now - (began if began > before else before)
        if self._num_skipped:
            if requests == self._skipped and self._least_skipped < seconds < self._most_skipped:
                self._num_skipped -= 1
                return
            self._num_skipped, self._decoding = 0, []
        if not 0 < seconds < _INFINITY or not requests:
            self._decoding = []
            return  # nobody tells the time, or not forwards
        num_tokens = step.num_decodes
        decoding = requests if num_tokens == len(requests) else requests[:num_tokens]
        if decoding == self._decoding:  # each is a token further
            num_pairs = self._decoding_pairs = self._decoding_pairs + num_tokens
        else:
            num_pairs = self._decoding_pairs = _pairs_of(step.scheduled, num_tokens)
            self._decoding = decoding
        if num_tokens < len(requests):
            for entry in step.scheduled[num_tokens:]:
                start, count = entry[2], entry[3]  # named, they would take longer
                num_tokens += count
                num_pairs += count * (start + count / 2)
        self._num_seen += 1
        usual_pairs = _FORGET * self._usual_pairs
        is_larger = num_pairs > _LARGER * usual_pairs
        self._usual_pairs = usual_pairs if usual_pairs > num_pairs else num_pairs
        is_known = self._num_seen > _FEW_STEPS
        if num_tokens > self._most_tokens:
            self._most_tokens = num_tokens
            is_known = False
        was_promised = step.promise is not None
        self._new.append((num_tokens, num_pairs, seconds, is_known, is_larger, was_promised))
        if self._is_sure:
            base, per_token, per_pair = self._plane
            expected = base + per_token * num_tokens + per_pair * num_pairs
            error = seconds / expected
            if not is_known or not 1 - _REGULAR < error < 1 + _REGULAR:
                self._is_sure = False
            elif not self._is_growing or step.num_decodes == len(requests):
                self._num_skipped, self._skipped = _SKIPPED, requests
                self._least_skipped = (1 - _REGULAR) * expected
                self._most_skipped = (1 + _REGULAR) * expected
                self._decoding_pairs += _SKIPPED * step.num_decodes
        if not is_known or len(self._new) == FIT_EVERY:
            self._unread.append(self._new)
            self._new = []
            self._promised_up_to = -1.0
            if not is_known or len(self._unread) == _MOST_UNREAD:
                self._learn()

    def _learn(self) -> None:
        """Takes what was seen since into the sums, and fits the plane to these."""
        for steps in self._unread:
            self._sums = self._sums_with(steps)
            self._plane = fit_plane(self._sums, self._plane)
        self._unread.clear()

    def _sums_with(self, steps: list[SeenStep]) -> Sums:
        (
            count, tokens, pairs, tokens2, both, pairs2, total, tokens_total, pairs_total, total2,
        ) = self._sums  # fmt: skip
        base, per_token, per_pair = self._plane
        usual = sorted(self._recent)[_RECENT // 2]
        believed = 1 + min(max(_OUTLIER * usual, _LEAST_OUTLIER), _MOST_OUTLIER)
        all_seconds = all_expected = 0.0
        for num_tokens, num_pairs, seconds, is_known, is_larger, was_promised in steps:
            expected = base + per_token * num_tokens + per_pair * num_pairs
            if expected > 0:
                most = believed if is_known else 1 + _FIRST_OUTLIER
                least = most
                if is_larger or (not is_known and self._num_seen > _FEW_STEPS):
                    part = expected / seconds
                    least = max(believed, _RARE_ALONE, min(part, self._rare_part))
                    self._rare_part = part
                if is_known:
                    error = seconds / expected
                    self._recent.append((error if error > 1 else expected / seconds) - 1)
                    if was_promised:
                        self._note_error(error)
                if seconds > most * expected:
                    seconds = most * expected
                elif seconds * least < expected:
                    seconds = expected / least
            all_seconds += seconds
            all_expected += expected
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
        self._is_sure = (
            self._num_seen > _FEW_STEPS
            and usual < _REGULAR
            and abs(all_seconds - all_expected) < _GOOD * all_expected
        )
        return (
            count, tokens, pairs, tokens2, both, pairs2, total, tokens_total, pairs_total, total2,
        )  # fmt: skip

    def _note_error(self, error: float) -> None:
        """Leaves so much of the target free that few of the last steps would have missed it."""
        self._errors.append(error)
        self._num_errors += 1
        if self._num_errors % _MARGIN_EVERY == 0:
            late = sorted(self._errors)[-1 - _LATE]
            self.aim = min(AIM, max(_LEAST_AIM, 1 / late))

    def limit(self, plan: StepPlan, prompt: Request | None) -> None:
        """Promises how many prompt tokens the step may compute beside the decodes that it has, or
        alone, and leaves no more to be scheduled; `prompt` is the first that waits for more of its
        tokens. While the same requests decode beside the same prompt, a promise stands for a few
        steps if there is nothing new to learn from.
        """
        if (
            prompt is not self._promised_to
            or prompt is None
            or not self._promised_from <= prompt.num_computed_tokens <= self._promised_up_to
            or plan.requests != self._planned
        ):
            self._renew_promise(plan, prompt)
        promise = self._promise
        plan.promise = promise
        allowed = promise[0]  # named, it would take longer
        if allowed < plan.budget:
            plan.left_out += plan.budget - allowed
            plan.budget = allowed

    def _renew_promise(self, plan: StepPlan, prompt: Request | None) -> None:
        self._promise = self._promised(plan, prompt)
        self._promised_to = prompt
        self._planned = plan.requests.copy()
        self._promised_up_to = -1.0
        if prompt is not None and self._first_token is None:
            more = self._plane[2] * self._promise.prompt_tokens
            drift = _DRIFT * self._token_time / more if more > 0 else _INFINITY
            self._promised_from = prompt.num_computed_tokens
            self._promised_up_to = self._promised_from + drift

    def _promised(self, plan: StepPlan, prompt: Request | None) -> StepPromise:
        if self._unread:
            self._learn()
        self._is_growing = False
        decodes, most = plan.scheduled, plan.budget
        start = 0 if prompt is None else prompt.num_computed_tokens
        num_decodes = len(decodes)
        beside, per_token, per_pair = self._plane
        target = self._token_time
        if num_decodes:
            positions = float(sum(map(_position, decodes)))
            beside += per_token * num_decodes + per_pair * positions
            left = self.aim * target - beside
        else:
            target = min(max(target, beside / _ALONE_LOSS), MOST_ALONE * target)
            left = target - beside
        gave_way: str | None = None
        if left < LEAST_PART * target:
            left, gave_way = LEAST_PART * target, "first_token"
        each = per_token + per_pair * start
        allowed = most
        if each > 0 or per_pair > 0:
            # left = each * allowed + per_pair * allowed ** 2 / 2
            fits = 2 * left / (each + (each * each + 2 * per_pair * left) ** 0.5)
            least = LEAST_PROMPT_TOKENS if most > LEAST_PROMPT_TOKENS else most
            if fits < least:
                fits, gave_way = least, "first_token"
            if fits < most:
                allowed = int(fits)
        if allowed > _FIRST_PROMPT_TOKENS:
            known = 2 * self._most_tokens - num_decodes
            if allowed > known:
                allowed = max(known, _FIRST_PROMPT_TOKENS)
                if prompt is not None and prompt.num_tokens - start > allowed:
                    self._is_growing, self._num_skipped, self._decoding = True, 0, []
        if self._first_token is not None and prompt is not None:
            needed = self._needed(prompt, self._first_token, target, plan.now)
            if needed > allowed:
                gave_way = self._gives_way
                if gave_way == "token_time":
                    allowed = min(needed, most)
        seconds = beside + per_token * allowed + per_pair * allowed * (start + allowed / 2)
        return new_tuple(StepPromise, (allowed, seconds, gave_way))

    @staticmethod
    def _needed(prompt: Request, first_token: float, step_time: float, now: float) -> int:
        """Tokens of this prompt that each step has to compute for its first token to come in time;
        0 if it has come.
        """
        if prompt.first_token is not None:
            return 0
        tokens = prompt.num_tokens - prompt.num_computed_tokens
        steps = max(1, int(min(tokens, (prompt.arrival + first_token - now) / step_time)))
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
