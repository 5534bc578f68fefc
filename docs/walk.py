"""Walks one request through Quire and prints what is there at every stop of
docs/life_of_a_request.md.

python docs/walk.py [MODEL] [TEXT]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor

from quire import LLM, SamplingParams
from quire.step import ScheduledRequest, StepLogEntry


def stop(file: str, what: str) -> None:
    print(f"\n{file}: {what}")


def show(**values: object) -> None:
    for name, value in values.items():
        print(f"    {name:22} {value}")


def walk(
    model: str = "smollm2", text: str = "The capital of France is", max_tokens: int = 3
) -> None:
    with LLM(model, kv_cache_memory="64MiB", max_num_seqs=4) as llm:
        engine, tokenizer = llm.engine, llm.engine.tokenizer
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        stop("quire/sampling_params.py", "what was asked for, checked when it was made")
        show(temperature=params.temperature, max_tokens=params.max_tokens, stop=params.stop)

        ids = llm.encode(text)
        stop("quire/frontend/tokenizer.py", "text becomes tokens")
        show(
            text=repr(text),
            token_ids=ids,
            pieces=[tokenizer.token_bytes(token_id) for token_id in ids],
        )

        name = llm.add_request(text, params)
        request = engine.core.scheduler.table.requests[name]
        stop("quire/engine/request.py", "a request waits")
        show(request_id=name, row=request.row, num_prompt_tokens=request.num_prompt_tokens)
        show(num_computed_tokens=request.num_computed_tokens)

        logits: list[Tensor] = []

        def observe(
            scheduled: Sequence[ScheduledRequest], positions: object, scores: Tensor
        ) -> None:
            logits.append(scores[0].float().cpu())

        engine.runner.observe_logits = observe
        seen = 0
        while llm.has_work:
            deltas = llm.step()
            for entry in list(engine.step_log)[seen:]:
                seen += 1
                if entry.step.scheduled:
                    show_step(llm, entry, logits.pop(0))
            for delta in deltas:
                stop("quire/frontend/detokenizer.py", "tokens become text")
                show(new_text=repr(delta.text))
                if delta.output is not None:
                    stop("quire/outputs.py", f"the request is finished: {delta.finish_reason}")
                    show(text=repr(delta.output.text), token_ids=delta.output.token_ids)
                    show(time_to_first_token=f"{delta.output.metrics.time_to_first_token:.3f} s")
        stop("quire/engine/block_pool.py", "all blocks are free again")
        pool = engine.core.scheduler.blocks.pool
        show(free=pool.num_free, in_all=engine.plan.num_blocks - 1)
        engine.runner.observe_logits = None


def show_step(llm: LLM, entry: StepLogEntry, logits: Tensor) -> None:
    """What was decided, computed and drawn in one step."""
    step, tokenizer = entry.step, llm.engine.tokenizer
    scheduled = step.scheduled[0]
    stop("quire/engine/scheduler.py", f"step {step.step_id} is decided")
    if step.admitted:
        show(
            admitted=f"row {step.admitted[0].row}, {step.admitted[0].num_cached_tokens} tokens from the cache"
        )
    last = scheduled.start + scheduled.num_tokens - 1
    show(
        computes=f"tokens {scheduled.start} to {last} of row {scheduled.row}",
        samples=scheduled.samples,
    )
    show(new_blocks=scheduled.new_block_ids, free_blocks=step.num_free_blocks)
    rows = llm.engine.runner._request_rows  # nobody else looks at them
    stop("quire/runner/request_rows.py", "the request's row on the device")
    blocks = -(-(last + 1) // llm.engine.plan.block_size)
    show(block_table=rows.block_tables[0, scheduled.row, :blocks].tolist())
    first = rows.block_tables[
        0, scheduled.row, scheduled.start // llm.engine.plan.block_size
    ].item()
    slot = first * llm.engine.plan.block_size + scheduled.start % llm.engine.plan.block_size
    show(first_slot=f"{slot} (block {first}, place {scheduled.start % llm.engine.plan.block_size})")
    count = scheduled.num_tokens
    stop(
        "quire/models/decoder.py",
        f"{count} tokens through {llm.info.num_layers} layers, the last one is scored",
    )
    values, best = logits.topk(3)
    known = [tokenizer.decode([one]) if one < tokenizer.vocab_size else "" for one in best.tolist()]
    shown = [f"{text!r} {value:.2f}" for value, text in zip(values.tolist(), known, strict=True)]
    show(logits=f"{len(logits)} of them, the largest: {', '.join(shown)}")
    assert entry.result is not None
    stop("quire/sampling/sampler.py", "a token is drawn")
    show(token_ids=entry.result.tokens[scheduled.request_id])


if __name__ == "__main__":
    walk(*sys.argv[1:3])
