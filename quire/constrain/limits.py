"""How much a grammar may cost. What exceeds a limit fails its own request and nobody else's.

Sizes of the texts themselves are checked in `quire.sampling_params`.
"""

from __future__ import annotations

MIB = 2**20

# Compiling is tried in a process of its own first, under these; see `check_child`.
COMPILE_CPU_SECONDS = 2.0
COMPILE_WALL_SECONDS = 10.0
"""For a machine so busy that the processor time above takes long to get."""
COMPILE_STACK = 4 * MIB
RUN_STACK = 1 * MIB
"""For a mask once it is compiled."""
ENGINE_STACK = 16 * MIB
"""What the engine compiles with. Like llguidance's own threads (2 MiB), it has room to spare beyond
what was tried out, so what did not overflow there won't here.
"""
COMPILE_MEMORY = 512 * MIB
"""Address space beyond what the process holds anyway: a hard stop, well above what is accepted."""
GRAMMAR_BYTES = 64 * MIB
"""Memory one compiled grammar may take."""

CACHE_ENTRIES = 128
CACHE_BYTES = 256 * MIB
VERDICTS = 4096
VERDICT_BYTES = 32 * MIB
"""Verdicts remembered, with the texts they are about: a grammar is tried out once, good or bad."""

# llguidance counts its work instead of its time, so these hold at every step of every request.
PARSER_LIMITS = {
    # States of the automaton that is built as text comes, about 1 KiB each, shared by a grammar's
    # requests.
    "max_lexer_states": 20_000,
    # About 15 ms of one core for one mask, met only by automata that keep growing.
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 500_000,
    "initial_lexer_fuel": 1_000_000,
}
