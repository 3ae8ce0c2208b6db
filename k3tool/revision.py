"""Say which build this is: version, git revision, and whether the checkout was changed."""

import functools
import subprocess
from pathlib import Path

from k3tool import __version__


@functools.cache
def tool_version() -> str:
    """Return version, git revision and dirty flag of this build, `unknown` outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return f"{__version__} unknown"
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"{__version__} unknown"
    return f"{__version__} {done.stdout.strip()}"
