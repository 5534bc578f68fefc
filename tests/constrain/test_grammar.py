"""Compiling: what is refused and how soon, what is kept, and that one grammar never harms another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from quire.constrain import GrammarCompiler, GrammarState, limits
from quire.constrain.grammar import BoundedCache
from quire.errors import InvalidRequestError
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import StructuredOutput


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _chain(length: int) -> str:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"'


REFUSED: dict[str, StructuredOutput] = {
    "not JSON": StructuredOutput(json_schema='{"type":'),
    "no schema": StructuredOutput(json_schema="3"),
    "NaN": StructuredOutput(json_schema='{"minimum": NaN}'),
    "false": StructuredOutput(json_schema='{"properties": false}'),
    "reference to itself": StructuredOutput(json_schema='{"$ref": "#"}'),
    "references in a circle": StructuredOutput(
        json_schema={
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        }
    ),
    "remote reference": StructuredOutput(json_schema='{"$ref": "http://localhost/x.json"}'),
    "unknown keyword": StructuredOutput(json_schema='{"not": {"type": "string"}}'),
    "nested too deeply": StructuredOutput(json_schema=_nested(400)),
    "nested far too deeply": StructuredOutput(json_schema="[" * 100_000),
    "broken options": StructuredOutput(json_schema='{"x-guidance": 3}'),
    "infinity": StructuredOutput(json_schema='{"minimum": 1e999}'),
    "broken regex": StructuredOutput(regex="a("),
    "nested regex": StructuredOutput(regex="(" * 5000 + "a" + ")" * 5000),
    "broken grammar": StructuredOutput(grammar="start: foo bar %%"),
    "empty language": StructuredOutput(grammar="start: start"),
    "rule temperature": StructuredOutput(grammar="start[temperature=0.5]: /a+/"),
    "terminals doubling": StructuredOutput(
        grammar=_chain(60).replace("r", "R").replace("staRt: R0", "start: R0")
    ),
    "surrogate": StructuredOutput(regex="\ud800"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_grammars_are_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(REFUSED[name])
    assert caught.value.field.startswith("structured.")
    assert len(str(caught.value)) < 700


def test_a_stack_overflow_happens_elsewhere(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="nested too deeply to compile"):
        compiler.compile(StructuredOutput(grammar=_chain(5000)))
    assert compiler.compile(StructuredOutput(regex="still[ ]alive"))


@pytest.mark.slow
def test_explosive_grammars_end_within_the_limit(compiler: GrammarCompiler) -> None:
    explosive = StructuredOutput(json_schema='{"type": "integer", "multipleOf": 1234567}')
    started = time.process_time(), time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes over"):
        compiler.compile(explosive)
    assert time.monotonic() - started[1] < limits.COMPILE_WALL_SECONDS + 30
    assert time.process_time() - started[0] < 1, "the work is not done in this process"
    started = time.process_time(), time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes over"):
        compiler.compile(explosive)
    assert time.monotonic() - started[1] < limits.COMPILE_WALL_SECONDS / 2, (
        "a refusal is remembered"
    )


GOOD: dict[str, StructuredOutput] = {
    "catastrophic for backtracking": StructuredOutput(regex="(a+)+b"),
    "long counter": StructuredOutput(regex="[a-z]{1,99999}"),
    "huge enum": StructuredOutput(json_schema={"enum": [f"value {i}" for i in range(10_000)]}),
    "300 properties": StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(300)},
        }
    ),
    "100 levels": StructuredOutput(json_schema=_nested(100)),
    "recursive": StructuredOutput(json_schema='{"type": "array", "items": {"$ref": "#"}}'),
}


@pytest.mark.parametrize("name", GOOD)
def test_large_but_sound_grammars_are_taken(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile(GOOD[name])
    assert 0 <= grammar.num_bytes <= limits.GRAMMAR_BYTES
    assert compiler.compile(GOOD[name]) is grammar


def test_thousands_of_schemas_are_bounded_and_a_held_one_is_found(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CACHE_ENTRIES", 4)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    try:
        wanted = [StructuredOutput(regex=f"a{{{i}}}b") for i in range(1, 12)]
        held = compiler.compile(wanted[0])
        for structured in wanted[1:]:
            compiler.compile(structured)
        assert len(compiler._grammars._entries) == 4
        assert compiler._grammars.get(wanted[0]) is None
        assert compiler.compile(wanted[0]) is held
    finally:
        compiler.close()


def test_the_cache_keeps_both_bounds_and_what_was_used_last() -> None:
    cache = BoundedCache[str, int](max_entries=3, max_bytes=100)
    cache.put("a", 1, 40)
    cache.put("b", 2, 40)
    assert cache.get("a") == 1
    cache.put("c", 3, 40)
    assert cache.get("b") is None, "the least recently used goes"
    assert (cache.get("a"), cache.get("c"), cache._bytes) == (1, 3, 80)
    cache.put("a", 4, 10)
    assert (cache.get("a"), cache._bytes) == (4, 50)
    cache.put("d", 5, 0)
    cache.put("e", 6, 0)
    assert len(cache._entries) == 3
    cache.put("a", 7, 101)
    assert cache.get("a") is None
    assert cache._bytes <= 100


def test_threads_share_one_compiled_grammar(compiler: GrammarCompiler) -> None:
    structured = StructuredOutput(json_schema='{"type": "array", "items": {"type": "integer"}}')
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiler.compile(structured)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(grammar) for grammar in found}) == 1


@pytest.mark.slow
def test_a_checker_that_was_killed_is_started_again(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutput(regex="before"))
    assert compiler._checker is not None
    child = compiler._checker._child
    assert child is not None
    child.kill()
    child.wait()
    assert compiler.compile(StructuredOutput(regex="after"))


def test_the_checker_goes_with_its_owner(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    compiler.compile(StructuredOutput(regex="a"))
    assert compiler._checker is not None
    child = compiler._checker._child
    assert child is not None
    pid = child.pid
    del compiler, child
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_model_without_an_end_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ())
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        compiler.compile(StructuredOutput(regex="a"))


def test_without_llguidance_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from quire.constrain.guidance import import_llguidance\n"
        "from quire.errors import QuireError\n"
        "try: import_llguidance()\n"
        "except QuireError as error: print(error)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "pip install 'quire[structured]'" in output
    assert output.endswith("False False\n"), "the checking process starts quickly"


def test_a_full_automaton_is_only_its_own_requests_problem(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(StructuredOutput(regex="(.*a.{50}){20}"))
    greedy = GrammarState(grammar)
    tokens = tokenizer.encode_plain(
        "an apple a day keeps the doctor away and banana bread at bay " * 40
    )
    for token_id in tokens:  # its automaton grows with each mask until it is full
        greedy.matcher.compute_bitmask()
        if greedy.matcher.is_error():
            break
        greedy.matcher.consume_token(token_id)
    assert "too many states" in greedy.error
    other = grammar.matcher()
    other.compute_bitmask()
    assert other.is_error(), (
        "llguidance shares the automaton; if no longer, `private_matcher` can go"
    )
    innocent = GrammarState(grammar)
    innocent.matcher.compute_bitmask()
    assert innocent.start_over()
    innocent.matcher.compute_bitmask()
    assert not innocent.error
    assert innocent.advance(tokens[0])
    assert not innocent.start_over(), "once only"
    fresh = GrammarState(grammar)
    fresh.matcher.compute_bitmask()
    assert not fresh.error, "later requests begin with a clean automaton"


def test_a_state_can_be_rebuilt(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    text = json.dumps({"a": 1, "b": [True, None]})
    tokens = tokenizer.encode_plain(text)
    grammar = compiler.compile(StructuredOutput(json_object=True))
    state = GrammarState(grammar)
    for i, token_id in enumerate(tokens):
        rebuilt = GrammarState(grammar, tokens[:i])
        masks = {bytes(one.matcher.compute_bitmask()) for one in (state, rebuilt)}
        assert len(masks) == 1
        assert state.advance(token_id)
        rebuilt.advance(tokenizer.encode_plain("zzz")[0])  # goes astray alone
        assert not state.error
    assert state.is_finished
    assert not rebuilt.is_finished


def test_a_grammar_that_fails_on_every_first_token_is_refused_when_it_comes(
    compiler: GrammarCompiler,
) -> None:
    """Not in a step, where all others would wait for it."""
    with pytest.raises(InvalidRequestError, match="items"):
        compiler.compile(StructuredOutput(grammar='start: "a"' + ' "b"?' * 3000))
    for fine in ('start: "a"' + ' "b"?' * 30, 'start: ""', "start: /a*/"):
        assert not compiler.compile(StructuredOutput(grammar=fine)).error
