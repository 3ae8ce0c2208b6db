"""Builds a GPU interpreter for the host: kernels_common/simt_interp.h on emulated blocks.

The result takes the place of `k3-cpu`: the same images, segments, records and driver.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from k3tool.isa.table import SPECS
from k3tool.runtime import build
from tests.kernels.conftest import ROOT
from tests.kernels.test_simt_leaves import FLAGS, FOLDER, FORWARD, VENDOR_LANES

# The parts of `k3-cpu` that know neither leaves nor the loop.
OWN = {
    "ops_body.c",
    "measure_loops.c",
    "measure.c",
    "measure_io.c",
    "cpu.c",
    "interp.c",
    "team.c",
    "waiting.c",
    "observe.c",
}
UNITS = [unit.source for unit in build._UNITS if unit.source not in OWN]
CXX = [
    *(flag for flag in FLAGS if flag not in {"-shared", "-fPIC"}),
    "-Wno-missing-field-initializers", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Emulated:
    """One emulated device: whose lanes, how many L2 domains, in how many launches a step is cut.

    `edits` replace text of the interpreter, each exactly once: negative controls.
    """

    vendor: str = "cuda"
    domains: int = 1
    segments: int = 1
    order: int = FORWARD
    without: str = ""
    only: tuple[str, ...] = ()  # of all ops these alone, sooner compiled
    defines: tuple[str, ...] = ()
    edits: tuple[tuple[str, str], ...] = ()

    def build(self, folder: Path, shared: Path) -> Path:
        """Compile into `folder` and link with what `build_shared` left; return the executable."""
        made = compile_unit(self, "interp_host.cpp", folder, "-c")
        objects = [str(made), *(str(path) for path in shared.glob("*.o"))]
        linked = folder / "emulated"
        _run(["gcc", "-pthread", *objects, "-lm", "-o", str(linked)])
        return linked

    def _edited(self, folder: Path) -> None:
        if not self.edits:
            return
        text = (ROOT / "kernels_common" / "simt_interp.h").read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / "simt_interp.h").write_text(text)


def compile_unit(device: Emulated, source: str, folder: Path, *how: str) -> Path:
    """Compile one C++ file of simt_host for a device into `folder`; return what was made."""
    device._edited(folder)
    specs = [spec for _, spec in sorted(SPECS.items()) if device.vendor in spec.targets]
    names = [spec.name for spec in specs if spec.name != device.without]
    names = [name for name in names if name in (device.only or names)]
    (folder / "k3_ops.h").write_text(
        "".join(f'#include "ops/{name.lower()}.h"\n' for name in names)
    )
    rows = " ".join(f"X({name}, {name.lower()})" for name in names)
    defines = {
        "K3_HOST_LANES": VENDOR_LANES[device.vendor], "K3_HOST_ORDER": device.order,
        "K3_HOST_DOMAINS": device.domains, "K3_HOST_SEGMENTS": device.segments,
        "K3_PHASES": "3u", "K3_INTERP_OPS(X)": rows,
    }  # fmt: skip
    folders = (folder, FOLDER, ROOT / "kernels_common")
    made = folder / "host.o"
    _run([
        "g++", *CXX, *(["-O1"] if device.edits else []),
        *(f"-D{name}={value}" for name, value in defines.items()),
        *(f"-D{name}" for name in device.defines), *(f"-I{path}" for path in folders), *how,
        str(FOLDER / source), "-o", str(made),
    ])  # fmt: skip
    return made


def build_shared(folder: Path) -> None:
    """Compile what all emulated devices share with `k3-cpu`."""
    for source in UNITS:
        _run([
            "gcc", "-std=gnu11", "-O1", "-pthread", '-DK3_SOURCE_HASH="emulated"',
            f"-I{ROOT / 'kernels_cpu'}", f"-I{ROOT / 'kernels_common'}", "-c",
            str(ROOT / "kernels_cpu" / source), "-o", str(folder / f"{source}.o"),
        ])  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
