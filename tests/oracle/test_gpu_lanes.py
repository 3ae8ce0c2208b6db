"""The model on emulated GPU lanes: the bodies and leaves that GPUs compile, from prompt to logits.

The real interpreter, its bodies run by a block of 256 or 512 lanes per slice. It holds that the
text for GPUs computes the hash of the CPU; no GPU has run it.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from k3tool.errors import UnsoundError
from k3tool.isa.table import SPECS
from k3tool.runtime.build import ROOT, SOURCE_FOLDERS, build
from k3tool.runtime.run import RunResult
from tests.kernels.test_simt_leaves import FLAGS, FOLDER, FORWARD, REVERSE, VENDOR_LANES
from tests.oracle.conftest import digest

OWN_BODY = "[K3_OP_##NAME] = k3_op_##name,\n#endif"
LANES_BODY = "[K3_OP_##NAME] = k3_simt_op,\n#endif"
DECLARED = "extern void k3_simt_op(K3Ctx *, const K3Inst *, uint32_t, uint32_t);\n"


@pytest.fixture(scope="module")
def on_lanes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that builds the interpreter for a vendor's block and an order of lanes."""

    def make(vendor: str, order: int, *defines: str) -> Path:
        root = tmp_path_factory.mktemp(vendor)
        for folder in SOURCE_FOLDERS:
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("build"))
        bodies = root / "kernels_cpu" / "ops_body.c"
        text = bodies.read_text()
        assert text.count(OWN_BODY) == 1
        bodies.write_text('#include "bodies.h"\n' + DECLARED + text.replace(OWN_BODY, LANES_BODY))
        names = [spec.name.lower() for spec in SPECS.values() if vendor in spec.targets]
        (root / "k3_ops.h").write_text("".join(f'#include "ops/{name}.h"\n' for name in names))
        made = root / "lanes.o"
        command = [
            "g++", *(flag for flag in FLAGS if flag != "-shared"), "-c", "-fno-exceptions",
            f"-DK3_HOST_LANES={VENDOR_LANES[vendor]}", f"-DK3_HOST_ORDER={order}", *defines,
            f"-DK3_SIMT_OPS=K3_OPS_{vendor.upper()}_DECODE", f"-I{root}", f"-I{FOLDER}",
            f"-I{ROOT / 'kernels_common'}", str(FOLDER / "ops_simt.cpp"), "-o", str(made),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        # No unit is called so: the object is for the linker alone.
        return build(root / "k3-cpu", root=root, flags=[str(made)], only=["link"], keep=False)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "vendor", "order"),
    [
        ("tiny13", {"tp": 1}, "cuda", REVERSE),
        ("tiny13", {"tp": 1}, "hip", FORWARD),
        ("tiny_tp8", {"tp": 2, "chunk": 3}, "cuda", FORWARD),
        ("tiny_wide", {"tp": 1}, "hip", REVERSE),
    ],
)
def test_emulated_lanes_give_the_hash(
    engine: Callable[..., RunResult],
    on_lanes: Callable[..., Path],
    name: str,
    options: dict[str, int],
    vendor: str,
    order: int,
) -> None:
    given = {"gen": 3, "leaves": "scalar", "threads": 1, "workgroups": 4, **options}
    lanes = engine(name, "p7", interpreter=on_lanes(vendor, order), **given)
    assert digest(lanes) == digest(engine(name, "p7", **given))


@pytest.mark.slow
def test_control_without_barriers_the_hash_differs(
    engine: Callable[..., RunResult], on_lanes: Callable[..., Path]
) -> None:
    given = {"gen": 1, "leaves": "scalar", "threads": 1, "workgroups": 4, "tp": 1}
    racing = on_lanes("cuda", FORWARD, "-DK3_HOST_NO_SYNC")
    try:
        found = digest(engine("tiny13", "p7", interpreter=racing, **given))
    except UnsoundError:  # a race may as well end in a value that is not finite
        return
    assert found != digest(engine("tiny13", "p7", **given))
