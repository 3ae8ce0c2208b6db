"""Text in and out of token ids: tokenizer, chat format, and characters as tokens come."""
