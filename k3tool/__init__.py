"""k3tool takes a Kimi K3 checkpoint to tokens. It never imports the command line in `stages`."""

__version__ = "0.1.0"
