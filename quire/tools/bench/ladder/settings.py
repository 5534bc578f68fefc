"""How much a climb measures: the full form and the quick one."""

from __future__ import annotations

from dataclasses import dataclass

from quire.tools.bench.jobs import Lengths


@dataclass(frozen=True, slots=True)
class ClimbSettings:
    """Sizes of the ladder's workload and of the experiments around it."""

    repeats: int = 3
    num_jobs: int = 6
    max_num_seqs: int = 3
    """How many of the ladder's requests run at once from rung 4 on; fewer than there are, so that
    some must wait.
    """
    shared_tokens: int = 48
    question: Lengths = Lengths(4, 12)
    answer: Lengths = Lengths(4, 12)
    hello_lengths: tuple[int, ...] = (50, 100, 200)
    prompt_lengths: tuple[int, ...] = (8, 64, 256)
    prompt_new_tokens: int = 8
    memory_sequences: int = 100
    max_model_len: int = 512
    batch_jobs: int = 100
    batch_repeats: int = 2
    batch_prompt: Lengths = Lengths(4, 32)
    batch_answer: Lengths = Lengths(2, 12)
    batch_seqs: int = 32
    system_tokens: int = 256
    chat_requests: int = 5
    attention_lengths: tuple[int, ...] = (256, 512, 1024)
    weights_prompt: int = 128
    weights_new_tokens: int = 32
    quality_windows: int = 8
    """How many windows of the text are read to measure quality, of `max_model_len` tokens each."""


FULL = ClimbSettings()
QUICK = ClimbSettings(
    repeats=2,
    answer=Lengths(2, 12),
    hello_lengths=(25, 50),
    prompt_lengths=(8, 128),
    prompt_new_tokens=4,
    batch_jobs=24,
    chat_requests=4,
    attention_lengths=(256, 512),
    weights_prompt=64,
    weights_new_tokens=16,
    quality_windows=1,
)
