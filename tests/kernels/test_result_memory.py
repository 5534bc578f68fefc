"""Memory that is used again: nobody's numbers change while a tensor on them lives, and nothing is
lost.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Thread

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from quire.backends.cpu.memory import ResultMemory
from tests.long_runs import examples

_NUM_BYTES = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def _block() -> Tensor:
    return torch.empty(_NUM_BYTES, dtype=torch.uint8)


class Holders(RuleBasedStateMachine):
    """Tensors taken, given back, and held by a view alone, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.block = _block()
        self.memory = ResultMemory(self.block)
        self.held: list[tuple[Tensor, int]] = []
        """Tensors, and the number that all of theirs are."""
        self.next_number = 0

    @rule(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), dtype=st.sampled_from(_DTYPES))
    def take(self, shape: list[int], dtype: torch.dtype) -> None:
        was_empty = not self.held
        found = self.memory.empty(tuple(shape), dtype)
        if found is None:
            assert not was_empty or torch.Size(shape).numel() * dtype.itemsize >= _NUM_BYTES - 64
            assert self.memory.is_too_small
            return
        assert (found.shape, found.dtype) == (torch.Size(shape), dtype)
        assert found.numel() == 0 or found.data_ptr() % 64 == 0
        self.next_number = self.next_number % 100 + 1
        self.held.append((found.fill_(self.next_number), self.next_number))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep_a_view_alone(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        tensor, number = self.held[index]
        self.held[index] = tensor.flatten()[tensor.numel() // 2 :], number

    @rule()
    def let_all_go(self) -> None:
        """Then there is room for whatever fits the block."""
        self.held.clear()
        whole = self.memory.empty((_NUM_BYTES - 64,), torch.uint8)
        assert whole is not None

    @invariant()
    def numbers_are_those_written(self) -> None:
        low, high = self.block.data_ptr(), self.block.data_ptr() + _NUM_BYTES
        for tensor, number in self.held:
            assert bool((tensor == number).all())
            assert tensor.numel() == 0 or low <= tensor.data_ptr() <= high - tensor.nbytes


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_layers_that_are_alike_need_no_more_than_one() -> None:
    """A result is computed from the one before, which is then let go."""
    memory = ResultMemory(_block())
    last = memory.empty((256,), torch.float32)
    for _ in range(100):
        result = memory.empty((256,), torch.float32)
        assert result is not None
        last = result
    assert last is not None
    assert not memory.is_too_small


def test_tensors_may_end_in_another_thread() -> None:
    memory = ResultMemory(_block())
    handed_over: SimpleQueue[tuple[Tensor, int]] = SimpleQueue()
    wrong: list[int] = []

    def let_go() -> None:
        for _ in range(1000):
            tensor, number = handed_over.get()
            wrong.extend([number] * (not bool((tensor == number).all())))
            del tensor

    thread = Thread(target=let_go)
    thread.start()
    number = 0
    while number < 1000:
        found = memory.empty((64 * (1 + number % 3),), torch.int64)
        if found is None:
            time.sleep(1e-4)  # the other thread has them all
            continue
        number += 1
        handed_over.put((found.fill_(number), number))
        del found
    thread.join()
    assert wrong == []
    assert memory.empty((_NUM_BYTES - 64,), torch.uint8) is not None
