"""How much a climb measures: the full form and the quick one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.benchmark.jobs import Lengths

HELLO = "Hello, I am a language model"


@dataclass(frozen=True, slots=True)
class ClimbSettings:
    """Sizes of the ladder's workload and of the experiments around it."""

    repeats: int
    num_jobs: int
    max_num_seqs: int
    """How many of the ladder's requests run at once from rung 4 on; fewer than there are, so that some must wait."""
    shared_tokens: int
    question: Lengths
    answer: Lengths
    hello_lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    prompt_new_tokens: int
    memory_sequences: int
    max_model_len: int
    batch_jobs: int
    batch_repeats: int
    batch_prompt: Lengths
    batch_answer: Lengths
    batch_seqs: int
    system_tokens: int
    chat_requests: int
    attention_lengths: tuple[int, ...]


FULL = ClimbSettings(
    repeats=3,
    num_jobs=6,
    max_num_seqs=3,
    shared_tokens=48,
    question=Lengths(4, 12),
    answer=Lengths(4, 12),
    hello_lengths=(50, 100, 200),
    prompt_lengths=(8, 64, 256),
    prompt_new_tokens=8,
    memory_sequences=100,
    max_model_len=512,
    batch_jobs=100,
    batch_repeats=2,
    batch_prompt=Lengths(4, 32),
    batch_answer=Lengths(2, 12),
    batch_seqs=32,
    system_tokens=256,
    chat_requests=5,
    attention_lengths=(256, 512, 1024),
)
QUICK = replace(
    FULL,
    repeats=2,
    answer=Lengths(2, 12),
    hello_lengths=(25, 50),
    prompt_lengths=(8, 128),
    prompt_new_tokens=4,
    batch_jobs=24,
    chat_requests=4,
    attention_lengths=(256, 512),
)
