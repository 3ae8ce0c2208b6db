"""The targets a program can be compiled for, and what a compiler must know of each.

It does not load a device; the interpreters' loaders do.
"""

from dataclasses import dataclass

from k3tool.errors import UsageError


@dataclass(frozen=True, slots=True)
class Target:
    """One target: its name on the command line, and the workgroups a stream is laid out for.

    `workgroups` is a default. On the CPU they are virtual: any number runs on any thread count.
    """

    name: str
    family: str
    workgroups: int


TARGETS: dict[str, Target] = {target.name: target for target in (Target("cpu", "cpu", 8),)}


def get_target(name: str) -> Target:
    """Return a target by name. Raises: UsageError listing the known ones."""
    if name not in TARGETS:
        raise UsageError("target", got=name, need=" or ".join(sorted(TARGETS)))
    return TARGETS[name]
