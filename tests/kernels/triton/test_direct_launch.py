"""Which compiled form of a kernel a direct launch takes, compared with what Triton itself picks.
Nothing is compiled here: that a launch is the same on a GPU, tests/gpu/test_direct_launch.py holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton.support import ON_GPU

import triton  # isort: skip  (after the check for Triton)
import triton.language as tl  # isort: skip
from triton.backends.compiler import GPUTarget  # isort: skip
from triton.runtime.jit import JITFunction, KernelInterface  # isort: skip
from quire.backends.triton import direct_launch  # isort: skip
from quire.backends.triton.direct_launch import DirectKernel  # isort: skip

pytestmark = pytest.mark.skipif(ON_GPU, reason="has a driver of its own")


@dataclass
class Launched:
    """A launch as the driver would see it."""

    form: object
    grid: tuple[int, ...]
    stream: int
    arguments: tuple[Any, ...]
    is_direct: bool


@dataclass
class Card:
    """A driver of a card that notes what is launched, by kernels that were never compiled."""

    device: int = 0
    stream: int = 7
    launched: list[Launched] = field(default_factory=list)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        assert device == self.device
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@dataclass
class Compiled:
    """A compiled form, which knows for what it was made."""

    form: object
    card: Card
    function = None
    packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.card.launched.append(Launched(self.form, (x, y, z), stream, rest[5:], False))

    def run_directly(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.card.launched.append(Launched(self.form, (x, y, z), stream, rest[9:], True))


def _body(x, other, plain, number, free, SIZE: tl.constexpr, WIDE: tl.constexpr):  # noqa: N803
    tl.store(x, number)


SPECIALIZED = {"do_not_specialize": ["free"], "do_not_specialize_on_alignment": ["plain"]}


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    made = Card()
    changes = pytest.MonkeyPatch()

    def compile(
        self: Any, key: str, signature: Any, device: int, constants: Any, *rest: Any
    ) -> Compiled:
        form = device, str(signature), str(constants), str(rest[0]), str(rest[1])
        return self.device_caches[device][0].setdefault(key, Compiled(form, made))

    changes.setattr(JITFunction, "_do_compile", compile)
    changes.setattr(
        direct_launch,
        "direct_form",
        lambda kernel: (kernel.run_directly, None, False, False, None),
    )
    changes.setattr(triton.runtime.driver, "_active", made)
    yield made
    changes.undo()


@pytest.fixture(scope="module")
def kernel(card: Card) -> DirectKernel:
    return DirectKernel(_body, **SPECIALIZED)


@pytest.fixture(scope="module")
def ordinary(card: Card) -> JITFunction[Any]:
    return JITFunction(_body, **SPECIALIZED)


MEMORY = torch.zeros(1024, dtype=torch.uint8)


def tensor(dtype: torch.dtype, offset: int) -> Tensor:
    """Some memory that begins so many numbers after a multiple of 16 bytes."""
    start = -MEMORY.data_ptr() % 16 + offset * dtype.itemsize
    return MEMORY[start : start + 64].view(dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    some = tensor(torch.bfloat16, 0)
    return {
        "x": some,
        "other": some,
        "plain": some,
        "number": 48,
        "free": 5,
        "SIZE": 64,
        "WIDE": False,
        "num_warps": 4,
        **changes,
    }


def last_of(card: Card, launch: Callable[..., None], grid: Any, given: dict[str, Any]) -> Launched:
    launch(grid, given)
    return card.launched.pop()


def direct(kernel: Any) -> Callable[..., None]:
    return lambda grid, given: kernel[grid](**given)


DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
TENSORS = st.builds(tensor, DTYPES, st.integers(0, 3))
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 16, 17, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, -(2**31), 2**31 + 16]),
    st.sampled_from([-(2**31) - 1, 2**63 - 1, 2**63, True, False, 1.0, 0.5, 16.0, None]),
    st.integers(-100, 1000),
)
LAUNCHES = st.fixed_dictionaries(
    {
        "x": TENSORS,
        "other": TENSORS,
        "plain": TENSORS,
        "number": NUMBERS,
        "free": NUMBERS,
        "SIZE": st.sampled_from([1, 64, 128]),
        "WIDE": st.booleans(),
    },
    optional={
        "num_warps": st.sampled_from([4, 8]),
        "num_stages": st.sampled_from([2, 3]),
        "maxnreg": st.sampled_from([None, 128]),
        "enable_fp_fusion": st.booleans(),
    },
)


@given(given_arguments=LAUNCHES, device=st.integers(0, 1))
def test_a_direct_launch_takes_the_form_that_triton_takes(
    given_arguments: dict[str, Any],
    device: int,
    card: Card,
    kernel: DirectKernel,
    ordinary: JITFunction[Any],
) -> None:
    card.device = device
    expected = last_of(card, direct(ordinary), (3, 2), given_arguments)
    assert not expected.is_direct
    for _ in range(2):  # the first may be Triton's own, the second is not
        found = last_of(card, direct(kernel), (3, 2), given_arguments)
        assert found.form == expected.form
        assert found.grid == (3, 2, 1)
        for name, got, wanted in zip(
            ("x", "other", "plain", "number", "free"),
            found.arguments,
            expected.arguments,
            strict=False,
        ):
            is_address = found.is_direct and isinstance(wanted, Tensor)
            assert got is (wanted) or got == (wanted.data_ptr() if is_address else wanted), name
    assert found.is_direct
    card.device = 0


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 1},
        {"number": 17},
        {"number": 48.0},
        {"number": 2**31},
        {"free": 2**31},
        {"free": True},
        {"x": tensor(torch.bfloat16, 1)},
        {"other": tensor(torch.bfloat16, 1)},
        {"x": tensor(torch.float16, 0)},
        {"plain": tensor(torch.float16, 0)},
        {"SIZE": 128},
        {"WIDE": True},
        {"num_warps": 8},
        {"enable_fp_fusion": False},
    ],
    ids=str,
)
def test_what_triton_tells_apart_is_another_form(changes: dict[str, Any], card: Card) -> None:
    kernel = DirectKernel(_body, **SPECIALIZED)
    before, after = arguments(), arguments(**changes)
    for _ in range(2):
        first = last_of(card, direct(kernel), (1,), before)
        second = last_of(card, direct(kernel), (1,), after)
    assert first.is_direct
    assert second.is_direct
    assert first.form != second.form


@pytest.mark.parametrize(
    "changes",
    [{"free": 1}, {"free": 16}, {"plain": tensor(torch.bfloat16, 1)}],
    ids=str,
)
def test_what_triton_is_told_not_to_tell_apart_is_one_form(
    changes: dict[str, Any], card: Card
) -> None:
    kernel = DirectKernel(_body, **SPECIALIZED)
    last_of(card, direct(kernel), (1,), arguments())
    found = last_of(card, direct(kernel), (1,), arguments(**changes))
    assert found.is_direct


def test_launches_are_on_the_current_stream_and_grids_may_differ(card: Card) -> None:
    kernel = DirectKernel(_body, **SPECIALIZED)
    last_of(card, direct(kernel), (1,), arguments())
    for grid, padded in (((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7))):
        card.stream += 1
        last_of(card, direct(kernel), grid, arguments())
        found = last_of(card, direct(kernel), grid, arguments())
        assert (found.grid, found.stream, found.is_direct) == (padded, card.stream, True)


def test_arguments_of_another_kind_are_launched_too(card: Card) -> None:
    kernel = DirectKernel(_body, **SPECIALIZED)
    for _ in range(3):
        for changes in ({}, {"other": None}, {"number": tensor(torch.int32, 0)}):
            found = last_of(card, direct(kernel), (1,), arguments(**changes))
    assert found.is_direct
    # a kind of grid and an option that only Triton knows
    given = arguments(debug=True)
    last_of(card, direct(kernel), (1,), given)
    assert not last_of(card, direct(kernel), (1,), given).is_direct
    assert not last_of(card, direct(kernel), lambda _: (1,), arguments()).is_direct


def test_forms_are_forgotten_before_they_fill_the_memory(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_launch, "_MOST_FORMS", 3)
    kernel = DirectKernel(_body, **SPECIALIZED)
    for number in range(100, 110):
        last_of(card, direct(kernel), (1,), arguments(number=number))
        assert last_of(card, direct(kernel), (1,), arguments(number=number)).is_direct
    assert not last_of(card, direct(kernel), (1,), arguments(number=100)).is_direct


def test_whoever_takes_launches_over_gets_them(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = DirectKernel(_body, **SPECIALIZED)
    last_of(card, direct(kernel), (1,), arguments())
    assert last_of(card, direct(kernel), (1,), arguments()).is_direct
    told: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(told.append)
    try:
        assert not last_of(card, direct(kernel), (1,), arguments()).is_direct
    finally:
        hook.remove(told.append)
    taken: list[object] = []
    monkeypatch.setattr(
        KernelInterface, "__getitem__", lambda kernel, grid: lambda **_: taken.append(kernel)
    )
    kernel[(1,)](**arguments())
    assert taken == [kernel]
    assert not card.launched
