"""The library that scans bytes: its numbers against NumPy's, in every set of loops."""

import os
from pathlib import Path

import numpy as np
import pytest

from k3tool.checkpoint.scan_library import (
    BLOCK_BYTES,
    CODE_SHARE,
    DONE,
    ENDED,
    ERROR,
    NONE,
    PART_BYTES,
    STOPPED,
    Job,
    Scan,
    Scanner,
    StopFlag,
    product_of,
)
from k3tool.checkpoint.value_targets import BF16, F32, OTHER, PACKED, SCALE
from k3tool.errors import TargetError
from k3tool.ref.formats import FP4_VALUES
from k3tool.runtime import build


def scanner(loops: str = "auto") -> Scanner:
    made = Scanner(StopFlag(), loops)
    probe = made.scan(0, 0, 0, OTHER, 1, high_scale=253, fingerprint=False)
    if probe == ERROR:
        pytest.skip(f"NOT RUN: this CPU has no {loops} loops")
    return made


def scan_of(
    tmp_path: Path, data: np.ndarray, kind: int, row_bytes: int, loops: str = "auto", at: int = 3
) -> Scan:
    """Scan an array's bytes that start at an odd offset of a file."""
    path = tmp_path / "data"
    path.write_bytes(bytes(at) + data.tobytes())
    with path.open("rb") as file:
        made = scanner(loops)
        code = made.scan(
            file.fileno(), at, data.nbytes, kind, row_bytes, high_scale=253, fingerprint=True
        )
    assert code == DONE
    return made.result


# -- the loops ---------------------------------------------------------------------------------

