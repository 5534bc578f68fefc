"""A server with OpenAI's API, tried from outside: what a client can change must not change an
answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.sampling_params import SamplingParams
from quire.tools.bench.http_client import HttpClient, HttpError
from quire.tools.verify.answers import Answer, Pair
from quire.tools.verify.cases import TEXT, Case
from quire.tools.verify.check import Report, Verdict, verify
from quire.tools.verify.subject import Answers, Axis, AxisComparison, Sizes

_WORDS = TEXT.split()
_TEMPERATURES = (0.0, 0.0, 0.8, 1.2)
_TOP = 3
_TRY_AGAIN = (429, 503)
"""A server that is busy says so: that is no answer, and no difference."""
_ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How requests are put to this server."""

    model: str
    route: str
    logprobs: bool

    def body(self, case: Case, stream: bool) -> dict[str, Any]:
        params = case.params
        text = " ".join(case.prompt)
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": params.temperature,
            "seed": params.seed,
        }
        body |= {"max_tokens": params.max_tokens, "stream": stream}
        if self.route == "chat":
            body["messages"] = [{"role": "user", "content": text}]
            return body | ({"logprobs": True, "top_logprobs": _TOP} if self.logprobs else {})
        return body | {"prompt": text} | ({"logprobs": _TOP} if self.logprobs else {})


class Server:
    """What can be tried of it."""

    def __init__(
        self, runner: asyncio.Runner, client: HttpClient, dialect: _Dialect, concurrency: int
    ) -> None:
        self._runner = runner
        self._client = client
        self._dialect = dialect
        self._concurrency = concurrency
        self._refused = 0
        self.sizes = Sizes(fewest=2, first=concurrency, most=concurrency, least=2)

    @property
    def notes(self) -> Sequence[str]:
        return (
            ()
            if self._dialect.logprobs
            else ("the server gives no logprobs: only text was compared",)
        )

    def draw(self, count: int, seed: int, is_first: bool) -> list[Case]:
        source = random.Random(seed)
        cases = []
        for number in range(count):
            start = source.randrange(len(_WORDS))
            length = source.choice((2, 6, 15, 40, 60))
            words = [_WORDS[(start + place) % len(_WORDS)] for place in range(length)]
            temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
            params = SamplingParams(
                temperature=temperature,
                seed=source.randrange(2**31),
                max_tokens=source.choice((8, 16, 24)),
            )
            cases.append(Case("sampled" if temperature else "greedy", tuple(words), params))
        return cases

    def reference(self, cases: Sequence[Case]) -> Answers:
        answers = self._run(self._one_by_one(cases, stream=False))
        for number, answer in enumerate(answers):
            if answer is None:
                raise HttpError(
                    f"request {number} was refused though it was alone: the server is busy with others"
                )
        return [[answer] for answer in answers if answer is not None]

    def axes(self) -> list[Axis]:
        return [
            Axis(
                "repeated",
                "alone, a second time",
                self._axis(lambda cases: self._one_by_one(cases, stream=False)),
            ),
            Axis(
                "streamed",
                "alone, as a stream",
                self._axis(lambda cases: self._one_by_one(cases, stream=True)),
            ),
            Axis("in a crowd", f"up to {self._concurrency} at once", self._axis(self._crowd)),
            Axis(
                "streamed in a crowd",
                "as streams, in another order",
                self._axis(self._streamed_crowd),
            ),
            Axis("beside others", "among long prompts that come and go", self._axis(self._beside)),
        ]

    def tidy(self) -> None:
        pass

    def _axis(
        self, run: Callable[[Sequence[Case]], Coroutine[Any, Any, list[Answer | None]]]
    ) -> Callable[[Sequence[Case], Answers], AxisComparison]:
        def compare(cases: Sequence[Case], alone: Answers) -> AxisComparison:
            got = self._run(run(cases))
            pairs = [
                Pair(number, 0, expected, answer)
                for number, ((expected,), answer) in enumerate(zip(alone, got, strict=True))
                if answer is not None
            ]
            refused = len(cases) - len(pairs)
            return AxisComparison(
                pairs, f"{refused} refused, not counted" if refused else "", bool(pairs)
            )

        return compare

    def _run(self, work: Coroutine[Any, Any, list[Answer | None]]) -> list[Answer | None]:
        return self._runner.run(work)

    async def _one_by_one(self, cases: Sequence[Case], stream: bool) -> list[Answer | None]:
        return [await self._ask(case, stream) for case in cases]

    async def _crowd(self, cases: Sequence[Case]) -> list[Answer | None]:
        return await self._at_once(cases, range(len(cases)), stream=False)

    async def _streamed_crowd(self, cases: Sequence[Case]) -> list[Answer | None]:
        return await self._at_once(cases, range(len(cases))[::-1], stream=True)

    async def _beside(self, cases: Sequence[Case]) -> list[Answer | None]:
        """Others ask long questions while these are answered."""
        long = replace(
            cases[0], prompt=tuple(_WORDS), params=replace(cases[0].params, max_tokens=4)
        )

        async def disturb() -> None:
            while True:
                await self._ask(long, stream=True)

        others = [asyncio.create_task(disturb()) for _ in range(2)]
        try:
            return await self._at_once(cases, range(len(cases)), stream=False)
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _at_once(
        self, cases: Sequence[Case], order: Sequence[int], stream: bool
    ) -> list[Answer | None]:
        slots = asyncio.Semaphore(self._concurrency)
        answers: list[Answer | None] = [None] * len(cases)

        async def ask(number: int) -> None:
            async with slots:
                answers[number] = await self._ask(cases[number], stream)

        async with asyncio.TaskGroup() as group:
            for number in order:
                group.create_task(ask(number))
        return answers

    async def _ask(self, case: Case, stream: bool) -> Answer | None:
        """None where the server is too busy to answer."""
        body = self._dialect.body(case, stream)
        path = _ROUTES[self._dialect.route]
        try:
            if not stream:
                return _read([await self._client.post_json(path, body)])
            return _read(
                [
                    json.loads(data)
                    async for data in self._client.events(path, body)
                    if data != b"[DONE]"
                ]
            )
        except HttpError as error:
            if error.status in _TRY_AGAIN:
                return None
            return Answer(end=f"error: {error}")


