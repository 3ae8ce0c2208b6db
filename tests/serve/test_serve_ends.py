"""A server's own end: by a signal, by a rank that dies, or before it has begun."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3tool.isa.stream import load_isa
from tests.serve.conftest import PATIENCE, REPO, SLOTS, ServerProcess, until

openai = pytest.importorskip("openai", reason="NOT RUN: openai is not installed")
Start = Callable[..., ServerProcess]


def client_of(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=PATIENCE)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal(start: Start, number: int, code: int) -> None:
    """While it generates: the client is told, ranks go, the exit code is that of any command."""
    server = start("--tp", 2)
    ranks = server.ranks
    assert len(ranks) == 2
    with client_of(server) as client:
        body = {"ignore_eos": True}
        stream = client.completions.create(
            model="tiny", prompt=[1], max_tokens=400, stream=True, extra_body=body
        )
        next(iter(stream))
        ended, said = server.end(number)
        assert ended == code
        assert "Traceback" not in said
        with pytest.raises(openai.APIError, match="the service is ending"):
            list(stream)
    assert all(map(is_gone, ranks))


def test_a_rank_that_dies(start: Start) -> None:
    """No answer is made up: streams end with an error, and so does the server."""
    server = start("--tp", 2)
    with client_of(server) as client:
        body = {"ignore_eos": True}
        stream = client.completions.create(
            model="tiny", prompt=[1], max_tokens=400, stream=True, extra_body=body
        )
        next(iter(stream))
        os.kill(server.ranks[1], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="rank 1: got killed by SIGKILL"):
            list(stream)
    code, said = server.wait()
    assert code == 4
    assert "k3tool serve: rank 1: got killed by SIGKILL" in said
    assert "Traceback" not in said


def test_a_fault_says_more_than_the_signal_behind_it(start: Start) -> None:
    """A supervisor asks for the end while the server is ending: it is to hear of the fault."""
    server = start("--tp", 2)
    port = int(server.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port)) as slow:  # is waited for a while at the end
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        os.kill(server.ranks[1], signal.SIGKILL)
        health = server.url.removesuffix("/v1") + "/health"
        until(lambda: not answers(health))
        assert server.process.poll() is None
        code, said = server.end()
    assert code == 4, said
    assert "k3tool serve: rank 1: got killed by SIGKILL" in said
    assert "terminated" not in said


def answers(url: str) -> bool:
    """Return whether somebody answers with 200."""
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group(start: Start, number: int) -> None:
    """A supervisor sends SIGTERM to ranks as well, and a terminal SIGHUP: it is the driver that
    decides, and no fault.
    """
    server = start("--tp", 2)
    ranks = server.ranks
    for pid in ranks:
        os.kill(pid, number)
    with client_of(server) as client:
        assert client.completions.create(model="tiny", prompt=[1], max_tokens=4).choices
    code, said = server.end(number)
    assert code == 128 + number, said
    assert all(map(is_gone, ranks))


def test_two_servers_of_one_checkpoint(
    start: Start, sample: Path, cache: Path, k3tool_process: Callable[..., Any]
) -> None:
    """At two ports both answer alike; at one port the second is refused in a line."""
    one, two = start(), start()
    asked = {"model": "tiny", "prompt": [3, 1], "max_tokens": 8, "temperature": 0}
    texts = []
    for server in (one, two, one):
        with client_of(server) as client:
            texts.append(client.completions.create(**asked).choices[0].text)
    assert texts[0] == texts[1] == texts[2]
    port = one.url.split(":")[2].split("/")[0]
    outcome = k3tool_process("serve", sample, "--port", port, "--cache", cache)
    assert outcome.code == 2
    assert outcome.err.splitlines()[1:] == ["  hint: --port 0 takes a free one"]
    assert f"--port: got 127.0.0.1:{port}: address already in use" in outcome.err
    assert [server.end()[0] for server in (one, two)] == [143, 143]


def test_a_rank_that_dies_while_nothing_is_asked(start: Start) -> None:
    """Nobody is told that all is well until the next request finds out."""
    server = start("--tp", 2)
    os.kill(server.ranks[0], signal.SIGKILL)
    code, said = server.wait()
    assert code == 4
    assert "k3tool serve: rank 0: got killed by SIGKILL" in said


def test_a_rank_that_is_stopped(start: Start) -> None:
    """Who waits for the whole answer is told within the deadline, hint and all in one line."""
    server = start("--tp", 2, "--deadline", 1)
    ranks = server.ranks
    os.kill(ranks[1], signal.SIGSTOP)
    with client_of(server) as client, pytest.raises(openai.InternalServerError) as told:
        client.completions.create(model="tiny", prompt=[1], max_tokens=400)
    assert told.value.status_code == 503
    assert "rank 1: got stopped by a signal" in told.value.message
    assert "; hint: let it run" in told.value.message
    assert server.wait()[0] == 4
    assert all(map(is_gone, ranks))


def test_nobody_hears_the_address(sample: Path, tmp_path: Path) -> None:
    """Whatever took stdout has gone: a server that nobody can find does not stay."""
    gone, stdout = os.pipe()
    os.close(gone)
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.cli", "serve", str(sample), "--port", "0",
         "--cache", str(tmp_path)],
        stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=REPO,
    )  # fmt: skip
    os.close(stdout)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1, said
    assert "k3tool serve: stdout: got closed, need a reader of the address" in said
    assert "Traceback" not in said


def test_a_port_in_use(sample: Path, tmp_path: Path, k3tool_process: Callable[..., Any]) -> None:
    """Said before anything is compiled or read."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = k3tool_process("serve", sample, "--port", port, "--cache", tmp_path / "cache")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"--port: got 127.0.0.1:{port}: address already in use" in outcome.err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--host", "no.such.host.invalid"), 2, "--host: got no.such.host.invalid"),
        (("--api-key-file", "absent"), 3, "absent: got "),
        (("--slots", 0), 2, "--slots"),
        (("--slots", 5000), 2, "--slots"),
        (("--name", ""), 2, '--name: got "", need a name'),
        (("--name", "a\nb"), 2, "--name: got "),
        (("--memory", "1MB"), 5, "need at least"),
    ],
)
def test_refusals(
    sample: Path, k3tool: Callable[..., Any], tmp_path: Path, more: tuple[object, ...], code: int,
    said: str,
) -> None:  # fmt: skip
    outcome = k3tool("serve", sample, "--port", 0, "--cache", tmp_path, *more)
    assert outcome.code == code, outcome
    assert said in outcome.err
    assert outcome.out == ""


def test_without_the_packages(
    sample: Path, k3tool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    outcome = k3tool("serve", sample, "--port", 0)
    assert outcome.code == 5
    assert "pip install -e '.[serve]'" in outcome.err


def test_an_open_door_is_said(start: Start, sample: Path, cache: Path) -> None:
    """And --isa alone brings its own number of slots."""
    start().end()
    isa = next(path for path in cache.glob("*.isa.h5") if load_isa(path).params["tp"] == 1)
    server = ServerProcess(sample, "--port", 0, "--isa", isa, "--host", "0.0.0.0", "--cache", cache)
    until(lambda: bool(server.ranks))
    _, said = server.end()
    assert "no --api-key-file: anybody who reaches" in said
    assert f"{SLOTS} slots of 1024 positions" in said
