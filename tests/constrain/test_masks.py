"""The Constrainer: which tokens rows may choose, how they end, and that they never meet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.constrain import GrammarCompiler
from quire.constrain.masks import Constrainer
from quire.errors import EngineError
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import StructuredOutput
from tests.constrain.conftest import PADDING
from tests.frontend.helpers import sentencepiece_metadata

NUM_ROWS = 8


@pytest.fixture
def constrainer(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Iterator[Constrainer]:
    constrainer = Constrainer(
        compiler, NUM_ROWS, tokenizer.vocab_size + PADDING, torch.device("cpu")
    )
    yield constrainer
    constrainer.close()


def _rows(*rows: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(rows, dtype=np.int64)


def _allowed(constrainer: Constrainer, row: int) -> list[int]:
    rows = _rows(row)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert not masks.errors
    assert masks.words.dtype == torch.int32
    bits = np.unpackbits(masks.words.numpy().view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def _texts(tokenizer: Tokenizer, token_ids: list[int]) -> set[bytes]:
    return {tokenizer.token_bytes(token_id) for token_id in token_ids}


def test_nobody_constrained_costs_nothing(constrainer: Constrainer) -> None:
    rows = _rows(0, 3)
    constrainer.start(rows)
    assert constrainer.masks(rows) is None
    assert not constrainer.advance(rows, [5, 6]).ended
    constrainer.drop(0)
    assert constrainer._worker is None, "no threads, no memory"


def test_only_rows_with_a_grammar_are_masked(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    constrainer.admit(5, StructuredOutput(choice=("yes", "no")))
    rows = _rows(2, 5, 0)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert masks.masked.tolist() == [False, True, False]
    assert masks.words.shape == (3, -(-(tokenizer.vocab_size + PADDING) // 32))
    assert (masks.words[0] == -1).all()
    assert (masks.words[2] == -1).all()
    bits = np.unpackbits(masks.words[1].numpy().view(np.uint8), bitorder="little")
    assert _texts(tokenizer, np.flatnonzero(bits).tolist()) == {b"y", b"ye", b"yes", b"n", b"no"}
    constrainer.drop(5)
    constrainer.start(rows)
    assert constrainer.masks(rows) is None


def test_the_request_ends_with_its_grammar(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constrainer.admit(1, StructuredOutput(choice=("a", "ab")))
    (a,), (b,) = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    assert not constrainer.advance(_rows(1), [a]).ended
    assert set(_allowed(constrainer, 1)) == {b, *tokenizer.eos_token_ids}
    assert constrainer.advance(_rows(1), [b]).ended == {1}
    constrainer.admit(1, StructuredOutput(choice=("a", "ab")), output_token_ids=[a])
    assert constrainer.advance(_rows(1), [tokenizer.eos_token_ids[-1]]).ended == {1}


@pytest.mark.parametrize(
    "grammar", ['start: A "!"\nA: ~/x*/', "start: <[*]> <[*]>", "start: /(?s:.*)!/"]
)
def test_control_tokens_are_no_text(
    constrainer: Constrainer, tokenizer: Tokenizer, grammar: str
) -> None:
    constrainer.admit(0, StructuredOutput(grammar=grammar))
    allowed = _allowed(constrainer, 0)
    assert len(allowed) > 1000
    assert tokenizer.special_token_ids.isdisjoint(allowed), (
        "the text can't end here, nor hold control tokens"
    )
    assert max(allowed) < tokenizer.vocab_size, (
        "ids that only pad the model's vocabulary are no text"
    )


def test_control_tokens_that_a_request_names_can_be_written(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    """Here and behind guesses; others, and other requests, have no part in it."""
    grammar = "start: <|im_start|> /a/ <|im_start|> <|im_end|> /b/"
    begin = tokenizer.token_to_id("<|im_start|>")
    letter = tokenizer.encode_plain("a")[0]
    assert begin is not None
    named = StructuredOutput(grammar=grammar, control_tokens=("<|im_start|>",))
    constrainer.admit(0, named)
    constrainer.admit(1, StructuredOutput(grammar="start: /a/ <|im_start|>"))
    assert _allowed(constrainer, 0) == [begin]
    rows = _rows(0, 0, 0, 0)
    masks = constrainer.masks(rows, np.array([-1, begin, letter, begin], dtype=np.int64))
    assert masks is not None
    bits = np.unpackbits(masks.words.numpy().view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(one).tolist() for one in bits[:3]] == [[begin], [letter], [begin]]
    assert masks.undefined.tolist() == [False, False, False, True]  # the other one is not named
    assert constrainer.advance(_rows(1), [letter]).ended == frozenset()
    batch = constrainer.masks(_rows(0, 1))
    assert batch is not None
    assert set(batch.errors) == {1}


def test_a_grammar_of_nothing_but_control_tokens_fails_alone(constrainer: Constrainer) -> None:
    constrainer.admit(0, StructuredOutput(grammar="start: <[1]>"))
    constrainer.admit(1, StructuredOutput(regex="a+"))
    rows = _rows(0, 1)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert set(masks.errors) == {0}
    assert "no token to choose" in masks.errors[0]


def test_min_tokens_yields_to_a_grammar_that_has_ended(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    (a,) = tokenizer.encode_plain("a")
    ends = tokenizer.eos_token_ids
    constrainer.admit(0, StructuredOutput(regex="()"), end_token_ids=ends)
    constrainer.admit(1, StructuredOutput(regex="a*"), end_token_ids=ends)
    constrainer.admit(2, StructuredOutput(regex="a"), end_token_ids=[*ends, a])
    constrainer.admit(3, StructuredOutput(regex="a"))
    rows = _rows(0, 1, 2, 3, 4)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert masks.only_ends.tolist() == [True, False, True, False, False]


def test_a_wrong_token_fails_its_row_alone(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    (a,), (b,) = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    for row in (0, 1):
        constrainer.admit(row, StructuredOutput(regex="a+"))
    advanced = constrainer.advance(_rows(0, 1), [b, a])
    assert set(advanced.errors) == {0}
    rows = _rows(0, 1)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert set(masks.errors) == {0}
    assert set(_allowed(constrainer, 1)) >= {a, *tokenizer.eos_token_ids}


def test_a_grammar_that_can_no_longer_be_had_fails_its_row_alone(
    constrainer: Constrainer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    constrainer.admit(0, StructuredOutput(regex="a+"))

    def no_luck(structured: StructuredOutput) -> None:
        raise EngineError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile", no_luck)
        constrainer.admit(1, StructuredOutput(regex="b+"))
    rows = _rows(1, 0)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    assert masks.errors == {1: "out of luck"}
    constrainer.start(_rows(1))
    alone = constrainer.masks(_rows(1))
    assert alone is not None
    assert alone.errors == {1: "out of luck"}


def test_masks_nobody_took_are_no_trouble(constrainer: Constrainer, tokenizer: Tokenizer) -> None:
    constrainer.admit(0, StructuredOutput(regex="a"))
    constrainer.start(_rows(0))
    constrainer.admit(0, StructuredOutput(regex="b"))
    assert _texts(tokenizer, _allowed(constrainer, 0)) == {b"b"}


def test_a_late_token_reaches_its_own_request_or_nobody(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    """A runner that is a step ahead tells the tokens after rows have left and come again."""
    (a,), (b,) = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    for row in range(4):
        constrainer.admit(row, StructuredOutput(regex="ab"))
    rows = _rows(0, 1, 2, 3, 4)
    constrainer.start(rows)
    masks = constrainer.masks(rows)
    assert masks is not None
    constrainer.drop(1)
    constrainer.drop(2)
    constrainer.admit(2, StructuredOutput(regex="bab"))
    # preempted; its token came in time
    constrainer.admit(3, StructuredOutput(regex="ab"), output_token_ids=[a])
    constrainer.admit(4, StructuredOutput(regex="c"))
    advanced = constrainer.advance(rows, [a, b, a, a, a], masks.epochs)
    assert (advanced.ended, advanced.errors) == (frozenset(), {})
    assert b in _allowed(constrainer, 0)
    assert a not in _allowed(constrainer, 0)
    assert a not in _allowed(constrainer, 2)
    assert b in _allowed(constrainer, 3)
    assert _texts(tokenizer, _allowed(constrainer, 4)) == {b"c"}
    constrainer.start(rows)
    assert constrainer.masks(_rows(1)) is None


def test_masks_started_before_a_token_was_told_are_not_used(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    (a,), (b,) = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    constrainer.admit(0, StructuredOutput(regex="ab"))
    rows = _rows(0)
    constrainer.start(rows)
    first = constrainer.masks(rows)
    assert first is not None
    constrainer.start(rows)
    constrainer.advance(rows, [a], first.epochs)
    second = constrainer.masks(rows)
    assert second is not None
    bits = np.unpackbits(second.words.numpy().view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [b]
    constrainer.advance(rows, [b], second.epochs)
    constrainer.admit(1, StructuredOutput(regex="b"))
    constrainer.start(_rows(1))
    both = constrainer.masks(_rows(0, 1))  # not the rows that were started
    assert both is not None
    bits = np.unpackbits(both.words[1].numpy().view(np.uint8), bitorder="little")
    assert b in np.flatnonzero(bits)
    assert a not in np.flatnonzero(bits)


def test_rows_do_not_depend_on_their_company(
    constrainer: Constrainer, tokenizer: Tokenizer
) -> None:
    """Every row of a batch that shares a grammar gets the mask it would get alone, step by step."""
    structured = StructuredOutput(
        json_schema='{"type": "array", "items": {"type": "string", "maxLength": 6}}'
    )
    texts = ['["abc", "d"]', '["", "ümlaut"]', "[]", '["\\n", "x"]']
    answers = [tokenizer.encode_plain(text) for text in texts]
    alone: list[list[list[int]]] = []
    for answer in answers:
        constrainer.admit(7, structured)
        masks = []
        for token_id in answer:
            masks.append(_allowed(constrainer, 7))
            constrainer.advance(_rows(7), [token_id])
        alone.append(masks)
    constrainer.drop(7)
    for row in range(len(answers)):
        constrainer.admit(row, structured)
    for step in range(max(map(len, answers))):
        rows = _rows(*(row for row, answer in enumerate(answers) if step < len(answer)))
        constrainer.start(rows)
        batch = constrainer.masks(rows)
        assert batch is not None
        bits = np.unpackbits(batch.words.numpy().view(np.uint8), axis=1, bitorder="little")
        for i, row in enumerate(rows.tolist()):
            assert np.flatnonzero(bits[i]).tolist() == alone[row][step]
            assert answers[row][step] in alone[row][step]
        advanced = constrainer.advance(rows, [answers[row][step] for row in rows.tolist()])
        assert not advanced.errors
        assert advanced.ended == {row for row in rows.tolist() if step == len(answers[row]) - 1}


def test_a_sentencepiece_vocabulary() -> None:
    """Text the grammar forces is cut into tokens without the space SentencePiece puts before a
    first word.
    """
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    eos = tokenizer.eos_token_ids
    own = GrammarCompiler(tokenizer, tokenizer.vocab_size, eos)
    constrainer = Constrainer(own, 1, tokenizer.vocab_size, torch.device("cpu"))
    try:
        constrainer.admit(0, StructuredOutput(choice=("hello world",)))
        text = b""
        for _ in range(20):
            token_id = max(_allowed(constrainer, 0), key=lambda i: len(tokenizer.token_bytes(i)))
            text += tokenizer.token_bytes(token_id)
            if constrainer.advance(_rows(0), [token_id]).ended:
                break
        assert text == b"hello world"
    finally:
        constrainer.close()
        own.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("padding", [0, 1, 31])
def test_a_first_mask_is_the_one_that_is_computed_whatever_the_size_of_the_vocabulary(
    tokenizer: Tokenizer, padding: int
) -> None:
    """It comes with the grammar. A state that has taken tokens and is private computes the same."""
    vocab_size = -(-tokenizer.vocab_size // 32) * 32 + padding
    compiler = GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
    constrainer = Constrainer(compiler, NUM_ROWS, vocab_size, torch.device("cpu"))
    try:
        structured = StructuredOutput(regex="[a-f]{3,9}|x.*")
        constrainer.admit(0, structured)
        given = _allowed(constrainer, 0)
        grammar = compiler.compile(structured)
        computed = np.frombuffer(grammar.private_matcher().compute_bitmask(), np.uint8)
        bits = np.flatnonzero(np.unpackbits(computed, bitorder="little"))
        texts = set(grammar.vocabulary.text_token_ids)
        assert given == [one for one in bits.tolist() if one in texts]
        assert given
    finally:
        constrainer.close()
        compiler.close()


def test_an_error_of_the_parser_is_not_tried_again_with_another_automaton(
    constrainer: Constrainer, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Compiling takes long, and steps would wait for it."""
    structured = StructuredOutput(grammar='start: "q" | "x" "a"' + ' "b"?' * 3000)
    constrainer.admit(1, structured)
    state = constrainer._states[1]
    errors: dict[int, str] = {}
    for letter in "xab":
        if not errors:
            _allowed(constrainer, 1)
            errors = dict(constrainer.advance(_rows(1), tokenizer.encode_plain(letter)).errors)
    assert "items" in errors[1]
    assert not state.is_private
