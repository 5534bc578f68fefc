"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.outputs import TokenLogprobs
from quire.server.generation import GenerationEvent, whole_choices
from quire.server.lifecycle import endpoint
from quire.server.protocol.completions import CompletionRequest
from quire.server.routes.choices import ChoicesWriter, prompt_logprobs_body, token_name


class CompletionWriter(ChoicesWriter[CompletionRequest]):
    """A whole choice is written like the one chunk of a stream; the first of each choice shows the prompt, if it is
    echoed."""

    OBJECT: ClassVar[str] = "text_completion"
    CHUNK_OBJECT: ClassVar[str] = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs: dict[int, _Logprobs] = {}
        """Of the choices that have begun."""
        self.may_take_long = bool(self.body.echo) and self.body.logprobs is not None

    def text_choice(self, index: int, text: str, is_reasoning: bool) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def chunks(self, event: GenerationEvent) -> Iterator[bytes]:
        if event.text or event.finish_reason is not None or event.logprobs or self.body.return_token_ids:
            yield self.chunk_of(self._choice(event))
            if self.body.logprobs is None and not self.body.no_answer:
                self.begun(event.index)

    def is_long_chunk(self, event: GenerationEvent) -> bool:
        """It holds as many logprobs as the prompt has tokens."""
        return self.may_take_long and event.index not in self._logprobs

    def whole(self, events: list[GenerationEvent]) -> dict[str, Any]:
        return self.whole_of([self._choice(event) for event in whole_choices(events)])

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self.body.no_answer:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, event: GenerationEvent) -> dict[str, Any]:
        body, call = self.body, self.call
        number = event.index // call.request.params.n
        is_first = event.index not in self._logprobs
        if is_first:
            self._logprobs[event.index] = _Logprobs(body.logprobs or 0, bool(body.return_tokens_as_token_ids))
        writer = self._logprobs[event.index]
        prompt = call.prompts[number]
        text, token_ids, entries = event.text, event.token_ids, event.logprobs
        if body.no_answer:
            text, token_ids, entries = "", (), ()
        logprobs = None
        if is_first and body.echo:
            shown = prompt.text if prompt.text is not None else call.tokenizer.decode(prompt.token_ids)
            text = shown + text
            if body.logprobs is not None:
                first = call.tokenizer.decode(prompt.token_ids[:1], skip_special_tokens=False)
                logprobs = writer.write([*(call.prompt_logprobs(number) or ()), *entries], [first])
        elif body.logprobs is not None:
            logprobs = writer.write(entries)
        choice: dict[str, Any] = {
            "index": event.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if body.no_answer and event.finish_reason else event.finish_reason,
        }
        if event.finish_reason is not None:
            choice["stop_reason"] = None if body.no_answer else event.stop_reason
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(call.prompt_logprobs(number), body.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice


@dataclass(slots=True)
class _Logprobs:
    """Writes the logprobs of one choice in OpenAI's old form: parallel lists, with the place of each token in the
    text, which goes on from chunk to chunk."""

    num_top: int
    as_ids: bool
    offset: int = 0

    def write(self, entries: Sequence[TokenLogprobs | None], token_texts: Sequence[str] = ()) -> dict[str, Any]:
        """`token_texts` are used where there is no entry: the first token of a prompt."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for place, entry in enumerate(entries):
            name = token_texts[place] if entry is None else token_name(entry, self.as_ids)
            text = token_texts[place] if entry is None else entry.text
            tokens.append(name)
            logprobs.append(None if entry is None else entry.logprob)
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self.offset)
            self.offset += len(text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The token itself is always there, likely or not.
        found = {token_name(one, self.as_ids): one.logprob for one in reversed(entry.top[: self.num_top])}
        return found | {token_name(entry, self.as_ids): entry.logprob} if self.num_top else {}


router = endpoint(CompletionRequest, CompletionWriter, "create_completion", "Continues one or several texts.", "OpenAI")
