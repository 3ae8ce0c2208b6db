"""Builds the leaves four times with the flags of the product and loads them through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3tool.isa.table import SPECS
from tests.kernels.bodies import Bodies

ROOT = Path(__file__).resolve().parents[2]
COMMON = [
    "-std=gnu11", "-ffp-contract=off", "-fno-fast-math", "-fno-trapping-math", "-fno-math-errno",
    "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
    "-I", str(ROOT / "kernels_common"), "-I", str(ROOT / "kernels_cpu"),
]  # fmt: skip
FLAGS = {
    "scalar": ["-O2", "-fno-tree-vectorize"],
    "avx2": ["-O3", "-mavx2", "-mfma", "-mbmi2"],
    "avx512": [
        "-O3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mfma",
    ],
}  # fmt: skip
FLAGS["avx512_bf16"] = [*FLAGS["avx512"], "-mavx512bf16"]
NEEDS = {
    "scalar": set(),
    "avx2": {"avx2", "fma", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "fma"},
}
NEEDS["avx512_bf16"] = NEEDS["avx512"] | {"avx512_bf16"}
NO_FLUSH = 0x1F80  # MXCSR at process start: subnormals live


class Leaves:
    """One compiled set of leaves; every method takes and returns NumPy arrays."""

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self.lib = ctypes.CDLL(str(path))
        self.csr = int(self.lib.t_contract_mxcsr()) & 0xFFFF

    def call(self, name: str, *args: Any, csr: int | None = None) -> None:
        """Call an export: arrays by address, integers as 64 bit (a register either way)."""
        packed: list[object] = [ctypes.c_uint64(self.csr if csr is None else csr)]
        for arg in args:
            if isinstance(arg, np.ndarray):
                packed.append(ctypes.c_void_p(arg.ctypes.data))
            else:
                packed.append(ctypes.c_uint64(int(arg)))
        getattr(self.lib, name)(*packed)

    def rows(self, kind, W, X, n_blocks=1, rows=None, ldy=None, csr=None):
        """``Y[t, r]`` of rows [rows) of ``W`` (a matrix, or packed and scales for mxfp4).

        A kind with _x16 needs X of bf16 values.
        """
        weights = W if isinstance(W, tuple) else (W,)
        n_rows, K = weights[0].shape[0], X.shape[1]
        lo, hi = rows or (0, n_rows)
        Y = np.full((X.shape[0], ldy or n_rows), np.float32(7e7))
        lead = () if kind.startswith("mxfp4") else (weights[0].strides[0] // weights[0].itemsize,)
        self.call(
            f"t_rows_{kind}", *weights, *lead, lo, hi, K, n_blocks,
            X, X.strides[0] // 4, X.shape[0], Y, Y.shape[1], csr=csr,
        )  # fmt: skip
        return Y[:, lo:hi]

    def blocks(self, packed, scales, x, n_blocks, rows=None, kind="mxfp4"):
        """``D[r, b]``: block dots of one token without the tree."""
        lo, hi = rows or (0, packed.shape[0])
        D = np.full((hi - lo, n_blocks), np.float32(7e7))
        self.call(f"t_blocks_{kind}", packed, scales, lo, hi, x.shape[0], n_blocks, x, D)
        return D

    def picked(self, packed, scales, X, at, n_blocks, rows, kind="mxfp4_at"):
        """``Y[t, r]`` and ``D[t, r, b]`` of the tokens X[at], rows [rows)."""
        at, (lo, hi), K = np.array(at, np.uint32), rows, X.shape[1]
        Y = np.full((len(at), packed.shape[0] + 3), np.float32(7e7))
        self.call(f"t_rows_{kind}", packed, scales, lo, hi, K, X, at, len(at), Y, Y.shape[1])
        ldd = (hi - lo) * n_blocks + 5
        D = np.full((len(at), ldd), np.float32(7e7))
        shape = (lo, hi, K, n_blocks)
        self.call(f"t_blocks_{kind}", packed, scales, *shape, X, at, len(at), D, ldd)
        assert (Y[:, hi:] == np.float32(7e7)).all()
        assert (D[:, ldd - 5 :] == np.float32(7e7)).all()
        return Y[:, lo:hi], D[:, : ldd - 5].reshape(len(at), hi - lo, n_blocks)

    def cols(self, kind, M, x, cols=None):
        """``y[j]`` over columns [cols) of ``M``."""
        lo, hi = cols or (0, M.shape[1])
        y = np.full(M.shape[1], np.float32(7e7))
        lead = M.strides[0] // M.itemsize
        self.call(f"t_cols_{kind}", M, lead, x.shape[0], lo, hi, x, y)
        return y[lo:hi]

    def mixes(self, rows, E, cols):
        """``Y[h, j]``: the rows' first columns weighed by ``E[h]``, row after row."""
        Y = np.full((len(E), cols + 3), np.float32(7e7))
        self.call(
            "t_mix_f32", rows, rows.shape[1], len(rows), cols, E, E.shape[1], len(E), Y, cols + 3
        )
        assert (Y[:, cols:] == np.float32(7e7)).all()
        return Y[:, :cols]

    def one(self, name, *arrays, csr=None):
        """A single sum over ``arrays``."""
        y = np.zeros(1, np.float32)
        self.call(f"t_{name}", *arrays, arrays[0].shape[0], y, csr=csr)
        return y[0]

    def map(self, name, x, u=None, csr=None):
        """An elementwise function."""
        x = np.ascontiguousarray(x, np.float32)
        u = x if u is None else np.ascontiguousarray(u, np.float32)
        y = np.empty_like(x)
        self.call(f"t_{name}", x, u, y, x.size, csr=csr)
        return y


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    return set()