def verify_server(
    url: str,
    api_key: str | None,
    model: str | None,
    concurrency: int,
    seconds: float,
    seed: int,
    report: Report,
    **limits: Any,
) -> tuple[Verdict, Mapping[str, str]]:
    """What was found, and what there is to know about the server; `limits` as for `verify`."""
    with asyncio.Runner() as runner:
        client = HttpClient(url.removesuffix("/").removesuffix("/v1"), api_key)
        try:
            dialect = runner.run(_find_dialect(client, model))
            verdict = verify(
                Server(runner, client, dialect, concurrency), seconds, seed, report, **limits
            )
        finally:
            client.close()
    facts = {"server": f"{url}, model {dialect.model}, {_ROUTES[dialect.route]}"}
    return verdict, facts


async def _find_dialect(client: HttpClient, model: str | None) -> _Dialect:
    """The most that this server understands."""
    if model is None:
        listed = await client.get_json("/v1/models")
        try:
            model = str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise HttpError(
                "/v1/models: the server names no model; say which with --model"
            ) from None
    case = Case("probe", ("Hello",), SamplingParams(max_tokens=2, temperature=0.0, seed=1))
    first: HttpError | None = None
    for route in _ROUTES:
        for logprobs in (True, False):
            dialect = _Dialect(model, route, logprobs)
            try:
                answer = _read(
                    [await client.post_json(_ROUTES[route], dialect.body(case, stream=False))]
                )
            except HttpError as error:
                if error.status is None or error.status in (401, 403):
                    raise
                first = first or error
                continue
            return replace(dialect, logprobs=bool(answer.values.get("logprobs")))
    assert first is not None
    raise first


def _read(events: Sequence[Any]) -> Answer:
    """An answer, whole or from the pieces of a stream."""
    tokens: list[str] = []
    logprobs: list[float] = []
    top: list[float] = []
    text = ""
    end = None
    for event in events:
        if isinstance(event, dict) and event.get("error"):
            return Answer(end=f"error: {event['error']}")
        for choice in event.get("choices") or ():
            part = choice.get("message") or choice.get("delta") or {}
            text += choice.get("text") or part.get("content") or ""
            end = choice.get("finish_reason") or end
            found = choice.get("logprobs") or {}
            tokens += found.get("tokens") or [one["token"] for one in found.get("content") or ()]
            logprobs += found.get("token_logprobs") or [
                one["logprob"] for one in found.get("content") or ()
            ]
            for one in found.get("top_logprobs") or ():
                top += (one or {}).values()
            for one in found.get("content") or ():
                top += [other["logprob"] for other in one.get("top_logprobs") or ()]
    if not tokens:
        return Answer({"characters": list(text)}, end)
    return Answer(
        {"tokens": [*tokens], "logprobs": [*logprobs], "likely logprobs": [*top], "text": [text]},
        end,
    )
