"""The most memory that a process and its children have together, while they run.

Counted is the proportional share of what is resident (PSS: a page that three processes map counts
a third in each), added over the tree. It is sampled, so a peak between two looks is missed; what a
kernel keeps of one process's own peak is not, and at one rank the caller has that as well.
"""

import os
import threading
from pathlib import Path
from typing import NamedTuple

PERIOD_SECONDS = 0.005


class Sample(NamedTuple):
    """Bytes of one moment: of the process itself, and of its children."""

    own: int
    children: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.own + self.children


class MemoryWatch(threading.Thread):
    """Watches a process from start to `stop`."""

    def __init__(self, pid: int) -> None:
        """Watch process `pid`, which need not be a child of this one."""
        super().__init__(daemon=True)
        self._pid, self._quit = pid, threading.Event()
        self.peak = Sample(0, 0)
        self.own_beside = 0  # the most of the process itself while it had its last children
        self._had_children = False

    def run(self) -> None:
        """Sample until told to stop."""
        while not self._quit.wait(PERIOD_SECONDS):
            self.note(sample(self._pid))

    def note(self, found: Sample) -> None:
        """Add one moment."""
        if found.children:  # earlier ones ran beside something else: git, a compiler
            self.own_beside = max(self.own_beside if self._had_children else 0, found.own)
        self._had_children = found.children > 0
        self.peak = max(self.peak, found, key=lambda one: one.total)

    def stop(self) -> None:
        """End it."""
        self._quit.set()
        self.join()


def sample(pid: int) -> Sample:
    """Return the memory of a process and its children now; one that has ended counts 0."""
    children = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "children").read_text().split()
            children += sum(_pss_of_another(int(word), pid) for word in words)
    except OSError:
        pass  # a thread ended meanwhile
    return Sample(_pss(pid), children)


def _pss_of_another(pid: int, parent: int) -> int:
    """Return the share of a child, 0 while it is a copy of its parent and not yet its own."""
    try:
        same = os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{parent}/exe")
    except OSError:
        return 0
    return 0 if same else _pss(pid)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
