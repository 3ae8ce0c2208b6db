"""The instruction set: one op table, and everything that is derived from it."""
