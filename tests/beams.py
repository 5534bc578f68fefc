"""Beam search without an engine: whatever can tell how beams may go on is asked directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.frontend.beam_search import Beam, BeamSearchParams, Continuations, beam_steps

Expand = Callable[[Sequence[tuple[int, ...]]], Sequence[Continuations]]


def search_beams(params: BeamSearchParams, expand: Expand) -> list[Beam]:
    """The best beams, the best first."""
    steps = beam_steps(params)
    live = next(steps)
    while True:
        try:
            live = steps.send(expand(live))
        except StopIteration as end:
            found: list[Beam] = end.value
            return found
