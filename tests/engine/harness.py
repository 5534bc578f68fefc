"""An engine with the fake model, driven turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.block_manager import BlockManager
from quire.engine.config import SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.draft_tokens import Propose
from quire.engine.invariants import check_invariants
from quire.engine.request import Request, make_requests
from quire.engine.scheduler import Scheduler
from quire.observe.step_log import StepLog
from quire.sampling_params import SamplingParams
from quire.step import PromptLogprobs, RequestUpdate, Step
from quire.tools.simulate.fake_model import solo_run
from quire.tools.simulate.fake_runner import FakeRunner

VOCAB = 50


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "num_blocks": 33,
        "max_num_seqs": 4,
        "max_batched_tokens": 64,
        "max_model_len": 64,
        "block_size": 4,
    }
    return SchedulerConfig(**{**values, **changes})


class Harness:
    """Adds requests, runs turns, keeps every update, and compares answers with solo runs."""

    def __init__(
        self,
        settings: SchedulerConfig | None = None,
        depth: int = 1,
        eos: Sequence[int] = (),
        blocks: BlockManager | None = None,
        propose: Propose | None = None,
        **faults: Any,
    ) -> None:
        self.config = settings or config()
        self.eos = tuple(eos)
        self.scheduler = Scheduler(self.config, blocks, propose)
        self.runner = FakeRunner(self.config, VOCAB, **faults)
        self.log = StepLog()
        self.core = EngineCore(self.scheduler, self.runner, depth, self.log.append)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestUpdate] = {}
        self.prompt_logprobs: list[tuple[str, PromptLogprobs]] = []
        self.now = 0.0

    @property
    def steps(self) -> list[Step]:
        return [entry.step for entry in self.log]

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        seed: int = 0,
        caches_partial_block: bool = False,
        **params: Any,
    ) -> list[Request]:
        params.setdefault("max_tokens", 8)
        requests = make_requests(name, prompt, SamplingParams(**params), seed, self.eos)
        for request in requests:
            request.caches_partial_block = caches_partial_block
            self.core.add_request(request, self.now)
            check_invariants(self.scheduler)
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = []
        return requests

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            for update in self.core.step(self.now):
                self.tokens[update.request_id].extend(update.new_token_ids)
                if update.prompt_logprobs is not None:
                    self.prompt_logprobs.append((update.request_id, update.prompt_logprobs))
                if update.finish_reason is not None:
                    assert update.request_id not in self.ends
                    self.ends[update.request_id] = update
            check_invariants(self.scheduler)
            assert self.runner.violations == []

    def run(self, most: int = 500) -> None:
        while self.core.has_work:
            self.turn()
            most -= 1
            assert most > 0, "no end in sight"

    def reason(self, name: str) -> str | None:
        return self.ends[name].finish_reason

    def solo(self, name: str) -> tuple[list[int], str]:
        request = self.requests[name]
        return solo_run(
            request.prompt_token_ids,
            request.params,
            request.seed,
            self.eos,
            VOCAB,
            self.config,
            request.key_parts,
        )

    def check_answers(self, *names: str) -> None:
        """These requests (or all) ended by themselves, with the answers they would give alone."""
        for name in names or self.requests:
            assert (self.tokens[name], self.reason(name)) == self.solo(name)
