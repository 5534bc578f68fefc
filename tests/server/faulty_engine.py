"""The engine process with faults on demand: the file named by QUIRE_TEST_FAULT says what the next
steps, sends or allocations do.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from quire.assemble import Engine, build_engine
from quire.engine.block_pool import Block
from quire.server.link.engine_process import main
from quire.step import Step
from tests.server.countdown import break_sends, is_due

SECRET = "secret/path/of/this/machine"


def build_faulty_engine(*args: Any) -> Engine:
    engine = build_engine(*args)
    order = Path(os.environ["QUIRE_TEST_FAULT"])
    compute = engine.runner.submit

    def submit(step: Step) -> Any:
        text = order.read_text() if order.exists() else ""
        fault, _, count = text.partition(" ")
        if fault == "raise" and step.scheduled:
            left = int(count) - 1
            order.write_text(f"raise {left}" if left else "")
            raise RuntimeError(f"a fault in {SECRET} at 0x7f00deadbeef")
        if fault == "exit":
            order.unlink()
            os._exit(3)
        if fault == "lose_row" and step.scheduled:
            order.write_text("slow 0.02")
            engine.core.scheduler.table.free_rows.pop()
        if fault == "slow":
            time.sleep(float(count))
        return compute(step)

    engine.runner.submit = submit  # type: ignore[method-assign]
    pool = engine.core.scheduler.blocks.pool
    take_one = pool.take

    def take() -> Block | None:
        if is_due("take_raises"):
            raise MemoryError
        return None if is_due("take_none") else take_one()

    pool.take = take  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    break_sends("engine_send")
    sys.exit(main(build_faulty_engine))
