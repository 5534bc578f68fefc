"""`quire run`: answers prompts."""

from __future__ import annotations

import contextlib
import json
import os.path
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from quire.cli import options
from quire.cli.option_groups import FileOptions, GivenOptions, with_groups
from quire.cli.start import open_llm, say_started
from quire.cli.terminal import AnswerPrinter, say
from quire.errors import InvalidRequestError, QuireError, reason
from quire.frontend.adapter_names import LoRARequest, parse_lora, slot_memory_of
from quire.frontend.progress import GenerationBar
from quire.outputs import RequestDelta, RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM


@with_groups
def run(
    prompts: Annotated[
        list[str] | None, Argument(metavar="[PROMPT]...", help="What to answer.")
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    prompt: Annotated[
        list[str] | None,
        Option(
            "--prompt", "-p", metavar="TEXT", help="Another way to give one. Repeat for several."
        ),
    ] = None,
    sampling: options.SamplingOptions = options.SamplingOptions(max_tokens=256),  # noqa: B008
    engine: options.EngineOptions = options.EngineOptions(),  # noqa: B008
    settings: FileOptions = FileOptions(),  # noqa: B008
    system: options.System = None,
    raw: Annotated[
        bool, Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    file: Annotated[
        Path | None, Option(metavar="FILE", help="Take further prompts from a file, one per line.")
    ] = None,
    priority: Annotated[
        list[int] | None,
        Option(
            metavar="P",
            help="Lower goes first. Once for all prompts, or once per prompt in their order.",
        ),
    ] = None,
    lora: Annotated[
        str | None, Option(metavar="NAME=PATH", help="Answer with this adapter, a PEFT folder.")
    ] = None,
    json_lines: Annotated[bool, Option("--json", help="Print one JSON object per prompt.")] = False,
    verbose: options.Verbose = False,
    given: GivenOptions = GivenOptions(),  # noqa: B008
) -> None:
    """Answer one or more prompts. Several are computed as one batch.

    \b
    quire run "Why is the sky blue?"
    quire run "Once upon a time" --raw --temperature 0 --max-tokens 50
    quire run "Hello!" --model Qwen/Qwen3-0.6B --device cpu --quantization int8
    quire run "Three colours:" --raw --stop . --stop $'\\n'
    quire run "A person, as JSON." --json-schema person.json
    quire run "Hello!" --model Qwen/Qwen3-32B --tensor-parallel-size 4
    quire run --file prompts.txt --json > answers.jsonl
    quire run "Summarise this: $(cat book.txt)" --device cpu --kv-cache-dtype int8
    echo "Summarise this: ..." | quire run
    """
    _refuse_a_model(prompts or [], model)
    texts = _collect_prompts([*(prompts or []), *(prompt or [])], file)
    _with_priorities(sampling.params(), priority or [], len(texts))  # wrong ones: before loading
    if raw and system is not None:
        raise InvalidRequestError("--system", "needs a chat template, which --raw turns off")
    adapter = None if lora is None else parse_lora(lora)
    chosen = engine.keywords()
    if adapter is not None and engine.lora_slot_memory is None:
        chosen["lora_slot_memory"] = slot_memory_of([adapter.lora_path], num_slots=1)
    if priority:  # there is no other reason to give one
        if "policy" in given and engine.policy != "priority":
            raise InvalidRequestError(
                "--priority",
                f"has no effect with --policy {engine.policy}: use --policy priority, or leave one of the two out",
            )
        chosen["policy"] = "priority"
    began = time.monotonic()
    with open_llm(model, **chosen) as llm:
        say_started(llm, began, verbose)
        params = sampling.params(llm.sampling_defaults)
        each = _with_priorities(params, priority or [], len(texts))
        if adapter is not None:
            llm.load_adapter(adapter.lora_name, adapter.lora_path)
        is_raw = raw or not llm.has_chat_template
        outputs = _answer(llm, texts, each, system, is_raw, json_lines, adapter)
        if verbose:
            say(details(outputs))
        failed = [output for output in outputs if output.finish_reason == "error"]
        if failed:
            raise QuireError(f"{len(failed)} of {len(outputs)} requests failed: {failed[0].error}")


def _answer(
    llm: LLM,
    texts: list[str],
    params: Sequence[SamplingParams],
    system: str | None,
    raw: bool,
    json_lines: bool,
    adapter: LoRARequest | None,
) -> list[RequestOutput]:
    from quire.cli.channels import ChannelReader  # a command that only shows its help does without
    from quire.frontend.tool_calls import ToolSupport

    start = [{"role": "system", "content": system}] if system is not None else []
    request_ids = [
        llm.add_request(text, one, lora_request=adapter)
        if raw
        else llm.add_chat_request(
            [*start, {"role": "user", "content": text}], one, lora_request=adapter
        )
        for text, one in zip(texts, params, strict=True)
    ]
    tokenizer = llm.engine.tokenizer
    support = None if raw else ToolSupport(tokenizer)
    readers = {request_id: ChannelReader(tokenizer, support) for request_id in request_ids}
    printer: _JsonPrinter | AnswerPrinter
    printer = _JsonPrinter(request_ids, texts) if json_lines else AnswerPrinter(request_ids, texts)
    started = time.monotonic()
    outputs: list[RequestOutput] = []
    # Text that streams to the terminal is progress enough.
    silent = json_lines or not sys.stdout.isatty()
    try:
        with GenerationBar(len(texts)) if silent else contextlib.nullcontext() as bar:
            while llm.has_work:
                deltas = [readers[delta.request_id].read(delta) for delta in llm.step()]
                for delta in deltas:
                    printer.take(delta)
                outputs += [delta.output for delta in deltas if delta.output is not None]
                if bar is not None:
                    bar.take(deltas)
    except KeyboardInterrupt:
        printer.interrupt()
        raise
    if not json_lines:
        say(_summary(outputs, time.monotonic() - started))
    return outputs


class _JsonPrinter:
    """One line per prompt, in the prompts' order, each as soon as it and those before it are done."""

    def __init__(self, request_ids: Sequence[str], texts: Sequence[str]) -> None:
        self._waiting = dict(zip(request_ids, texts, strict=True))
        self._done: dict[str, RequestOutput] = {}

    def take(self, delta: RequestDelta) -> None:
        if delta.output is not None:
            self._done[delta.request_id] = delta.output
        while self._waiting and (first := next(iter(self._waiting))) in self._done:
            record = _record(self._waiting.pop(first), self._done.pop(first))
            print(json.dumps(record, ensure_ascii=False), flush=True)

    def interrupt(self) -> None:
        """Whole objects only: nothing to finish."""


def _record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "seed": output.completions[0].seed,
        "counts": {
            "prompt_tokens": metrics.num_prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "output_tokens": metrics.num_output_tokens,
            "preemptions": metrics.preemptions,
            "drafted_tokens": metrics.drafted_tokens,
            "accepted_tokens": metrics.accepted_tokens,
        },
        "timings": {
            "queue_seconds": _rounded(metrics.queue_time),
            "first_token_seconds": _rounded(metrics.time_to_first_token),
            "per_token_seconds": _rounded(metrics.time_per_output_token),
            "total_seconds": _rounded(metrics.finished - metrics.arrival),
        },
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    new = sum(output.metrics.num_output_tokens for output in outputs)
    prompt = sum(output.metrics.num_prompt_tokens for output in outputs)
    waits = [output.metrics.time_to_first_token for output in outputs]
    first = min((wait for wait in waits if wait is not None), default=None)
    text = f"{new} tokens in {seconds:.1f} s ({new / max(seconds, 1e-9):.1f} tokens/s), prompt {prompt} tokens"
    return text if first is None else f"{text}, first token after {first:.2f} s"


def details(outputs: Sequence[RequestOutput]) -> str:
    """What came of draft tokens and of the cache."""
    metrics = [output.metrics for output in outputs]
    drafted, accepted = (
        sum(one.drafted_tokens for one in metrics),
        sum(one.accepted_tokens for one in metrics),
    )
    new, cached = (
        sum(one.num_output_tokens for one in metrics),
        sum(one.cached_tokens for one in metrics),
    )
    share = (
        f"{accepted / drafted:.0%} of them right"
        if drafted
        else "speculation is off, or nothing could be drafted"
    )
    per_step = (
        f", {new / max(new - accepted, 1):.2f} tokens per step of a request" if accepted else ""
    )
    return f"{drafted} tokens drafted, {share}{per_step}; {cached} prompt tokens from the cache"


def _refuse_a_model(prompts: list[str], model: str) -> None:
    """For whoever is used to `ollama run MODEL PROMPT`: the model would be taken for the first
    prompt.
    """
    from quire.checkpoints.catalogue import CATALOGUE
    from quire.checkpoints.download import ALIASES

    first = prompts[0] if prompts else ""
    is_file = first.endswith(".gguf") or os.path.isfile(os.path.join(first, "config.json"))
    if (
        model == options.DEFAULT_MODEL
        and first
        and (first in ALIASES or first in CATALOGUE or is_file)
    ):
        raise InvalidRequestError(
            "PROMPT",
            f'{first} is a model: quire run "…" --model {first} (as a prompt: --prompt {first})',
        )


def _collect_prompts(given: list[str], file: Path | None) -> list[str]:
    texts = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError("--file", f"{file} can't be read: {reason(error)}") from None
        texts += [line for line in lines if line.strip()]
    if not texts and file is None and not sys.stdin.isatty():
        piped = sys.stdin.read().strip()
        texts = [piped] if piped else []
    if not texts:
        raise InvalidRequestError(
            "PROMPT", 'nothing to answer. Try: quire run "Why is the sky blue?"'
        )
    if not all(text.strip() for text in texts):
        raise InvalidRequestError("PROMPT", "is empty")
    return texts


def _with_priorities(
    params: SamplingParams, priorities: list[int], count: int
) -> list[SamplingParams]:
    if not priorities:
        return [params] * count
    if len(priorities) == 1:
        priorities = priorities * count
    if len(priorities) != count:
        message = f"given {len(priorities)} times for {count} prompts; give one, or one each"
        raise InvalidRequestError("--priority", message)
    return [replace(params, priority=priority) for priority in priorities]
