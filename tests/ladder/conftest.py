"""A model small enough to climb the ladder with in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a byte-level tokenizer, saved by the libraries everyone saves with."""
    folder = tmp_path_factory.mktemp("tiny")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["some text to learn from"], trainer)
    backend.add_special_tokens(["</s>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes,
        num_hidden_layers=2,
        vocab_size=len(fast),
        eos_token_id=fast.eos_token_id,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
