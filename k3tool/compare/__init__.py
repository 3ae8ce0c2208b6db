"""Comparing what runs gave: token streams and logits, ours and other engines'."""
