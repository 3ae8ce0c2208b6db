"""Benchmarks, one file each; `stages/bench` has their commands."""