SIZES = [(1, 2), (3, 7), (5, 64), (7, 333), (2, 4096), (40, 33_000)]  # rows, columns


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("shape", SIZES)
def test_bf16_as_numpy_sees_it(tmp_path: Path, loops: str, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(7)
    bits = random.integers(0, 0x7F80, shape).astype("<u2") | random.choice([0, 0x8000], shape)
    bits = bits.astype("<u2")
    bits[shape[0] // 2] = np.uint16(0x8000)  # a row of negative zeros
    result = scan_of(tmp_path, bits, BF16, 2 * shape[1], loops)
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    assert result.n_bytes == bits.nbytes
    assert result.absmax_bits == np.abs(floats).max().view(np.uint32)
    assert (result.n_zero_rows, result.first_zero_row) == (1, shape[0] // 2)
    assert (result.n_nonfinite, result.first_bad) == (0, NONE)


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize(("dtype", "kind"), [("<u2", BF16), ("<f4", F32)])
def test_every_nonfinite_place_is_found(tmp_path: Path, loops: str, dtype: str, kind: int) -> None:
    """NaN of both kinds and both infinities; at the first, last and block-crossing elements."""
    n_columns = 1009
    n_rows = BLOCK_BYTES // (n_columns * np.dtype(dtype).itemsize) + 3
    size = n_rows * n_columns
    bad = [0x7F80, 0xFF80, 0x7F81, 0xFFFF]
    for place in (
        0,
        1,
        n_columns - 1,
        size // 2,
        BLOCK_BYTES // np.dtype(dtype).itemsize,
        size - 1,
    ):
        for bits in bad:
            data = np.full(size, 0x3F80, dtype="<u2") if kind == BF16 else np.ones(size, "<f4")
            if kind == BF16:
                data[place] = bits
            else:
                data.view("<u4")[place] = bits << 16
            result = scan_of(tmp_path, data, kind, n_columns * data.itemsize, loops)
            assert (result.n_nonfinite, result.first_bad) == (1, place)


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("spread", [1, 5, 19, 20, 21, 256])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 16_320, 16_384, 400_001])
def test_scale_histogram(tmp_path: Path, loops: str, spread: int, size: int) -> None:
    random = np.random.default_rng(size)
    data = random.integers(0, spread, size).astype("u1") + np.uint8(0 if spread == 256 else 110)
    result = scan_of(tmp_path, data, SCALE, 97, loops)
    assert np.array_equal(result.histogram_array(), np.bincount(data, minlength=256))
    high = np.nonzero(data >= 253)[0]
    assert result.first_high == (high[0] if len(high) else NONE)


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
def test_codes_and_zero_rows(tmp_path: Path, loops: str) -> None:
    random = np.random.default_rng(3)
    low, high = random.choice([1, 5, 9], (50, 129)), random.choice([0, 2, 8], (50, 129))
    data = (low | high << 4).astype("u1")
    data[17], data[40] = 0x08, 0x88  # zeros of either sign
    data[41, :128], data[41, 128] = 0, 1  # one value at the very end of a row
    result = scan_of(tmp_path, data, PACKED, 129, loops)
    assert (result.n_zero_rows, result.first_zero_row) == (2, 17)
    assert np.array_equal(result.codes_array(), codes_of(data.reshape(-1)))
    assert result.product_key == -1  # no scales were given


def codes_of(data: np.ndarray) -> np.ndarray:
    """Count codes of low and high nibbles in the parts that the scan counts."""
    parts = [data[at : at + PART_BYTES] for at in range(0, data.size, PART_BYTES * CODE_SHARE)]
    counted = np.concatenate(parts)
    return np.array([np.bincount(n, minlength=16) for n in (counted & 15, counted >> 4)])


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("only", [None, 0, 7, 8, 15])
@pytest.mark.parametrize(
    "size", [1, 511, 512, 1023, 1025, PART_BYTES, PART_BYTES + 3, 17 * PART_BYTES, 5_000_011]
)
def test_codes_are_counted(tmp_path: Path, loops: str, only: int | None, size: int) -> None:
    """All codes at random, and one alone: every counter of its byte runs over all its levels."""
    data = np.random.default_rng(size).integers(0, 256, size).astype("u1")
    if only is not None:
        data[:] = only | only << 4
    result = scan_of(tmp_path, data, PACKED, size, loops)
    assert np.array_equal(result.codes_array(), codes_of(data))


# -- codes and their scales --------------------------------------------------------------------


def largest_product(
    tmp_path: Path, scales: np.ndarray, codes: np.ndarray, loops: str = "auto"
) -> float:
    """Return the scan's largest magnitude of one tensor with its scales."""
    path = tmp_path / "both"
    path.write_bytes(b"x" + scales.tobytes() + codes.tobytes())
    with path.open("rb") as file:
        made, fd = scanner(loops), file.fileno()
        jobs = [
            Job(1, scales.nbytes, scales.shape[1], fd, SCALE, True),
            Job(1 + scales.nbytes, codes.nbytes, codes.shape[1], fd, PACKED),
        ]
        assert made.scan_all(jobs, high_scale=253, fingerprint=False) == DONE
    key = made.result.product_key
    assert key >= 0  # the scales were given
    return product_of(key)


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
@pytest.mark.parametrize("most", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("spread", [1, 3, 40])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (40, 112), (300, 65)])
def test_largest_product_as_numpy_sees_it(
    tmp_path: Path, loops: str, most: int, spread: int, shape: tuple[int, int]
) -> None:
    random = np.random.default_rng(most * 100 + spread)
    scales = (random.integers(0, spread, shape) + 110).astype("u1")
    nibbles = random.integers(0, most + 1, (2, shape[0], shape[1] * 16)).astype("u1")
    nibbles |= (random.integers(0, 2, nibbles.shape) << 3).astype("u1")
    nibbles[:, 0, :16] = 0  # a group of zeros has no magnitude, whatever its scale
    scales[0, 0] = 250
    codes = nibbles[0] | nibbles[1] << 4
    magnitudes = np.abs(FP4_VALUES[nibbles]).max(axis=0).reshape(*shape, 16).max(axis=2)
    need = float((magnitudes * 2.0 ** (scales.astype(int) - 127)).max())
    assert largest_product(tmp_path, scales, codes, loops) == need


@pytest.mark.parametrize("loops", ["plain", "avx2", "avx512"])
def test_a_group_of_scale_byte_0_is_zero(tmp_path: Path, loops: str) -> None:
    """As the engine reads it, and not 2^-127 times its codes; scale byte 1 is what it says."""
    scales, codes = np.zeros((3, 70), "u1"), np.full((3, 70 * 16), 0x77, "u1")
    assert largest_product(tmp_path, scales, codes, loops) == 0
    scales[1, 69] = 1
    assert largest_product(tmp_path, scales, codes, loops) == 6 * 2.0**-126
    codes[1, -16:] = 0
    assert largest_product(tmp_path, scales, codes, loops) == 0


