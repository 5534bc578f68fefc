"""Masks that take long are computed beside the steps: rows without one are held back, and the
others go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.constrain.ahead import AheadMask, MaskCosts, MasksAhead
from quire.constrain.grammar import GrammarCompiler
from quire.constrain.masks import Constrainer
from quire.engine.core import EngineCore
from quire.engine.request import make_requests
from quire.engine.scheduler import Scheduler
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams, StructuredOutput
from quire.tools.simulate.fake_runner import FakeRunner
from tests.constrain.conftest import PADDING
from tests.engine.harness import config

WORDS = np.zeros(4, np.int32)


def test_a_grammar_is_cheap_when_several_masks_were() -> None:
    costs = MaskCosts()
    assert not costs.is_cheap  # nobody knows
    for _ in range(3):
        costs.note(0.0001)
    assert costs.is_cheap
    costs.note(0.5)
    assert not costs.is_cheap
    assert not costs.allows_draft_tokens
    for _ in range(100):
        costs.note(0.0001)
    assert costs.is_cheap


def test_a_row_is_held_until_its_mask_is_there() -> None:
    ahead, may_end = MasksAhead(), threading.Event()

    def compute() -> AheadMask:
        may_end.wait(60)
        return AheadMask(WORDS, "")

    assert ahead.held_rows() == frozenset()
    ahead.begin(3, compute)
    ahead.samples(5)
    assert ahead.held_rows() == {3, 5}
    assert 3 in ahead
    may_end.set()
    while 3 in ahead.held_rows():
        ahead.wait()
    assert ahead.held_rows() == {5}
    assert ahead.take(3)[0] is WORDS
    assert 3 not in ahead
    ahead.drew(5)
    assert ahead.held_rows() == frozenset()
    ahead.close()


def test_a_mask_of_a_row_that_changed_hands_is_nobodys() -> None:
    ahead, may_end = MasksAhead(), threading.Event()
    ahead.begin(0, lambda: AheadMask(WORDS, str(may_end.wait(60))))
    ahead.drop(0)
    assert ahead.held_rows() == frozenset()
    ahead.begin(0, lambda: AheadMask(WORDS, "mine"))
    may_end.set()
    assert ahead.take(0)[1] == "mine"
    ahead.close()


class Hold:
    """Holds a row for some looks."""

    def __init__(self, row: int, looks: int) -> None:
        self.row, self.looks, self.waits = row, looks, 0

    def held_rows(self) -> frozenset[int]:
        self.looks -= 1
        return frozenset({self.row}) if self.looks >= 0 else frozenset()

    def wait_for_held(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("depth", [1, 2])
def test_others_go_on_while_a_row_is_held_and_its_tokens_are_the_same(depth: int) -> None:
    def run(held: Hold | None) -> tuple[dict[str, list[int]], list[set[str]]]:
        settings = config()
        steps: list[set[str]] = []
        core = EngineCore(
            Scheduler(settings),
            FakeRunner(settings, 50),
            depth,
            lambda entry: steps.append({one.request_id for one in entry.step.scheduled}),
            held=held,
        )
        for name in ("slow", "quick"):
            for request in make_requests(name, [1, 2, 3], SamplingParams(max_tokens=8), 0):
                core.add_request(request, 0.0)
        found: dict[str, list[int]] = {"slow": [], "quick": []}
        for turn in range(200):
            for update in core.step(float(turn)):
                found[update.request_id] += update.new_token_ids
            if not core.has_work:
                return found, steps
        raise AssertionError("it does not end")

    alone, _ = run(None)
    hold = Hold(row=0, looks=12)
    shared, steps = run(hold)
    assert shared == alone
    assert {"quick"} in steps or {"slow"} in steps
    assert hold.waits > 0  # when only held ones were left


def test_expensive_masks_come_ahead_and_are_the_same(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    masks = []
    for is_cheap in (False, True):
        constrainer = Constrainer(compiler, 2, tokenizer.vocab_size + PADDING, torch.device("cpu"))
        structured = StructuredOutput(regex="[ab]{40}")
        grammar = compiler.compile(structured)
        grammar.costs = MaskCosts()
        for _ in range(3 if is_cheap else 0):
            grammar.costs.note(0.0)
        constrainer.admit(1, structured)
        rows, token = np.array([1]), tokenizer.encode_plain("a")[0]
        found = []
        for _ in range(2):  # not so many that it is proven to be cheap
            constrainer.start(rows)
            mask = constrainer.masks(rows)
            assert mask is not None
            assert mask.errors == {}
            assert (1 in constrainer.held_rows()) is not is_cheap
            found.append(mask.words.clone())
            advanced = constrainer.advance(rows, [token], mask.epochs)
            assert advanced.errors == {}
            while constrainer.held_rows():
                constrainer.wait_for_held()
        masks.append(torch.cat(found))
        constrainer.close()
    assert torch.equal(masks[0], masks[1])
    assert masks[0].any()


def test_a_row_that_took_several_tokens_begins_with_the_mask_behind_the_last(
    tokenizer: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun behind each of them, a mask would be computed from a state that the next token changes."""
    begun: list[int] = []
    begin = MasksAhead.begin

    def note(self: MasksAhead, row: int, compute: Callable[[], AheadMask]) -> None:
        begun.append(row)
        begin(self, row, compute)

    monkeypatch.setattr(MasksAhead, "begin", note)
    constrainer = Constrainer(compiler, 2, tokenizer.vocab_size + PADDING, torch.device("cpu"))
    structured = StructuredOutput(regex="[ab]{3}c")
    compiler.compile(structured).costs = MaskCosts()  # so nobody knows that it is cheap
    constrainer.admit(1, structured)
    drawn = [tokenizer.encode_plain(letter)[0] for letter in "aba"]
    advanced = constrainer.advance(np.array([1, 1, 1]), drawn)
    assert advanced.errors == {}
    assert begun == [1]
    mask = constrainer.masks(np.array([1]))
    assert mask is not None
    allowed = np.unpackbits(mask.words.numpy().view(np.uint8), bitorder="little").nonzero()[0]
    assert allowed.tolist() == tokenizer.encode_plain("c")
    constrainer.close()
