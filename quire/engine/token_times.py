"""A promise of time: how many prompt tokens a step may compute so that whoever is being answered
gets the next token in time.

How long a step takes is a plane over its numbers of tokens and of pairs (a query and a key it
reads), fitted to the last few dozen steps. Times enter as everything else does, by the `now` of
calls, so a replay with the same times decides the same. Answers don't depend on any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

from quire.engine.config import SchedulerConfig
from quire.engine.request import Request
from quire.engine.step_plan import StepPlan
from quire.step import ScheduledRequest, Step, StepPromise

_KEPT = 64
"""Steps: the plane is fitted to the last ones."""
_AGES = tuple(0.97**age for age in range(_KEPT))
"""What a step counts beside the last one."""
_TRUST = 0.02
"""Weight of what was fitted before: it decides where the last steps were all alike."""
_PAIRS_OF_STEP = 65536.0
"""So many pairs are expected to take at most as long as a usual step, unless steps say otherwise. In
a few dozen steps pairs may hardly differ, or only as the tokens do: then noise alone makes a slope,
and steps with ten times as many pairs would be planned by it.
"""
_LEAST_NOISE = 0.03
"""Relative: steps are never held to be more regular than that."""
_RECENT = 15
"""Steps: the median of their errors is the usual one."""
_OUTLIER = 3.0
"""A step whose error is more than so many times the usual one was disturbed, or is of a size that is
not known well, and pulls the plane no more than if it were that many. If steps have become slower,
or estimates are wrong, the usual error grows at once and they are believed.
"""
_LEAST_OUTLIER = 0.05
"""A relative error that is believed always."""
_FIRST_OUTLIER = 1.0
"""The same of a step that had more or fewer tokens than any before: it may be the first to tell
what tokens take.
"""
_LOST = 1.0
"""A usual error beyond which a fit begins with the plane times what steps took of their estimates,
by the median: a first step that took a minute (kernels were compiled) is forgotten so.
"""
_NUM_PASSES = 2
"""Of a fit: the second one sees by the first which steps were disturbed."""
_FEW_STEPS = 20
"""Of which the first are learnt from one by one."""
_LOOK_EVERY = 16
"""Steps: how often estimates are compared with the times that steps took."""
_GOOD = 0.015
"""Estimates remain as they are if together they are within this part of these times."""
_ALONE = 0.5
"""If a plane that was fitted to so many steps alone has less than this part of the usual error of
one that was fitted to older ones, too, the older ones are forgotten: steps take another time now.
"""
_SKIPPED = 9
"""Steps of which nothing is noted then, for each that is."""
_REGULAR = 1.15
"""Times a step's estimate: only where no step that was not disturbed takes longer, one step shows
that all have become slower.
"""
_MOST_LOOKS = 8
"""Comparisons, after which the plane is fitted all the same."""
AIM = 0.9
"""The part of the promised time that a step is planned to take, if steps are as long as expected."""
_LEAST_AIM = 0.6
"""The same where they often are not: below it prompts would take too long."""
_MARGIN_STEPS = 64
"""The last steps that were promised: their errors decide how much is left free."""
_LATE = 2
"""Of these so many may take longer than the target."""
_SAME = 0.01
"""Promises that differ by less are alike."""
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

SeenStep = tuple[int, float, float, bool, bool]
"""Tokens, pairs and seconds of a step; whether it was promised to take some time, and whether it had
more or fewer tokens than any before.
"""
Plane = tuple[float, float, float]
"""Seconds of a step, of each token, of each pair."""
_position = itemgetter(2)
assert ScheduledRequest._fields[2:4] == ("start", "num_tokens")
assert StepPromise._fields[0] == "prompt_tokens"


class TokenTimes:
    """Learns how long steps take, and says how many prompt tokens the next one may compute."""

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.target_token_time is not None
        self._token_time = config.target_token_time
        self._first_token = config.target_first_token
        self._gives_way = config.gives_way
        self._kept: deque[SeenStep] = deque(maxlen=_KEPT)
        """The last steps."""
        self._new: list[SeenStep] = []
        """Those since estimates were last compared with times..."""
        self._look_after = 1
        """...which is done when there are so many."""
        self._num_looks = 0
        """Since the plane was fitted."""
        self._is_sure = False
        """Whether estimates were good when they were last compared..."""
        self._believed = 1.0
        """...with times up to so many times them: then not every step is looked at..."""
        self._num_skipped = 0
        """...and so many that come now are not."""
        self._num_seen = 0
        self._plane: Plane = (0.0, 0.0, 0.0)
        self._last_commit = float("-inf")
        self._most_tokens = 0
        self._least_tokens = float("inf")
        """Of any step so far."""
        self._promise = StepPromise(0, 0.0)
        """The last one, and what it was made for: ..."""
        self._planned: list[Request] = []
        """...decodes, ..."""
        self._promised_to: Request | None = None
        """...the first prompt. It stands..."""
        self._stands_until = -1
        """...until this step, with it."""
        self._errors: deque[float] = deque([1.0] * _MARGIN_STEPS, _MARGIN_STEPS)
        """Of the last steps that were promised: the time they took by that expected."""
        self.aim = AIM
        """The part of the promised time that a step is planned to take now."""

    def seconds(self, num_tokens: int, num_pairs: float) -> float:
        """How long such a step takes, by what is known now."""
        base, per_token, per_pair = self._plane
        return base + per_token * num_tokens + per_pair * num_pairs

    def observe(self, step: Step, now: float) -> None:
        """A step came back: it began when it was scheduled or when the one before it was done."""
        before, self._last_commit = self._last_commit, now
        if self._num_skipped:
            self._num_skipped -= 1
            return
        seconds = now - (step.now if step.now > before else before)
        if seconds <= 0 or not step.scheduled:
            return  # nobody tells the time
        num_tokens, num_pairs = work_of(step)
        if not self._least_tokens <= num_tokens <= self._most_tokens:
            # nothing was known about such steps
            self._most_tokens = max(self._most_tokens, num_tokens)
            self._least_tokens = min(self._least_tokens, num_tokens)
            self._new.append((num_tokens, num_pairs, seconds, False, True))
            self._learn()
            return
        self._new.append((num_tokens, num_pairs, seconds, step.promise is not None, False))
        if self._is_sure:
            base, per_token, per_pair = self._plane
            error = seconds / (base + per_token * num_tokens + per_pair * num_pairs)
            if 1 / self._believed <= error <= self._believed:
                self._num_skipped = _SKIPPED
            else:
                self._is_sure = False
        if len(self._new) == self._look_after:
            self._look()

    def _look(self) -> None:
        """Compares the estimates of the last steps with their times: where they were good, there is
        nothing to learn, and not every step need be looked at.
        """
        if self._num_seen < _FEW_STEPS:
            self._learn()
            return
        new = self._new
        estimates = _estimates(new, self._plane)
        self._errors += [
            seconds / expected
            for (_, _, seconds, was_promised, _), expected in zip(new, estimates, strict=True)
            if was_promised
        ]
        # so much is left free that few of the last steps would have missed the target
        self.aim = min(AIM, max(_LEAST_AIM, 1 / sorted(self._errors)[-1 - _LATE]))
        self._num_looks += 1
        is_good = self._misses(new, estimates) <= _GOOD
        knows_many = len(self._kept) == _KEPT  # of few, more can be learnt
        if not (is_good and knows_many and self._num_looks < _MOST_LOOKS):
            self._learn()
            return
        self._keep()
        if self._believed <= _REGULAR:
            self._is_sure, self._num_skipped = True, _SKIPPED

    def _misses(self, steps: Sequence[SeenStep], estimates: Sequence[float]) -> float:
        """By which part the estimates of these steps together differ from their times, where each
        time is believed only so far.
        """
        believed = 1 + max(_LEAST_OUTLIER, _OUTLIER * _usual_error(steps, estimates))
        self._believed = believed
        total = 0.0
        for (_, _, seconds, _, _), expected in zip(steps, estimates, strict=True):
            if seconds > expected:
                most = expected * believed
                total += seconds if seconds < most else most
            else:
                least = expected / believed
                total += seconds if seconds > least else least
        return abs(total / sum(estimates) - 1)

    def _keep(self) -> None:
        knew_few = self._num_seen < _FEW_STEPS
        self._kept += self._new
        self._num_seen += len(self._new)
        if knew_few and self._num_seen >= _FEW_STEPS and len(self._kept) == self._num_seen:
            self._kept.popleft()  # often slower than all others, and larger
        self._new = []
        self._stands_until = -1
        self._is_sure, self._num_skipped = False, 0
        self._look_after = 1 if self._num_seen < _FEW_STEPS else _LOOK_EVERY

    def _learn(self) -> None:
        """Fits the plane to the last steps; if these tell another plane than older ones, to them
        alone.
        """
        self._keep()
        self._num_looks = 0
        latest = list(islice(reversed(self._kept), _LOOK_EVERY))
        if not any(self._plane):
            tokens, _, seconds, _, _ = latest[0]
            self._plane = (seconds / 2, seconds / (2 * tokens), 0.0)
        scaled = _scaled(self._plane, latest)
        is_lost = _usual_error(latest, _estimates(latest, self._plane)) > _LOST
        self._plane = _fitted(self._kept, scaled if is_lost else self._plane)
        if len(self._kept) > len(latest):
            latest.reverse()
            alone = _fitted(latest, scaled)
            usual = _usual_error(latest, _estimates(latest, self._plane))
            if _usual_error(latest, _estimates(latest, alone)) < _ALONE * usual:
                self._kept.clear()
                self._kept += latest
                self._plane = alone

    def limit(self, plan: StepPlan, prompt: Request | None) -> None:
        """Promises how many prompt tokens the step may compute beside the decodes that it has, or
        alone, and leaves no more to be scheduled; `prompt` is the first that waits for more of its
        tokens.

        While the same requests decode beside the same prompt, a promise stands until it would be
        longer by `_SAME`.
        """
        if (
            plan.step_id > self._stands_until
            or prompt is not self._promised_to
            or plan.requests != self._planned
        ):
            self._promise, num_steps = self._promised(plan, prompt)
            self._stands_until = plan.step_id + num_steps
            self._promised_to = prompt
            self._planned = plan.requests.copy()
        plan.promise = promise = self._promise
        allowed = promise[0]
        if allowed < plan.budget:
            plan.left_out = plan.budget - allowed
            plan.budget = allowed

    def _promised(self, plan: StepPlan, prompt: Request | None) -> tuple[StepPromise, int]:
        """A new promise, and for how many more steps it stands."""
        num_decodes, most = len(plan.scheduled), plan.budget
        start = 0 if prompt is None else prompt.num_computed_tokens
        beside, per_token, per_pair = self._plane
        target = self._token_time
        if num_decodes:
            beside += per_token * num_decodes + per_pair * sum(map(_position, plan.scheduled))
            left = self.aim * target - beside
        else:
            target = min(max(target, beside / _ALONE_LOSS), MOST_ALONE * target)
            left = target - beside
        gave_way: str | None = None
        stands = self._first_token is None  # which gets nearer
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
                stands = False  # as that is known now
        if num_decodes + allowed > self._most_tokens:
            self._num_skipped = 0  # such a step is news
        if self._first_token is not None and prompt is not None:
            needed = self._needed(prompt, self._first_token, target, plan.now)
            if needed > allowed:
                gave_way = self._gives_way
                if gave_way == "token_time":
                    allowed = min(needed, most)
        seconds = beside + per_token * allowed + per_pair * allowed * (start + allowed / 2)
        num_steps = 0
        if stands:
            longer = per_pair * (num_decodes + allowed * allowed)
            same = _SAME * seconds
            num_steps = _LOOK_EVERY if longer * _LOOK_EVERY <= same else int(same / longer)
        return StepPromise(allowed, seconds, gave_way), num_steps

    @staticmethod
    def _needed(prompt: Request, first_token: float, step_time: float, now: float) -> int:
        """Tokens of this prompt that each step has to compute for its first token to come in time;
        0 if it has come.
        """
        if prompt.first_token is not None:
            return 0
        tokens = prompt.num_tokens - prompt.num_computed_tokens
        steps = max(1, int((prompt.arrival + first_token - now) / step_time))
        return -(-tokens // steps)


def work_of(step: Step) -> tuple[int, float]:
    """A step's tokens and pairs: each query with every key that it reads, but for windows."""
    num_tokens = step.num_decodes
    # the first entries compute one token each
    num_pairs = 0.5 * num_tokens + sum(map(_position, step.scheduled[:num_tokens]))
    for entry in step.scheduled[num_tokens:]:
        start, count = entry[2], entry[3]  # named, they would take longer
        num_tokens += count
        num_pairs += count * (start + count / 2)
    return num_tokens, num_pairs


