"""A server in a process of its own, and OpenAI's own client to ask it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3tool.checkpoint.sample_writer import write_sample

REPO = Path(__file__).parents[2]
SLOTS, WAITING, KEY = 3, 2, "a-key-of-the-tests"
PATIENCE = 60.0  # of a test for what the machine does in its own time


class ServerProcess:
    """One `k3tool serve`; `url` once it is ready."""

    def __init__(self, *arguments: object) -> None:
        """Start it and wait until it says where it listens."""
        command = [sys.executable, "-m", "stages.cli", "serve", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise AssertionError(self.process.communicate()[1])

    @property
    def ranks(self) -> list[int]:
        """Return the process ids of its ranks."""
        pid = self.process.pid
        return [int(child) for child in
                Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]  # fmt: skip

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it by a signal; return its exit code and what it said on stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Return its exit code and what it said on stderr, when it has ended."""
        said = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, said


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint that can be spoken to."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    write_sample(folder, "tiny")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all servers build into."""
    return tmp_path_factory.mktemp("serve-cache")


@pytest.fixture(scope="session")
def start(sample: Path, cache: Path) -> Callable[..., ServerProcess]:
    """Return a function that starts a server of the sample with a few slots."""

    def started(*more: object) -> ServerProcess:
        return ServerProcess(
            sample, "--port", 0, "--slots", SLOTS, "--waiting", WAITING, "--ctx", 1024,
            "--cache", cache, "--grace", 0, *more,
        )  # fmt: skip

    return started


@pytest.fixture(scope="module")
def server(
    start: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Return a server that all tests of a module ask, and that asks for a key."""
    key = tmp_path_factory.mktemp("key") / "key.txt"
    key.write_text(f"{KEY}\n")
    running = start("--api-key-file", key)
    yield running
    code, said = running.end()
    assert code == 143, said
    assert "Traceback" not in said


@pytest.fixture
def client(server: ServerProcess) -> Any:
    """Return OpenAI's client of the server; it asks once, and says what it was told."""
    from openai import OpenAI

    with OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=PATIENCE) as found:
        yield found


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds. Raises: AssertionError when it does not in a long time."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
