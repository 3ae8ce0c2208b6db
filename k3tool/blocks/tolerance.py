"""How near is near enough: of an op by itself, and of a layer from its input to a point in it.

Tolerances are shares of the rms of what should have come out, and in bf16 mode of the number itself
too: there a value beside a rounding point may round to the other side. docs/verify.md says what
they were measured against.
"""

from typing import NamedTuple

import numpy as np

from k3tool.ref.formats import Array


class Tolerance(NamedTuple):
    """|got - want| is to be at most `of_rms` times the rms of want plus `of_value` times |want|."""

    of_rms: float
    of_value: float = 0.0

    @property
    def text(self) -> str:
        """Return it in words."""
        own = f" + {self.of_value:.2g} |x|" if self.of_value else ""
        return f"{self.of_rms:.2g} rms{own}"


OP = {"f32": Tolerance(2e-5), "bf16": Tolerance(2**-7, 2**-7)}
BLOCK = {"f32": Tolerance(2e-5), "bf16": Tolerance(2**-4, 2**-6)}


class Worst(NamedTuple):
    """The largest difference in tolerances, and where: (position, column)."""

    ratio: float
    position: int
    column: int
    rms: float

    @property
    def text(self) -> str:
        """Return it in words."""
        return f"worst={self.ratio:.2f}x tol at (position {self.position}, column {self.column})"


def worst_of(want: Array, got: Array, first: int, tolerance: Tolerance) -> Worst:
    """Return the worst of rows from position `first` on; what is no number is infinitely wrong.

    Shapes: want, got (rows, columns). Units: of the result is a multiple of what is tolerated.
    """
    assert want.shape == got.shape, (want.shape, got.shape)
    rms = float(np.sqrt(np.mean(np.square(want)))) if want.size else 0.0
    bound = tolerance.of_rms * rms + tolerance.of_value * np.abs(want)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        apart = np.abs(got - want)
        ratio = np.where(apart == 0, 0.0, apart / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    row, column = divmod(int(np.argmax(ratio)), want.shape[1])
    return Worst(float(ratio[row, column]), first + row, column, rms)
