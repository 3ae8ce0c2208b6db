"""Which values a trace holds beside hashes, as options say it: positions and layers."""

from dataclasses import dataclass

from k3tool.errors import UsageError, quoted


@dataclass(frozen=True, slots=True)
class Kept:
    """Of which positions and layers a trace holds the values themselves; `layers` None: of all.

    Positions `first` to `last` count tokens of the sequence from 0, whatever step reads them.
    """

    first: int
    last: int
    layers: frozenset[int] | None = None

    def takes(self, layer: int | None) -> bool:
        """Return whether a layer's values are kept; None, outside of layers, without a choice."""
        return self.layers is None or layer in self.layers


def parse_kept(text: str) -> Kept:
    """Return what `5`, `0-7` or `5:0,3-6` (positions:layers) says. Raises: UsageError."""
    positions, colon, layers = text.partition(":")
    first, last = _range(positions, text)
    chosen: set[int] = set()
    for part in layers.split(",") if colon else ():
        lo, hi = _range(part, text)
        chosen.update(range(lo, hi + 1))
    return Kept(first, last, frozenset(chosen) if colon else None)


_MOST = 1 << 24  # positions: kernels_cpu/hashes.h has 32 bits for them, a context never as many


def _range(text: str, whole: str) -> tuple[int, int]:
    words = [word.strip() for word in text.split("-")]
    good = all(w.isascii() and w.isdigit() and len(w) < 9 for w in words) and len(words) <= 2
    numbers = [int(word) for word in words] if good else [1, 0]
    if numbers[0] > numbers[-1] or numbers[-1] >= _MOST:
        need = "numbers such as 5, 0-7 or 5:0,3-6 (positions:layers)"
        raise UsageError("--trace-at", got=quoted(whole), need=need)
    return numbers[0], numbers[-1]


def describe_kept(kept: Kept | None) -> dict[str, object] | None:
    """Return what is kept as a trace's parameters say it."""
    if kept is None:
        return None
    layers = None if kept.layers is None else sorted(kept.layers)
    return {"first": kept.first, "last": kept.last, "layers": layers}
