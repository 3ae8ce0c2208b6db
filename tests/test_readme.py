"""Every command that the README shows is run here, in the README's order, in an empty folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()
LINE = re.compile(r"^\$ (?P<command>.*?)(?:\s+# exit (?P<exit>\d+))?$", re.MULTILINE)


def console_commands() -> list[tuple[str, int]]:
    """Return (command, expected exit code) of every line of the README's console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    return [(m["command"], int(m["exit"] or 0)) for block in blocks for m in LINE.finditer(block)]


def inline_make_targets() -> set[str]:
    return set(re.findall(r"\bmake ([a-z][a-z-]+)", README)) - {"install"}


def environment(tmp: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp / "cache")}


@pytest.mark.slow
def test_every_command_of_the_readme_does_what_it_says(tmp_path: Path) -> None:
    commands = console_commands()
    assert len(commands) >= 15, "the README lost its examples"
    for command, expected in commands:
        done = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == expected, f"$ {command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, f"$ {command}\n{done.stderr}"
        assert expected == 0 or done.stderr.startswith("k3tool "), f"$ {command}\n{done.stderr}"


def test_a_wrong_exit_code_in_the_readme_would_be_seen() -> None:
    assert ("k3tool shard ckpt --tp 3 -o shards3", 2) in console_commands()


def test_make_targets_of_the_readme_exist_and_ci_runs_its_two_commands() -> None:
    makefile = (REPO / "Makefile").read_text()
    for target in inline_make_targets() - {"gen"} | {"demo", "test"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    ci = (REPO / ".ci" / "run").read_text()
    assert re.search(r"^make demo\b", ci, re.MULTILINE)
    assert re.search(r"^make check\b", ci, re.MULTILINE)
    assert re.search(r"^check: .*\btest\b", makefile, re.MULTILINE)


@pytest.mark.slow
def test_the_sample_pipeline_ends_with_eight_identical_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [REPO / "samples" / "pipeline.sh", tmp_path / "demo"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built, summary = done.stdout.splitlines()[-2:]
    assert "tokens.h5 (" in built
    assert "8 ranks identical" in summary
    assert "tokens/s" in summary
    assert "peak memory" in summary
