"""A request between its first and last token, on the caller's side of the engine: token ids become
text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.constrain import Grammar
from quire.engine import Request
from quire.frontend.channel_text import ChannelText, writes_channels
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.stop_strings import StopMatcher, stop_automaton
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tool_calls.harmony import SPECIAL_MARK
from quire.outputs import Completion, Logprob, RequestDelta, RequestOutput, TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.step import PromptLogprobs, RequestMetrics, RequestUpdate, TokenLogprob


class AnswerText:
    """One of the answers, as far as it has come."""

    __slots__ = (
        "channels",
        "detokenizer",
        "logprobs",
        "matcher",
        "params",
        "pieces",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        continued: Sequence[int],
        params: SamplingParams,
        seed: int,
        mark: str,
        channels: ChannelText | None = None,
        keeps_text: bool = True,
    ) -> None:
        """Without `keeps_text`, its text is known to who reads its pieces alone."""
        self.channels = channels
        # Spaces between special tokens need no switch: no decoder that `Tokenizer` accepts puts any
        # there.
        skip_special_tokens = params.skip_special_tokens and channels is None
        self.detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, continued, mark)
        self.matcher: StopMatcher | None = None
        if params.stop:
            self.matcher = StopMatcher(
                stop_automaton(params.stop), params.include_stop_str_in_output
            )
        self.params = params
        self.seed = seed
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.pieces: list[str] | None = [] if keeps_text else None

    @property
    def stop_string(self) -> str | None:
        """The stop string its text has come to."""
        return self.matcher.match if self.matcher is not None else None

    def grow(self, token_ids: Sequence[int]) -> str:
        """`read` for an answer without stop strings and logprobs that goes on: the text that is
        certain now.
        """
        push = self.detokenizer.push
        text = push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))
        self.token_ids += token_ids
        if text and self.pieces is not None:
            self.pieces.append(text)
        return text

    def read(self, update: RequestUpdate) -> tuple[int, str]:
        """Takes tokens in until a stop string is complete: how many, and the text that is certain
        now.
        """
        text, count = "", 0
        for count, token_id in enumerate(update.new_token_ids, start=1):
            self.token_ids.append(token_id)
            is_last = count == len(update.new_token_ids)
            if (
                is_last
                and update.stop_token_id is not None
                and not self.params.include_stop_str_in_output
            ):
                break
            piece = self.detokenizer.push(token_id)
            may_stop = len(self.token_ids) > self.params.min_tokens
            text += piece if self.matcher is None else self.matcher.push(piece, may_stop)
            if self.stop_string is not None:
                break
        self.logprobs += update.logprobs[:count]
        if update.finish_reason is not None and self.stop_string is None:
            rest = self.detokenizer.finish()
            # A character that was never completed is no place to stop.
            text += (
                rest
                if self.matcher is None
                else self.matcher.push(rest, may_stop=False) + self.matcher.finish()
            )
        if self.channels is not None:
            is_last = self.stop_string is not None or update.finish_reason is not None
            is_whole = self.stop_string is None and update.finish_reason == "stop"
            text = self.channels.read(text, is_last, is_cut=not is_whole)
        if text and self.pieces is not None:
            self.pieces.append(text)
        return count, text


class LiveRequest:
    """Collects the updates of one request (all its answers) into deltas and, at last, an output."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        requests: Sequence[Request],
        params: SamplingParams,
        tokenizer: Tokenizer,
        continues_prompt: bool,
        deltas_only: bool = False,
        special_mark: str = "",
    ) -> None:
        """`params` as the caller gave them; `continues_prompt`: the answer goes on with the
        prompt's text, as opposed to a chat's new turn; `deltas_only`: outputs need not repeat the
        text and logprobs of deltas and prompt, which for long ones takes long to write (`best_of`
        shows no deltas: its outputs have them), and whoever reads the deltas takes their text
        apart; `special_mark` stands before special tokens in the text.
        """
        self.request_id = request_id
        self.names = [request.request_id for request in requests]
        self.grammar: Grammar | None = None
        """Of structured output; whoever holds one keeps it compiled."""
        self.unread: deque[RequestDelta] | None = None
        """Deltas in order, kept only for a request that is being streamed."""
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._params = params
        self._deltas_only = deltas_only
        self._tokenizer = tokenizer
        continued = prompt_token_ids if continues_prompt else ()
        # Without control tokens nobody could tell channels apart. Under a grammar there are none,
        # unless it names them.
        is_free = params.structured is None or bool(params.structured.control_tokens)
        is_read = params.skip_special_tokens and not continues_prompt and not deltas_only
        in_channels = is_read and is_free and writes_channels(tokenizer)
        mark = SPECIAL_MARK if in_channels else special_mark
        self._answers = [
            AnswerText(
                tokenizer,
                continued,
                params,
                one.seed,
                mark,
                ChannelText() if in_channels else None,
                keeps_text=not deltas_only or params.best_of is not None,
            )
            for one in requests
        ]
        self._completions: list[Completion | None] = [None] * len(requests)
        self._prompt_logprobs: dict[int, TokenLogprob] = {}

    def take_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """Logprobs of prompt positions, from whichever answer computed them; some may come
        again.
        """
        self._prompt_logprobs.update(enumerate(found.logprobs, start=found.start))

    def advance(
        self, index: int, update: RequestUpdate, end: Callable[[], RequestMetrics]
    ) -> RequestDelta:
        """Takes in what the engine reported of answer `index`. If a stop string is complete with
        it, `end` is called, which ends the answer in the engine.
        """
        answer = self._answers[index]
        count, text = answer.read(update)
        if answer.stop_string is not None and update.finish_reason is None:
            update = update._replace(metrics=end())
        if answer.stop_string is not None:
            update = update._replace(finish_reason="stop", error=None)
            if update.metrics is not None and update.metrics.num_output_tokens != len(
                answer.token_ids
            ):
                # Several tokens came at once, and the stop string ended before the last of them.
                update = update._replace(
                    metrics=replace(update.metrics, num_output_tokens=len(answer.token_ids))
                )
        if update.finish_reason is not None:
            self._completions[index] = self._complete(index, answer, update)
        token_ids, reason = update.new_token_ids[:count], update.finish_reason
        logprobs = (
            ()
            if self._params.logprobs is None
            else tuple(map(self._spell, update.logprobs[:count]))
        )
        delta = RequestDelta(
            self.request_id, index, text, token_ids, logprobs, reason, self._output()
        )
        if self.unread is not None:
            self.unread.append(delta)
        return delta

    def text_of(self, index: int) -> AnswerText:
        """One answer, for who need not know more of it than its text (`AnswerText.grow`)."""
        return self._answers[index]

    def stop_reason(self, index: int) -> str | int | None:
        """The stop string or token that ended an answer; None while it runs."""
        completion = self._completions[index]
        return None if completion is None else completion.stop_reason

    def metrics_of(self, index: int) -> RequestMetrics:
        """Of an answer that is complete."""
        completion = self._completions[index]
        assert completion is not None
        return completion.metrics

    def _complete(self, index: int, answer: AnswerText, update: RequestUpdate) -> Completion:
        assert update.finish_reason is not None
        assert update.metrics is not None
        scored = self._params.logprobs is not None or self._params.best_of is not None
        spelt = self._params.logprobs is not None and (
            not self._deltas_only or self._params.best_of is not None
        )
        return Completion(
            index=index,
            text="".join(answer.pieces or ()),
            token_ids=tuple(answer.token_ids),
            finish_reason=update.finish_reason,
            stop_reason=answer.stop_string
            if answer.stop_string is not None
            else update.stop_token_id,
            seed=answer.seed,
            error=update.error,
            metrics=update.metrics,
            logprobs=tuple(map(self._spell, answer.logprobs)) if spelt else None,
            cumulative_logprob=sum(score.logprob for score in answer.logprobs) if scored else None,
        )

    def _output(self) -> RequestOutput | None:
        done = [completion for completion in self._completions if completion is not None]
        if len(done) < len(self._completions):
            return None
        if self._params.best_of is not None:
            done = sorted(done, key=_mean_logprob, reverse=True)[: self._params.n]
            done = [replace(completion, index=index) for index, completion in enumerate(done)]
        prompt_logprobs = None if self._deltas_only else self.prompt_logprobs()
        return RequestOutput(
            self.request_id, self._prompt, self._prompt_token_ids, tuple(done), prompt_logprobs
        )

    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """What is known of the prompt's logprobs, if they were asked for: all of them once a token
        has come.
        """
        if self._params.prompt_logprobs is None:
            return None
        found = (
            self._prompt_logprobs.get(position) for position in range(len(self._prompt_token_ids))
        )
        return tuple(None if score is None else self._spell(score) for score in found)

    def _spell(self, score: TokenLogprob) -> TokenLogprobs:
        top = tuple(
            Logprob(token_id, logprob, rank, self._bytes(token_id))
            for rank, (token_id, logprob) in enumerate(score.top, start=1)
        )
        named = tuple(
            Logprob(token_id, logprob, rank, self._bytes(token_id))
            for token_id, logprob, rank in score.named
        )
        return TokenLogprobs(
            score.token_id, score.logprob, score.rank, self._bytes(score.token_id), top, named
        )

    def _bytes(self, token_id: int) -> bytes:
        # A model may have more rows than its tokenizer has tokens.
        return (
            self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
        )


def _mean_logprob(completion: Completion) -> tuple[bool, float]:
    """How good an answer is; those that did not come to an end of their own are behind all others."""
    whole = completion.finish_reason in ("stop", "length")
    count = len(completion.token_ids)
    if completion.cumulative_logprob is None or not count:
        return whole, float("-inf")
    return whole, completion.cumulative_logprob / count
