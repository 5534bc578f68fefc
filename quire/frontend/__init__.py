"""Text to tokens and back: tokenizers, chat templates and the incremental detokenizer."""
