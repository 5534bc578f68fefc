"""A model made of hashes: what a request's answer is all by itself, without any engine.

A token's state is the hash of its position, its value and the states of the tokens before it that
the groups of layers can see: all of them, those in a window or in the present chunk, and what
recurrent layers carry from chunk to chunk.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from quire.engine.block_key import KeyPart
from quire.engine.config import SchedulerConfig
from quire.sampling_params import SamplingParams
from quire.step import TokenLogprob


def token_state(position: int, token_id: int, context: Sequence[int], salt: int) -> int:
    """The fake model's keys and values of one token. They depend on the salt, as they would on an
    adapter, so sharing across salts shows.
    """
    return hash((position, token_id, salt, tuple(context)))


def state_after(before: int, records: Sequence[Sequence[int]]) -> int:
    """What the fake model's recurrent layers carry on from a chunk: from what was before it, and
    from its records.
    """
    return hash((before, tuple(map(tuple, records))))


class Memory:
    """What the fake model remembers of a sequence: by group of layers the states of its tokens, and
    what its recurrent layers carry.
    """

    def __init__(self, config: SchedulerConfig, states: list[list[int]], carried: int = 0) -> None:
        """`carried`: at the begin of the chunk in which `states` end."""
        self.states = states
        self._groups = config.groups
        self._chunk = None if config.state is None else config.state.chunk
        self._records = [
            own
            for own, group in zip(states, config.groups, strict=True)
            if group.keeps == "records"
        ]
        self._carried = carried
        self.made: dict[int, int] = {}
        """What is carried at the begin of chunks that began since, by their index."""

    def visible(self, position: int) -> list[int]:
        """What a token sees, if all before it were added."""
        seen: list[int] = []
        for own, group in zip(self.states, self._groups, strict=True):
            seen += own[group.first_token(position) : position]
        return seen if self._chunk is None else [*seen, self._carried]

    def add(self, state: int) -> None:
        """The next token's."""
        for own in self.states:
            own.append(state)
        length = len(self.states[0])
        if self._chunk is not None and length % self._chunk == 0:
            chunk = [own[length - self._chunk :] for own in self._records]
            self._carried = self.made[length // self._chunk] = state_after(self._carried, chunk)


def salt_number(params: SamplingParams) -> int:
    """The cache salt as a number that is the same in every process."""
    return -1 if params.cache_salt is None else zlib.crc32(params.cache_salt.encode())


def salts_of(
    params: SamplingParams, parts: Sequence[KeyPart], num_tokens: int, weights_version: int = 0
) -> list[int]:
    """By position: what a token's state depends on besides the tokens."""
    plain = salt_number(params)
    if weights_version:
        plain = hash((plain, weights_version))
    if not parts:
        return [plain] * num_tokens
    names = (
        [part.name for part in parts if part.start <= at and (part.end is None or at < part.end)]
        for at in range(num_tokens)
    )
    return [zlib.crc32(" ".join([str(plain), *own]).encode()) if own else plain for own in names]


def choose_token(
    state: int,
    seed: int,
    position: int,
    vocab_size: int,
    params: SamplingParams,
    eos: Sequence[int],
    num_output: int,
) -> int:
    """The token that follows, as a sampler would: a function of state, seed and position, with end
    and stop tokens masked below `min_tokens`.
    """
    allowed: Sequence[int] = range(vocab_size)
    if num_output < params.min_tokens:
        stops = params.end_token_ids(tuple(eos))
        allowed = [token for token in allowed if token not in stops] or allowed
    return allowed[hash((state, seed, position)) % len(allowed)]


def fake_score(state: int, token_id: int) -> TokenLogprob:
    """How likely the fake model holds a token to follow one of that state."""
    mixed = hash((state, token_id, 1))
    return TokenLogprob(token_id, -(mixed % 4096) / 64, 1 + mixed % 7)


def fake_vector(state: int) -> bytes:
    """What pooling gives with the fake model: the sum of the states, or the last one."""
    return str(state).encode()


def solo_states(
    prompt: Sequence[int],
    params: SamplingParams,
    config: SchedulerConfig,
    parts: Sequence[KeyPart] = (),
    weights_version: int = 0,
) -> list[int]:
    """The states of a prompt's tokens, without any engine."""
    memory = Memory(config, [[] for _ in config.groups])
    salts = salts_of(params, parts, len(prompt), weights_version)
    for position, token_id in enumerate(prompt):
        memory.add(token_state(position, token_id, memory.visible(position), salts[position]))
    return memory.states[0]


def solo_prompt_logprobs(
    prompt: Sequence[int],
    params: SamplingParams,
    config: SchedulerConfig,
    parts: Sequence[KeyPart] = (),
    weights_version: int = 0,
) -> list[TokenLogprob]:
    """The scores of a prompt's tokens from the second on, without any engine."""
    states = solo_states(prompt, params, config, parts, weights_version)
    return [
        fake_score(state, token_id) for state, token_id in zip(states, prompt[1:], strict=False)
    ]


def solo_run(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    eos: Sequence[int],
    vocab_size: int,
    config: SchedulerConfig,
    parts: Sequence[KeyPart] = (),
    weights_versions: Sequence[tuple[int, int]] = ((0, 0),),
) -> tuple[list[int], str]:
    """A request all by itself, without any engine: its answer and why it ended. Of the engine's
    settings only the longest sequence matters, and what the model's layers keep. Where other
    weights begin (`weights_versions`: the first token they draw, and their version) all that is
    known of the tokens so far is computed anew.
    """
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt) + params.max_tokens)
    stops = params.end_token_ids(tuple(eos))
    versions = dict(weights_versions)
    tokens = list(prompt)
    while True:
        if (version := versions.get(len(tokens) - len(prompt))) is not None:
            salts = salts_of(params, parts, limit, version)
            memory = Memory(config, [[] for _ in config.groups])
        for position in range(len(memory.states[0]), len(tokens)):
            memory.add(
                token_state(position, tokens[position], memory.visible(position), salts[position])
            )
        num_output = len(tokens) - len(prompt)
        token = choose_token(
            memory.states[0][-1], seed, len(tokens), vocab_size, params, eos, num_output
        )
        tokens.append(token)
        if token in stops and num_output >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"
