"""Which adapter lies in which slot, whatever requests come, end and are preempted: a row's slot always
holds the adapter of the row's request, as the steps of a true scheduler tell it.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from quire.engine import Scheduler, SchedulerConfig, make_requests
from quire.models.adapters import Adapter, AdapterLoader
from quire.models.decoder import Decoder
from quire.models.linear import AdapterPart
from quire.runner.adapters import NO_ADAPTER, AdapterSlots
from quire.sampling_params import ResolvedTokens, SamplingParams
from quire.step import Step, StepResult

ROWS, SLOTS = 5, 3
PRODUCT = "product"


class Product:
    """What lies in each slot of one product."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def take_adapters(self, kernels: object, num_slots: int) -> None:
        assert num_slots == SLOTS

    def put_adapter(self, slot: int, packed: str | None) -> None:
        assert 0 <= slot < SLOTS
        self.held.pop(slot, None)
        if packed is not None:
            self.held[slot] = packed


def make_slots(names: str) -> tuple[AdapterSlots, Product]:
    product = Product()
    decoder = SimpleNamespace(linears={PRODUCT: product}, kernels=None, has_files_weights=True)
    slots = AdapterSlots(cast(Decoder, decoder), SLOTS, ROWS, cast(AdapterLoader, None))
    for name in names:
        slots.load(Path(name), Adapter(name, {PRODUCT: cast(AdapterPart, name)}, rank=1))
    return slots, product


@pytest.mark.parametrize("seed", range(20))
def test_every_row_finds_the_adapter_of_its_request_in_its_slot(seed: int) -> None:
    source = random.Random(seed)
    names = "ABCDEF"
    slots, product = make_slots(names)
    engine = Scheduler(
        SchedulerConfig(
            num_blocks=200,
            max_num_seqs=ROWS,
            max_batched_tokens=64,
            max_model_len=128,
            max_loras=SLOTS,
        )
    )
    adapter_of: dict[int, str] = {}
    """By row."""
    met: set[tuple[str, int]] = set()
    for number in range(120):
        for name in source.sample(["", *names], source.randrange(3)):
            params = SamplingParams(max_tokens=source.randrange(1, 9), temperature=0)
            resolved = ResolvedTokens(adapter=name, adapter_name=name)
            request_id = f"{number}{name}"
            for request in make_requests(request_id, [1, 2, 3], params, 0, resolved=resolved):
                engine.add(request, 0.0)
        live = list(engine.table.requests)
        running = [one.request_id for one in engine.table.running]
        if running and source.random() < 0.2:
            engine.preempt(source.choice(running))
        elif live and source.random() < 0.1:
            engine.abort([source.choice(live)], 0.0)
        made: Step = engine.schedule(0.0)
        if made.is_empty:
            continue
        slots.apply(made)
        for one in (*made.preempted, *made.finished):
            adapter_of.pop(-1 if one.row is None else one.row, None)
        adapter_of |= {one.row: one.resolved.adapter for one in made.admitted}
        for row in range(ROWS):
            name = adapter_of.get(row, "")
            assert slots.of_row(row) == NO_ADAPTER or name, f"row {row} has no adapter"
            if name:
                assert product.held[slots.of_row(row)] == name
                met.add((name, slots.of_row(row)))
        found = slots.of_rows(np.arange(ROWS, dtype=np.int32))
        assert (found is None) == (not any(adapter_of.values()))
        tokens = {entry.request_id: (7,) for entry in made.scheduled if entry.samples}
        engine.commit(made, StepResult(made.step_id, tokens), 0.0)
    assert len(met) > SLOTS * 3  # they had other slots at other times
