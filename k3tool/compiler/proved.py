"""Writes plans and streams so that none is ever in place that did not prove itself."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from k3tool.atomic import disk_hint, system_words
from k3tool.compiler.checks import check_program, require_proved, verify_plan
from k3tool.compiler.plan import Plan, save_plan
from k3tool.errors import K3Error
from k3tool.isa.stream import Isa, read_isa, save_isa
from k3tool.verdict import Check

_T = TypeVar("_T")


def save_proved_plan(plan: Plan, path: Path) -> Plan:
    """Write plan.h5 after checks A to E on the written bytes; return the plan with its digest.

    Raises: UnsoundError naming the check, with nothing left at `path`; K3Error as `save_plan`.
    """
    return _proved(path, lambda candidate: save_plan(plan, candidate), verify_plan)


def save_proved_isa(isa: Isa, path: Path) -> str:
    """Write isa.h5 after checks F and G on the written bytes; return its digest.

    Raises: UnsoundError naming the check, with nothing left at `path`; K3Error as `save_isa`.
    """
    return _proved(
        path,
        lambda candidate: save_isa(isa, candidate),
        lambda candidate: check_program(read_isa(candidate), str(candidate)),
    )


def _proved(
    path: Path, write: Callable[[Path], _T], check: Callable[[Path], Sequence[Check]]
) -> _T:
    candidate = path.with_name(f".{path.name}.unproved")
    try:
        written = write(candidate)
        require_proved(check(candidate), str(path))
        os.replace(candidate, path)
    except OSError as error:
        got, hint = system_words(error), disk_hint(error)
        raise K3Error(str(path), got=got, need="a writable file", hint=hint) from None
    except K3Error as error:  # of a name that nobody knows
        error.object = error.object.replace(str(candidate), str(path))
        raise
    finally:
        with contextlib.suppress(OSError):
            candidate.unlink(missing_ok=True)
    return written
