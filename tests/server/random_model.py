"""A folder with a tiny random model that has a chat template of its choice: it writes nonsense, and
under a grammar whatever the grammar wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from tokenizers import AddedToken

from tests.frontend.helpers import train_byte_level


def write_model(folder: Path, template: str, special: Sequence[str] = ()) -> None:
    """`special`: further control tokens, of which the last ends answers."""
    backend = train_byte_level("qwen2")
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[-1] if special else "<|im_end|>",
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
