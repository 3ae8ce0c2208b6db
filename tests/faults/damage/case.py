"""What a case of the damage suite is: a kind, an instance, the damage, and what must be said."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Damages the copy in place; may return another path to give to the commands.
Damage = Callable[[Path], object]

ARTIFACT = 3


class Case(NamedTuple):
    """One damaged checkpoint.

    `words` must stand in the one message of each command: file, tensor, found, needed. No words:
    the variation is legal, and tokens equal the healthy checkpoint's. `never` must not be said.
    """

    kind: str
    instance: str
    damage: Damage
    words: tuple[str, ...] = ()
    never: tuple[str, ...] = ()

    @property
    def is_legal(self) -> bool:
        """Return whether all commands must simply work."""
        return not self.words

    @property
    def id(self) -> str:
        """Return the case's name in test reports."""
        return f"{self.kind}: {self.instance}"


def refused(kind: str, instance: str, damage: Damage, *words: str, never: str = "") -> Case:
    """Return a case that inspect, shard and run refuse with the same words."""
    assert words, "a refusal without words would accept any message"
    return Case(kind, instance, damage, words, tuple(never.split()))


def legal(kind: str, instance: str, damage: Damage) -> Case:
    """Return a case that simply works."""
    return Case(kind, instance, damage)
