"""The model as data: its config, its weight table, its operator graph."""
