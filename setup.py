"""Build hook: the CPU interpreter and the scan library are compiled at install."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildInterpreter(build_py):
    def run(self):
        super().run()
        sys.path.insert(0, str(ROOT))  # pip builds where this folder is on no path
        from k3tool.errors import TargetError
        from k3tool.runtime import build as interpreter

        # Editable installs run from the source tree, so the executable belongs there.
        root = ROOT if self.editable_mode else Path(self.build_lib)
        try:
            interpreter.build(interpreter.executable_path(root), root=ROOT, keep=self.editable_mode)
            interpreter.build_scan(interpreter.scan_library_path(root), root=ROOT)
        except TargetError as error:
            sys.exit(error.text("install"))


setup(cmdclass={"build_py": BuildInterpreter})
