"""What a check says, and what a list of checks amounts to. No check passes by not running."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from k3tool.errors import UnsoundError

Status = Literal["PASS", "FAIL", "NOT RUN"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome: `detail` says what was compared, or what is wrong and where."""

    name: str
    status: Status
    detail: str


def passed(name: str, detail: str) -> Check:
    """Return a check that held."""
    return Check(name, "PASS", detail)


def failed(name: str, detail: str) -> Check:
    """Return a check that did not hold."""
    return Check(name, "FAIL", detail)


def not_run(name: str, reason: str) -> Check:
    """Return a check that was not made, which is counted and never a pass."""
    return Check(name, "NOT RUN", reason)


def outcome(name: str, result: tuple[str, list[str]]) -> Check:
    """Return the check of a (claim, faults) pair: the first fault is shown, the others counted."""
    claim, faults = result
    if not faults:
        return passed(name, claim)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return failed(name, faults[0] + more)


def count(checks: Sequence[Check], status: Status) -> int:
    """Return how many checks have a status."""
    return sum(check.status == status for check in checks)


def summary(checks: Sequence[Check]) -> str:
    """Return the total in one line."""
    parts = [f"{count(checks, status)} {status}" for status in ("PASS", "FAIL", "NOT RUN")]
    return ", ".join(parts)


def is_sound(checks: Sequence[Check], *, strict: bool) -> bool:
    """Return whether the checks amount to a pass: at least one ran and none failed.

    Under `strict` a check that was not run counts as failed.
    """
    if count(checks, "FAIL") or (strict and count(checks, "NOT RUN")):
        return False
    return count(checks, "PASS") > 0


def require(checks: Sequence[Check], *, strict: bool, alone: str | None = None) -> None:
    """Raise UnsoundError (exit 4) unless the checks amount to a pass.

    `alone` is the next step where the only thing wrong is that nothing could be compared.
    """
    if not is_sound(checks, strict=strict):
        need = "every check to run and pass" if strict else "at least one check, and none to fail"
        word = "FAIL" if count(checks, "FAIL") else "NOT RUN"
        hint = f"its lines marked {word} say what and where"
        if alone is not None and not count(checks, "FAIL") and not count(checks, "PASS"):
            hint = alone
        raise UnsoundError("checks", got=summary(checks), need=need, hint=hint)
