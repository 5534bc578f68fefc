"""What people see of an answer in channels, and what of it stays in the conversation."""

from __future__ import annotations

from quire.cli.channels import ChannelReader
from quire.frontend.tool_calls import ToolSupport
from quire.frontend.tool_calls.harmony import CALL, CONTROL_TOKENS, RETURN
from quire.outputs import RequestDelta
from tests.frontend.templates import HARMONY, QWEN
from tests.frontend.test_tool_plan import make_tokenizer

TEXT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"


def test_reasoning_is_shown_and_not_kept() -> None:
    tokenizer = make_tokenizer(HARMONY, (*CONTROL_TOKENS, CALL, RETURN))
    reader = ChannelReader(tokenizer, ToolSupport(tokenizer))
    ids = tokenizer.encode(TEXT, add_special_tokens=False, allow_special=True)
    deltas = [
        RequestDelta("a", 0, "?", (one,), (), "stop" if one is ids[-1] else None, None)
        for one in ids
    ]
    assert "".join(reader.read(delta).text for delta in deltas) == "Let me see.\n\nHi."
    assert reader.content == "Hi."


def test_other_models_are_read_as_ever() -> None:
    tokenizer = make_tokenizer(QWEN)
    for support in (ToolSupport(tokenizer), None):
        reader = ChannelReader(tokenizer, support)
        delta = RequestDelta("a", 0, "<think>Hm", (5,), (), None, None)
        assert reader.read(delta) is delta
        assert reader.content == "<think>Hm"
