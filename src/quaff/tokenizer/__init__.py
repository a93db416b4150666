"""Vocabulary and chat template of a checkpoint: text to token ids and back."""

from quaff.tokenizer.chat_template import ChatTemplate
from quaff.tokenizer.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["ChatTemplate", "IncrementalDecoder", "Tokenizer"]
