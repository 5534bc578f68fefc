"""Stop strings, found as the text comes and without giving away a part of one.

The match that is complete first ends the text; of several that are complete with the same
character, the longest. So the outcome depends on the text alone, not on how tokens cut it or on the
order of the strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """The strings as a tree of their beginnings (Aho and Corasick): reading a character costs the
    same, on average, for one string or sixty-four. Never changes, so many texts can be read with
    one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        """How much of the text read so far may yet become a stop string: a node's length, except
        where no string goes on.
        """
        self.match: list[str | None] = [None]
        """The longest stop string the text ends with at this node."""
        self.fallback = [0]
        """The node of the longest beginning that is a proper end of this one's."""
        for string in strings:
            node = 0
            for character in string:
                if character not in self.children[node]:
                    self.children[node][character] = len(self.children)
                    self.children.append({})
                    self.depth.append(self.depth[node] + 1)
                    self.match.append(None)
                    self.fallback.append(0)
                node = self.children[node][character]
            self.match[node] = string
        self._link()

    def next(self, node: int, character: str) -> int:
        """The node after one more character."""
        while character not in self.children[node]:
            if node == 0:
                return 0
            node = self.fallback[node]
        return self.children[node][character]

    def _link(self) -> None:
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            if self.match[node] is None:
                self.match[node] = self.match[self.fallback[node]]
            if not self.children[node]:
                self.depth[node] = self.depth[self.fallback[node]]
            for character, child in self.children[node].items():
                self.fallback[child] = self.next(self.fallback[node], character)
                queue.append(child)


@lru_cache(maxsize=64)
def stop_automaton(strings: tuple[str, ...]) -> StopAutomaton:
    """Made once for the answers and requests that share their stop strings."""
    return StopAutomaton(strings)


class StopMatcher:
    """Reads one answer's text piece by piece and lets through what can't be part of a stop string."""

    def __init__(self, automaton: StopAutomaton, include_match: bool) -> None:
        """`include_match`: the stop string stays in the text, so nothing has to be held back."""
        self._automaton = automaton
        self._include_match = include_match
        self._node = 0
        self._held = ""
        self.match: str | None = None
        """The stop string that ended the text; whatever comes after it is dropped."""

    def push(self, text: str, may_stop: bool = True) -> str:
        """What of the text so far is new and certain. A stop string that is complete while
        `may_stop` is false is text like any other.
        """
        if self.match is not None:
            return ""
        automaton, node = self._automaton, self._node
        for index, character in enumerate(text):
            node = automaton.next(node, character)
            match = automaton.match[node]
            if match is not None and may_stop:
                self.match = match
                known = self._held + text[: index + 1]
                self._held = ""
                return known if self._include_match else known[: len(known) - len(match)]
        self._node = node
        known = self._held + text
        keep = 0 if self._include_match else min(automaton.depth[node], len(known))
        self._held = known[len(known) - keep :]
        return known[: len(known) - keep]

    def finish(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held