def test_a_small_code_of_a_large_scale_may_win() -> None:
    """And a large code of a small scale: neither the scale nor the code alone decides."""
    keys = {2 * scale + (0 if code == 1 else code): abs(FP4_VALUES[code]) * 2.0 ** (scale - 127)
            for scale in range(1, 253) for code in range(1, 8)}  # fmt: skip
    assert all(product_of(key) == value for key, value in keys.items())
    ordered = [keys[key] for key in sorted(keys)]
    assert ordered == sorted(ordered)


# -- fingerprints ------------------------------------------------------------------------------


def fingerprint(tmp_path: Path, data: np.ndarray, loops: str = "auto", at: int = 3) -> bytes:
    return bytes(scan_of(tmp_path, data, OTHER, data.nbytes, loops, at).fingerprint)


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 32_768, BLOCK_BYTES, BLOCK_BYTES + 777])
def test_fingerprint_is_the_same_in_every_loop_and_place(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size).astype("u1")
    found = {fingerprint(tmp_path, data, "plain", at) for at in (0, 1, 64, 4099)}
    for loops in ("avx2", "avx512"):
        made = Scanner(StopFlag(), loops)
        if made.scan(0, 0, 0, OTHER, 1, high_scale=253, fingerprint=False) == DONE:
            found.add(fingerprint(tmp_path, data, loops))
    assert len(found) == 1


def test_fingerprint_sees_what_may_happen_to_bytes(tmp_path: Path) -> None:
    """A bit, a word moved within a block, two blocks exchanged, a length, zeros behind."""
    data = np.random.default_rng(1).integers(0, 256, 8192).astype("u1")
    made = [data]
    for bit in range(8):
        made.append(data.copy())
        made[-1][(977 * bit) % 8192] ^= 1 << bit
    for first, second, size in ((0, 8, 8), (0, 64, 64), (0, 1024, 1024), (1024, 4096, 1024)):
        made.append(data.copy())
        made[-1][first : first + size] = data[second : second + size]
        made[-1][second : second + size] = data[first : first + size]
    made += [data[:-1], np.append(data, np.uint8(0)), np.zeros(8192, "u1"), np.zeros(4096, "u1")]
    assert len({fingerprint(tmp_path, each) for each in made}) == len(made)
    assert fingerprint(tmp_path, data) == fingerprint(tmp_path, data.copy())


# -- the library -------------------------------------------------------------------------------


def test_a_library_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3tool.checkpoint import scan_library

    with pytest.raises(TargetError, match="make build"):
        scan_library.load(tmp_path / "absent.so")
    (tmp_path / "junk.so").write_bytes(b"junk")
    with pytest.raises(TargetError, match=r"junk\.so"):
        scan_library.load(tmp_path / "junk.so")
    assert scan_library.load() is not None  # the control
    monkeypatch.setattr(scan_library, "scan_source_hash", lambda: "0123456789abcdef" * 4)
    scan_library.load.cache_clear()
    with pytest.raises(TargetError, match=r"source_hash: got [0-9a-f]{12}.., need 0123456789ab"):
        scan_library.load()
    scan_library.load.cache_clear()


def test_scan_sources_are_not_the_interpreters(tmp_path: Path) -> None:
    names = {path.name for path in build.source_files()}
    assert "interp.c" in names
    assert not names & {"scan.c", "scan_loops.c", "scan.h"}


def test_end_of_file_stop_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1000))
    stop = StopFlag()
    made = Scanner(stop)
    with path.open("rb") as file:
        options = {"high_scale": 253, "fingerprint": False}
        assert made.scan(file.fileno(), 0, 1001, OTHER, 1, **options) == ENDED
        assert made.result.n_bytes == 1000
        assert made.read_only(file.fileno(), 0, 1001, 4096) == 1000
        stop.set()
        assert made.scan(file.fileno(), 0, 1000, OTHER, 1, **options) == STOPPED
    made = Scanner(StopFlag())
    assert made.scan(-1, 0, 1000, OTHER, 1, **options) == ERROR
    assert os.strerror(made.result.error) == "Bad file descriptor"
