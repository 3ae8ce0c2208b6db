"""Kill `shard` at chosen and at random moments, run it again, and look at what is there.

A program of its own, because it forks: `shard_crashes.py CHECKPOINT FOLDER SEED N` writes one word
a kill or resumption, and JSON at the end. A chain is one output brought to its end through kills.
Kills come right before a change of
the file system (an audit event), between the packed bytes and the scales of an expert, or after a
random time. Whatever the moment, the output's name must hold nothing, the old output or the new.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint import shard_copy
from k3tool.checkpoint.safetensors_writer import SafetensorsWriter
from k3tool.checkpoint.shard_writer import shard_checkpoint
from k3tool.errors import UsageError

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "ctypes.dlsym")
Child = Callable[[], None]


def digest_of(folder: Path) -> str | None:
    """Return one hash of all names and bytes, None for a folder that is not there."""
    if not folder.exists():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def fork(child: Child, kill_after: float | None = None) -> bool:
    """Run `child` in a process of its own and return whether it was killed.

    Raises: AssertionError when it ended badly by itself.
    """
    process = os.fork()
    if process == 0:
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"the run failed by itself: status {status}"
    return killed


def die_at_change(number: int) -> None:
    """Kill this process before its `number`th change of the file system, and say which it was."""
    count = [0]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or (event == "open" and "w" in str(arguments[1])):
            count[0] += 1
            if count[0] == number:
                os.write(1, f"{event}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)

    sys.addaudithook(hook)


def die_at_scale(number: int) -> None:
    """Kill this process when packed bytes are written and their scales are not."""
    count = [0]
    real = SafetensorsWriter.start

    def start(self: SafetensorsWriter, name: str) -> None:
        real(self, name)
        if name.endswith("weight_scale"):
            count[0] += 1
            if count[0] == number:
                os.write(1, b"scale\n")
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)

    SafetensorsWriter.start = start


class Step(NamedTuple):
    """One shard command."""

    tp: int
    ranks: tuple[int, ...] | None = None
    force: bool = False


# name -> (what stands there before, the command that is killed)
CHAINS = {
    "fresh": ((), Step(2)),
    "replaced": ((Step(4),), Step(2, force=True)),
    "joined": ((Step(2, (0,)),), Step(2, (1,))),
}


class Crashes:
    """The chains of one checkpoint; `wrong` says in words what must not have happened."""

    def __init__(self, source: Path, folder: Path, seed: int) -> None:
        self.source, self.folder, self.out = source, folder, folder / "out"
        self.random = random.Random(seed)
        self.wrong: list[str] = []
        self.n_killed = 0
        self.goals = {name: self._straight(name) for name in CHAINS}
        shard_copy.BLOCK_BYTES = 700  # many pieces a tensor, and no round number

    def _straight(self, name: str) -> str | None:
        before, goal = CHAINS[name]
        for step in (*before, goal):
            self.shard(step, self.folder / name)
        return digest_of(self.folder / name)

    def shard(self, step: Step, out: Path) -> None:
        info = shard_checkpoint(
            self.source, step.tp, out, ranks=step.ranks, force=step.force, jobs=2
        )
        if info.resumed_bytes:
            os.write(1, b"resumed\n")

    def chain(self, name: str) -> None:
        """Bring one output to its end through kills."""
        before, goal = CHAINS[name]
        for step in before:
            self.shard(step, self.out)
        old = digest_of(self.out)
        for _ in range(self.random.randrange(1, 4)):
            self.kill(goal)
            if digest_of(self.out) not in (old, self.goals[name]):
                self.wrong.append(f"{name}: neither the old output nor the new after a kill")
        if digest_of(self.out) != self.goals[name] or self.left():
            fork(lambda: self.finish(goal))
        if digest_of(self.out) != self.goals[name] or self.left():
            self.wrong.append(f"{name}: not the bytes of a straight run, or more: {self.left()}")
        shutil.rmtree(self.out)

    def left(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.startswith(".out")]

    def finish(self, step: Step) -> None:
        """Shard; a run that was killed when all was done may find its output finished."""
        try:
            self.shard(step, self.out)
        except UsageError as error:
            if "finished shards" not in str(error.got):
                raise

    def kill(self, step: Step) -> None:
        """Run a command towards a kill of a random kind; it may end before it."""
        kind = self.random.choice(("change", "change", "change", "scale", "time"))
        number = self.random.randrange(1, 150 if kind == "change" else 80)

        def doomed() -> None:
            if kind != "time":
                (die_at_change if kind == "change" else die_at_scale)(number)
            self.finish(step)

        wait = self.random.random() * 0.3 if kind == "time" else None
        self.n_killed += fork(doomed, kill_after=wait)


def main() -> None:
    """Run the chains and print what happened."""
    source, folder, seed, n_chains = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
    crashes = Crashes(source, folder, seed)
    for _ in range(n_chains):
        for name in CHAINS:
            crashes.chain(name)
    print(json.dumps({"wrong": crashes.wrong, "killed": crashes.n_killed}))


if __name__ == "__main__":
    main()
