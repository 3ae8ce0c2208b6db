"""An OpenAI-compatible endpoint over one resident engine; ``stages/serve.py`` is its command."""
