"""What happens where lanes do not wait at a barrier, asked in a process that may die of it."""

import faulthandler
import os
from collections.abc import Callable


def in_a_child(differs: Callable[[], bool]) -> bool:
    """Return whether something differs, or its process dies: without a barrier both may be."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        found = True  # what an exception leaves
        try:
            found = differs()
        finally:
            os._exit(int(found))
    return os.waitpid(child, 0)[1] != 0
