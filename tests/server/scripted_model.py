"""A model that says what a script wants, for clients that can't be told to ask for a form of
answer: its chat template chooses the script by what the user wrote, and its weights know one thing,
which token follows which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken

from tests.frontend.helpers import train_byte_level

_PIECE = 9
"""Characters of a script in one token: a stream of it has several deltas."""
_SHOWN = 300
"""Characters of a message that the template shows: agents send books."""
_LOGIT = 50.0

_TEMPLATE = """
{%- set ns = namespace(script='DEFAULT') %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '')[:SHOWN] }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- if message.role == 'tool' %}{%- set ns.script = 'AFTER_TOOL' %}{%- endif %}
    {%- if message.role == 'user' %}
        {%- set ns.script = 'DEFAULT' %}
        {%- for name in NAMES %}
            {%- if '@' + name in message.content %}{%- set ns.script = name %}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{- '<tool_call>' }}{%- for tool in tools %}{{- tool.function.name + ' ' }}{%- endfor %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<|' + ns.script + '|>' }}{%- endif %}
"""


def write_scripted_model(
    folder: Path, scripts: Mapping[str, str], default: str, after_tool: str, context: int
) -> None:
    """`scripts`: what the model says to a user who writes @NAME; `default` and `after_tool` name
    the ones for other users and for results of tools.
    """
    tokenizer = train_byte_level("qwen2")
    flat: list[str] = []
    pieces = {name: _pieces(text, flat) for name, text in scripts.items()}
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in flat])
    starts = {name: f"<|{name}|>" for name in scripts}
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in starts.values()]
    )
    template = _TEMPLATE.replace("DEFAULT", default).replace("AFTER_TOOL", after_tool)
    template = template.replace("NAMES", json.dumps(list(scripts))).replace("SHOWN", str(_SHOWN))
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    whole.save_pretrained(folder)

    successors: dict[int, int] = {}
    for name, parts in pieces.items():
        ids = [tokenizer.token_to_id(text) for text in (starts[name], *parts, "<|im_end|>")]
        successors |= dict(pairwise(ids))
    hidden = 16 * (len(successors) // 16 + 1)
    config = transformers.LlamaConfig(
        vocab_size=len(whole),
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=hidden // 16,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
    )
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    for name, weight in state.items():
        if "o_proj" in name or "down_proj" in name or "embed" in name or "lm_head" in name:
            weight.zero_()
    for place, (token_id, successor) in enumerate(successors.items()):
        state["model.embed_tokens.weight"][token_id, place] = 1.0
        state["lm_head.weight"][successor, place] = _LOGIT
    with torch.no_grad():
        model.load_state_dict(state)
    model.save_pretrained(folder)


def _pieces(text: str, taken: list[str]) -> list[str]:
    """The text cut into pieces that no script has yet: each has one successor."""
    pieces: list[str] = []
    while text:
        length = next(
            length for length in range(_PIECE, len(text) + _PIECE) if text[:length] not in taken
        )
        length = length if length + _PIECE <= len(text) else len(text)
        pieces.append(text[:length])
        taken.append(text[:length])
        text = text[length:]
    return pieces
