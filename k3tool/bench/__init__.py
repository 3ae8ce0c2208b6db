"""Benchmarks, one file each; `stages/bench.py` has their commands."""
