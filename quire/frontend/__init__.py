"""Text to tokens and back: tokenizers, chat templates and the incremental detokenizer."""

from quire.frontend.chat_template import ChatTemplate
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer"]
