"""Checkpoints on disk: headers, index, identity, coverage, slices and our rank shards."""
