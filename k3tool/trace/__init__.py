"""Traces: a hash of what every instruction of a run wrote, and where two runs first differ."""
