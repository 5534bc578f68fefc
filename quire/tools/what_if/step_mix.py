"""Steps by their size: which ones were measured, how far another is from those, and which are worth
a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire.step import Step

_TOLERANCE = 1.1
"""By so much a step may be larger than any that was measured, or smaller, and still be one of them."""
_WORTH = 0.005
"""Of the time outside: sizes with less are not worth a measurement."""


StepKind = tuple[bool, bool]


class StepMix(NamedTuple):
    """What is in a step."""

    answers: int
    """Rows of requests that take their next token; draft tokens are such rows, too."""
    prompts: int
    """Other requests: prompts and parts of them."""
    prompt_tokens: int

    @classmethod
    def of(cls, step: Step) -> StepMix:
        answers = prompts = prompt_tokens = 0
        for one in step.scheduled:
            if one.samples and one.num_tokens == 1 + len(one.draft_tokens):
                answers += one.num_tokens
            else:
                prompts += 1
                prompt_tokens += one.num_tokens
        return cls(answers, prompts, prompt_tokens)

    @property
    def tokens(self) -> int:
        return self.answers + self.prompt_tokens

    @property
    def requests(self) -> int:
        return self.answers + self.prompts

    def kind(self, graph_tokens: int | None) -> StepKind:
        """Whether there are prompts in it, and whether it is too large for a graph."""
        return (
            self.prompts > 0,
            graph_tokens is not None and self.prompts > 0 and self.tokens > graph_tokens,
        )


class SeenSteps:
    """The sizes that were measured: of steps of answers alone, which are computed in a way of their
    own (graphs, recorded calls), of others, and of those that are too large for a graph.
    """

    def __init__(self, shapes: Iterable[StepMix], graph_tokens: int | None = None) -> None:
        """`graph_tokens`: of the largest with a graph; None where nobody knows, or none has."""
        self._graph_tokens = graph_tokens
        self._ends: dict[StepKind, tuple[int, int]] = {}
        self.most_tokens = self.most_requests = 1
        for shape in shapes:
            kind = shape.kind(graph_tokens)
            tokens = shape.tokens
            low, high = self._ends.get(kind, (tokens, tokens))
            self._ends[kind] = min(low, tokens), max(high, tokens)
            self.most_tokens = max(self.most_tokens, tokens)
            self.most_requests = max(self.most_requests, shape.requests)

    def distance(self, shape: StepMix) -> float:
        """How often the size of a step was doubled, or halved, beyond any that was measured; 0
        within them.
        """
        ends = self._ends.get(shape.kind(self._graph_tokens))
        if ends is None:
            return max(1.0, math.log2(max(1.0, shape.tokens / self.most_tokens)))
        low, high = ends
        far = max(shape.tokens / high, low / shape.tokens, shape.requests / self.most_requests)
        return math.log2(far) if far > _TOLERANCE else 0.0


def add_seconds(
    some: Mapping[StepMix, float], more: Mapping[StepMix, float]
) -> dict[StepMix, float]:
    """Of both, by shape."""
    return {
        shape: some.get(shape, 0.0) + more.get(shape, 0.0)
        for shape in [*some, *(set(more) - set(some))]
    }


def mixes_to_measure(seconds: Mapping[StepMix, float], limit: int) -> list[StepMix]:
    """At most so many for each kind of step, out of those that take `seconds` in all: the largest
    and some about half, a quarter and so on as large, each the one of its size that takes the most
    time. The smallest first.
    """
    chosen: list[StepMix] = []
    least = _WORTH * sum(seconds.values())
    for kind in (False, True):
        own = [shape for shape in seconds if (shape.prompts > 0) is kind]
        largest = max((shape.tokens for shape in own), default=1)
        groups: dict[int, list[StepMix]] = {}
        for shape in own:
            groups.setdefault(math.floor(math.log2(largest / shape.tokens) + 0.5), []).append(shape)
        sums = {group: sum(seconds[shape] for shape in found) for group, found in groups.items()}
        worth = sorted(
            (group for group in groups if sums[group] >= least), key=lambda group: -sums[group]
        )[:limit]
        for group in worth:
            # So that the largest is within what was measured, and not beyond it.
            found = [one for one in groups[group] if group or one.tokens == largest]
            chosen.append(max(found, key=lambda shape: seconds[shape]))
    return sorted(chosen, key=lambda shape: (shape.tokens, shape))
