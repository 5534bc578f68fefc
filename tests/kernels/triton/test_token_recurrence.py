"""A candidate for the recurrence on a GPU, by the tests of the kernels in use."""

from __future__ import annotations

import pytest
import torch

from quire.tools.bench.gpu.token_recurrence import TokenRecurrence
from tests.kernels.triton import test_recurrent as in_use
from tests.kernels.triton.support import MARKS, ON_GPU
from tests.kernels.triton.test_recurrent import _on_device  # noqa: F401

pytestmark = [*MARKS, pytest.mark.slow]


@pytest.fixture(scope="module")
def kernels() -> TokenRecurrence:
    """For the tests below, in place of their own."""
    return TokenRecurrence(torch.float32)


test_it_may_be_divided = in_use.test_it_is_what_the_recurrence_gives_and_may_be_divided
test_rows_of_a_graph = in_use.test_rows_of_a_graph_find_those_before_them
if ON_GPU:  # they take the interpreter minutes
    test_all_lengths = in_use.test_all_lengths_are
    test_wide_heads = in_use.test_wide_heads_are
    test_any_division = in_use.test_bits_do_not_depend_on_how_tokens_are_divided_into_steps
    test_long_prompts = in_use.test_long_prompts_give_states_that_go_on