def _estimates(steps: Sequence[SeenStep], plane: Plane) -> list[float]:
    """How long these steps take, by this plane."""
    base, per_token, per_pair = plane
    return [base + per_token * tokens + per_pair * pairs for tokens, pairs, _, _, _ in steps]


def _usual_error(steps: Sequence[SeenStep], estimates: Sequence[float]) -> float:
    """The median of the steps' relative errors."""
    errors = [
        seconds / expected if seconds > expected else expected / seconds
        for (_, _, seconds, _, _), expected in zip(steps, estimates, strict=True)
    ]
    errors.sort()
    return errors[len(errors) // 2] - 1


def _scaled(plane: Plane, steps: Sequence[SeenStep]) -> Plane:
    """The plane times what these steps took of its estimates, by the median: if all have become
    slower, this is where to begin.
    """
    base, per_token, per_pair = plane
    estimates = _estimates(steps, plane)
    ratios = sorted(step[2] / expected for step, expected in zip(steps, estimates, strict=True))
    ratio = ratios[len(ratios) // 2]
    return base * ratio, per_token * ratio, per_pair * ratio


def _fitted(steps: Sequence[SeenStep], plane: Plane) -> Plane:
    for _ in range(_NUM_PASSES):
        plane = _fit(steps, plane)
    return plane


def _fit(steps: Sequence[SeenStep], plane: Plane) -> Plane:
    """The plane with the least squares of relative errors, none of whose parts is negative.

    Disturbed steps, by `plane`, count less (after Huber: were they left out, rare large steps that
    are estimated badly would be, too); what these steps can't tell remains as it is there.
    """
    base, per_token, per_pair = plane
    latest = list(islice(reversed(steps), _RECENT))
    usual = _usual_error(latest, _estimates(latest, plane))
    believed = max(_LEAST_OUTLIER, _OUTLIER * usual)
    count = tokens = pairs = tokens2 = both = pairs2 = total = tokens_total = pairs_total = 0.0
    for (num_tokens, num_pairs, seconds, _, is_news), weight in zip(
        reversed(steps), _AGES, strict=False
    ):
        expected = base + per_token * num_tokens + per_pair * num_pairs
        error = (seconds / expected if seconds > expected else expected / seconds) - 1
        weight /= expected * expected
        if error > believed and not (is_news and error <= _FIRST_OUTLIER):
            weight *= believed / error
        weighted_tokens, weighted_pairs = weight * num_tokens, weight * num_pairs
        count += weight
        tokens += weighted_tokens
        pairs += weighted_pairs
        tokens2 += weighted_tokens * num_tokens
        both += weighted_tokens * num_pairs
        pairs2 += weighted_pairs * num_pairs
        total += weight * seconds
        tokens_total += weighted_tokens * seconds
        pairs_total += weighted_pairs * seconds
    # About their means, with a little trust in both slopes as they were.
    mean_tokens, mean_pairs = tokens / count, pairs / count
    trust_tokens = (_TRUST if per_token else 1e-9) * tokens2
    trust_pairs = (_TRUST if per_pair else 1e-9) * pairs2
    tokens2 += trust_tokens - mean_tokens * tokens
    both -= mean_tokens * pairs
    pairs2 += trust_pairs - mean_pairs * pairs
    tokens_total += trust_tokens * per_token - mean_tokens * total
    pairs_total += trust_pairs * per_pair - mean_pairs * total
    # And a pair is not expected to take longer than that, within the noise.
    most = total / count / _PAIRS_OF_STEP
    pairs2 += (max(_LEAST_NOISE, usual) / most) ** 2
    determinant = tokens2 * pairs2 - both * both
    per_token = (tokens_total * pairs2 - pairs_total * both) / determinant
    per_pair = (pairs_total * tokens2 - tokens_total * both) / determinant
    if per_pair < 0:
        per_token, per_pair = tokens_total / tokens2, 0.0
    if per_token < 0:
        per_token, per_pair = 0.0, max(0.0, pairs_total / pairs2)
    base = (total - per_token * tokens - per_pair * pairs) / count
    if base < 0:  # then all of it is the tokens'
        scale = total / (per_token * tokens + per_pair * pairs)
        return 0.0, per_token * scale, per_pair * scale
    return base, per_token, per_pair
