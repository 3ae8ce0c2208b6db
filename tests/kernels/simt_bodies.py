"""Op bodies compiled with a block's lanes emulated on the host."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from k3tool.isa.table import SPECS
from tests.kernels.bodies import Bodies
from tests.kernels.conftest import ROOT
from tests.kernels.test_simt_leaves import FLAGS, FOLDER, VENDOR_LANES


def loader(folder: Path) -> Callable[..., Bodies]:
    """Return ``load(vendor, *defines, **headers) -> Bodies`` compiled for that vendor's block.

    `headers` are texts that stand for those of ops.
    """
    made: dict[tuple[object, ...], Bodies] = {}

    def load(vendor: str, *defines: str, **headers: str) -> Bodies:
        if (vendor, defines, *headers.items()) not in made:
            include = folder / str(len(made))
            (include / "ops").mkdir(parents=True, exist_ok=True)
            for op, altered in headers.items():  # found first, and its guard keeps the other out
                (include / "ops" / f"{op}.h").write_text(altered)
            names = [spec.name.lower() for spec in SPECS.values() if vendor in spec.targets]
            text = "".join(f'#include "ops/{name}.h"\n' for name in names)
            (include / "k3_ops.h").write_text(text)
            flags = [*FLAGS, *defines, f"-DK3_HOST_LANES={VENDOR_LANES[vendor]}",
                     f"-DK3_SIMT_OPS=K3_OPS_{vendor.upper()}_DECODE"]  # fmt: skip
            common = ROOT / "kernels_common"
            folders = [f"-I{f}" for f in (include, FOLDER, common, common / "ops")]
            source, path = FOLDER / "ops_simt.cpp", include / "ops.so"
            command = ["g++", *flags, *folders, str(source), "-o", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made[vendor, defines, *headers.items()] = Bodies(vendor, path)
        return made[vendor, defines, *headers.items()]

    return load
