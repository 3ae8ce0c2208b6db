"""Images: what is written is what C reads, and no damaged image is run or crashes."""

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from k3tool.runtime import image
from k3tool.runtime.engine import StepToken
from k3tool.runtime.image_layout import HEADER_DTYPE, SECTION_DTYPE, SECTIONS
from k3tool.runtime.interpreter import load
from k3tool.runtime.requests import Step, encode_step
from tests.runtime import toy

REFUSED = 3


def start(folder: Path, data: bytes, deadline: str = "0.2") -> subprocess.CompletedProcess[str]:
    """Run one rank on an image, ask it for one step, and return how it ended."""
    path = folder / "rank.img"
    path.write_bytes(data)
    shared = folder / "shared"
    shared.write_bytes(b"\0" * 4096)
    reading, writing = os.pipe()
    asked, asking = os.pipe()
    tokens = [StepToken(token, position, 0) for position, token in enumerate((3, 1, 4))]
    os.write(asking, encode_step(Step(1, tokens, 1, 2)))
    os.close(asking)
    try:
        return subprocess.run(
            [load().path, "--image", path, "--shared", shared, "--records", str(writing),
             "--requests", str(asked), "--deadline", deadline],
            pass_fds=[writing, asked], capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        for descriptor in (reading, writing, asked):
            os.close(descriptor)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return toy.images(toy.toy_isa(), tmp_path)[0]


def with_checksum(data: bytearray) -> bytes:
    """Make an edited image pass the checksum, so that the checks behind it are reached."""
    header = np.frombuffer(data[: HEADER_DTYPE.itemsize], HEADER_DTYPE).copy()
    header["checksum"] = 0
    data[: HEADER_DTYPE.itemsize] = header.tobytes()
    header["checksum"] = image.checksum(bytes(data))
    data[: HEADER_DTYPE.itemsize] = header.tobytes()
    return bytes(data)


def test_the_whole_image_runs(tmp_path: Path, whole: bytes) -> None:
    done = start(tmp_path, whole)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("keep", [0, 7, 175, 176, 500, -8, -1])
def test_a_cut_image_is_refused(tmp_path: Path, whole: bytes, keep: int) -> None:
    done = start(tmp_path, whole[:keep])
    assert done.returncode == REFUSED
    assert len(done.stderr.splitlines()) == 1


def test_one_flipped_bit_is_refused(tmp_path: Path, whole: bytes) -> None:
    rng = random.Random(1)
    for _ in range(25):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        assert start(tmp_path, bytes(data)).returncode == REFUSED


def _words_of(data: bytes, kinds: tuple[str, ...]) -> list[int]:
    """Return the byte offsets of all words in the header, section table and sections of `kinds`."""
    size = HEADER_DTYPE.itemsize
    n_sections = int(np.frombuffer(data[:size], HEADER_DTYPE)["n_sections"][0])
    end = size + n_sections * SECTION_DTYPE.itemsize
    rows = np.frombuffer(data[size:end], SECTION_DTYPE)
    words = list(range(0, end, 4))
    for row in rows:
        if SECTIONS[int(row["kind"]) - 1] in kinds:
            n_bytes = int(row["count"]) * int(row["elem_bytes"])
            words += range(int(row["offset"]), int(row["offset"]) + n_bytes, 4)
    return words


@pytest.mark.fuzz
def test_no_number_in_an_image_crashes_a_rank(tmp_path: Path, whole: bytes) -> None:
    """Bad indices under a good checksum: refused, trapped or harmless, never a signal."""
    rng = random.Random(2)
    kinds = ("phase", "entry", "queue", "wait", "signal", "expect", "file", "prompt")
    words = _words_of(whole, kinds)
    codes = set()
    for _ in range(120):
        data = bytearray(whole)
        at = rng.choice(words)
        value = rng.choice([0, 1, 5, 0x7FFF, 0x80000000, 0xFFFFFFFF, rng.getrandbits(32)])
        data[at : at + 4] = value.to_bytes(4, "little")
        done = start(tmp_path, with_checksum(data))
        assert done.returncode in (0, 3, 4, 5), (at, hex(value), done)
        codes.add(done.returncode)
    assert REFUSED in codes


def test_another_isa_is_refused(tmp_path: Path, whole: bytes) -> None:
    data = bytearray(whole)
    at = whole.index(b"K3IMAGE") + 32
    data[at : at + 4] = b"beef"
    done = start(tmp_path, with_checksum(data))
    assert done.returncode == REFUSED
    assert "isa_hash beef" in done.stderr


def test_phases_may_not_share_peer_bytes(tmp_path: Path) -> None:
    from dataclasses import replace

    from k3tool.errors import ArtifactError

    isa = toy.toy_isa()
    moved = tuple(t._replace(offset=0) if t.role == "peer" else t for t in isa.tensors)
    with pytest.raises(ArtifactError, match="apart"):
        toy.images(replace(isa, tensors=moved), tmp_path)
