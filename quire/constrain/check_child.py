"""The process that tries grammars out, so that one that explodes takes nothing else with it.

llguidance counts its work, but not all of it: a rule chain a few thousand deep overflows the stack,
and `{"multipleOf": 1234567}` takes 18 seconds and 700 MB. So the engine has every grammar compiled
here first. This process holds the vocabulary and forks for each grammar; the fork has limits on
processor time, wall time, stack and memory that end it whatever it is doing.

First the vocabulary comes in, then grammars; a verdict goes out for each.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

from quire.constrain import limits
from quire.constrain.guidance import build_tokenizer, error_of, new_matcher, run_with_stack
from quire.process.child import ParentLines, end_with_parent

if TYPE_CHECKING:
    import llguidance

_FIRST_TOKENS = 8
"""How many of those that a grammar lets come first are tried."""
_TRIVIAL = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})


def main() -> None:
    end_with_parent()
    parent = ParentLines()
    lines = iter(parent)
    vocabulary = next(lines)
    data, tokens, start = bytes.fromhex(vocabulary["bytes"]), [], 0
    for length in vocabulary["lengths"]:
        tokens.append(data[start : start + length])
        start += length

    # the model's own tokenizer is not needed to tell good from bad
    def encode(text: str) -> list[int]:
        return tokenizer.greedy_tokenize(text)

    tokenizer = build_tokenizer(tokens, vocabulary["special"], vocabulary["eos"], encode)
    parent.answer({})
    for line in lines:
        parent.answer(_try_in_fork(tokenizer, line["grammar"]))


def _try_in_fork(tokenizer: llguidance.LLTokenizer, grammar: str) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _limit_myself()
        os.write(write_end, json.dumps(_try(tokenizer, grammar)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    if report and status == 0:
        verdict: dict[str, Any] = json.loads(report)
        return verdict
    return {"error": _cause(status), "bytes": 0}


def _limit_myself() -> None:
    # Their handlers are the default ones: the kernel ends the process, even inside llguidance.
    signal.setitimer(signal.ITIMER_PROF, limits.COMPILE_CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, limits.COMPILE_WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: the time limits bound what can be taken
        return
    limit = in_use + limits.COMPILE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _try(tokenizer: llguidance.LLTokenizer, grammar: str) -> dict[str, Any]:
    matchers: list[llguidance.LLMatcher] = []
    failures: list[str] = []
    before = 0

    def compile_it() -> None:
        nonlocal before
        # what any grammar takes is not this one's
        new_matcher(tokenizer, _TRIVIAL).compute_bitmask()
        before = _peak_memory()
        matchers.append(new_matcher(tokenizer, grammar))

    def run_it() -> None:
        if not matchers[0].is_error():
            matchers[0].deep_copy().compute_bitmask()
            # Some contradictions only show when the first token is asked for.
            mask = matchers[0].compute_bitmask()
            failures.append("" if matchers[0].is_error() else _try_first_tokens(matchers[0], mask))

    run_with_stack(limits.COMPILE_STACK, compile_it)
    run_with_stack(limits.RUN_STACK, run_it)
    error = error_of(matchers[0]) or next(iter(failures), "")
    return {"error": error, "bytes": max(0, _peak_memory() - before)}


def _try_first_tokens(matcher: llguidance.LLMatcher, mask: bytes) -> str:
    """Why none of some tokens that may come first leads anywhere; empty if one does. Such a grammar
    would only fail later, in a step, and take its time there.
    """
    allowed = [
        8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
    ]
    error = ""
    for token_id in allowed[:: -(-len(allowed) // _FIRST_TOKENS) or 1]:
        copy = matcher.deep_copy()
        if copy.consume_token(token_id):
            return ""
        error = error_of(copy)
    return error


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cause(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGALRM):
        return f"takes over {limits.COMPILE_CPU_SECONDS:g} s to compile; make it simpler"
    if number == signal.SIGABRT:
        return f"takes over {limits.COMPILE_MEMORY // limits.MIB} MiB to compile; make it simpler"
    return "is nested too deeply to compile"


if __name__ == "__main__":
    main()