def build(folder: Path, isa: str, shim: str) -> Path:
    """Compile one shim with one set of leaves; skip where this CPU cannot run it."""
    missing = NEEDS[isa] - cpu_flags()
    if missing:
        pytest.skip(f"NOT RUN: no {' '.join(sorted(missing))} on this CPU")
    path = folder / f"{isa}.so"
    source = str(ROOT / "tests/kernels" / shim)
    flags = [*COMMON, "-I", str(folder), *FLAGS[isa], f"-DK3_LEAVES_{isa.upper()}"]
    command = ["gcc", *flags, source, "-o", str(path), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def leaf_library(tmp_path_factory):
    """Return ``load(isa) -> Leaves``, building each compilation once."""
    folder, made = tmp_path_factory.mktemp("leaves"), {}

    def load(isa: str) -> Leaves:
        if isa not in made:
            made[isa] = Leaves(isa, build(folder, isa, "shim.c"))
        return made[isa]

    return load


@pytest.fixture(scope="session")
def body_library(tmp_path_factory):
    """Return ``load(isa) -> Bodies``, building each compilation once."""
    folder, made = tmp_path_factory.mktemp("bodies"), {}
    names = [spec.name.lower() for spec in SPECS.values() if "cpu" in spec.targets]
    (folder / "k3_ops.h").write_text("".join(f'#include "ops/{name}.h"\n' for name in names))

    def load(isa: str) -> Bodies:
        if isa not in made:
            made[isa] = Bodies(isa, build(folder, isa, "shim_ops.c"))
        return made[isa]

    return load


@pytest.fixture(params=["scalar", "avx2", "avx512", "avx512_bf16"])
def bodies(request, body_library):
    """The op bodies with every set of leaves."""
    return body_library(request.param)


@pytest.fixture
def scalar(leaf_library):
    """The definition of the bits."""
    return leaf_library("scalar")


@pytest.fixture(params=["avx2", "avx512", "avx512_bf16"])
def vector(request, leaf_library):
    """A set of leaves that must equal the definition."""
    return leaf_library(request.param)


@pytest.fixture(params=["scalar", "avx2", "avx512", "avx512_bf16"])
def leaves(request, leaf_library):
    """Every set of leaves."""
    return leaf_library(request.param)


@pytest.fixture(scope="session")
def simt_bodies_of(tmp_path_factory):
    """Return ``load(vendor, *defines, **headers) -> Bodies``, lanes emulated."""
    from tests.kernels.simt_bodies import loader  # which needs this file

    return loader(tmp_path_factory.mktemp("simt_ops"))
