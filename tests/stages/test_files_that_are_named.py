"""A file that a user names and that is not there: said so by every command, in the same words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
# Not of a checkpoint: there is nothing to fetch. Artifacts say which command makes them.
NAMED = (
    ("bench", "cache", "absent"),
    ("bench", "report", "absent", "-o", "page.html"),
    ("bench", "io", "CKPT", "--baseline", "absent"),
    ("verify", "ranks", "absent", "other"),
    ("verify", "logits", "absent", "other"),
    ("run", "CKPT", "--batch", "absent"),
    ("run", "CKPT", "--prompt-file", "absent"),
    ("run", "CKPT", "--chat", "--history", "absent", "--prompt", "x"),
)


@pytest.mark.parametrize("words", NAMED, ids=lambda words: " ".join(words[:2] + words[2:3]))
def test_an_absent_file_is_no_download_that_failed(
    k3tool: Run, oracle: Callable[[str], Path], words: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = k3tool(*(oracle("tiny_tp8") if word == "CKPT" else word for word in words))
    assert (done.code, done.out) == (3, "")
    assert "got no such file, need " in done.err
    assert "fetch" not in done.err
    assert "hint: check the path" in done.err


def test_a_file_of_a_checkpoint_is_fetched_again(k3tool: Run, tmp_path: Path) -> None:
    data = ("--layout", "released", "--data", tmp_path)
    done = k3tool("sample", tmp_path / "new", *data)  # the control
    assert (done.code, "hint: fetch the file again" in done.err) == (3, True)


def test_threads_of_nothing_are_refused(k3tool: Run, oracle: Callable[[str], Path]) -> None:
    done = k3tool("inspect", oracle("tiny_tp8"), "--jobs", 2)
    assert (done.code, done.out) == (2, "")
    assert "--jobs: got no --values, need both" in done.err
