"""Pictures of a report: colours that everybody tells apart, labels that any file name gives."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from k3tool.bench.pictures import (
    COLOURS,
    HANDOFF,
    OTHER,
    anatomy_picture,
    ink_on,
    label_text,
    op_colours,
    roofline_picture,
)
from k3tool.bench.pictures_of_programs import busiest

Array = npt.NDArray[np.float64]
PAPERS = ("#ffffff", "#14161a")  # of k3tool/bench/page.py
# What who lacks one receptor sees, in linear RGB. Source: Machado, Oliveira and Fernandes, A
# Physiologically-based Model for Simulation of Color Vision Deficiency (2009), severity 1.
SIGHTS = {
    "all receptors": np.eye(3),
    "no long waves": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                      [-0.003882, -0.048116, 1.051998]],
    "no middle waves": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                        [-0.01182, 0.04294, 0.968881]],
    "no short waves": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                       [0.004733, 0.691367, 0.3039]],
}  # fmt: skip
LEAST_APART = 14.0  # in CIELAB; some 2 are just seen side by side


def linear(colour: str) -> Array:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light: Array) -> Array:
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175],
                       [0.0193339, 0.119192, 0.9503041]])  # fmt: skip
    xyz = to_xyz @ np.clip(light, 0, 1) / np.array([0.95047, 1, 1.08883])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one: str, other: str) -> float:
    """How far two colours are for who tells them apart worst."""
    return min(
        float(np.linalg.norm(lab(np.array(m) @ linear(one)) - lab(np.array(m) @ linear(other))))
        for m in SIGHTS.values()
    )


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(np.dot((0.2126, 0.7152, 0.0722), linear(c))) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_everybody_tells_the_colours_apart() -> None:
    for one, other in itertools.combinations((*COLOURS, OTHER, HANDOFF), 2):
        assert apart(one, other) > LEAST_APART, (one, other)
    assert apart("#228833", "#99753d") < LEAST_APART, "the control: a green and a brown"


def test_colours_stand_out_from_both_papers_and_text_from_them() -> None:
    for colour in (*COLOURS, OTHER, HANDOFF):
        assert all(contrast(colour, paper) > 2.2 for paper in PAPERS), colour
        assert contrast(colour, ink_on(colour)) > 4.5, colour
    assert contrast("#d79b1a", "#ffffff") < 4.5, "the control: white on amber"


def test_the_enlarged_part_is_where_most_packets_begin() -> None:
    assert busiest([0.0, 50.0, 51.0, 52.0, 90.0], 5.0, 100.0) == 50.0
    assert busiest([0.0, 97.0, 98.0, 99.0], 5.0, 100.0) == 0.0, "it ends with the step"
    assert busiest([99.0], 5.0, 100.0) == 95.0


@pytest.mark.parametrize("name", ["a$\\frac$b", "$x", "two\nlines", "字" * 300, "<&>", ""])
def test_any_name_can_be_drawn(name: str) -> None:
    """A file's name, or an op's of a file that somebody else wrote, is a text and no formula."""
    assert len(label_text(name)) <= 111
    step = {
        "ops": [{"op": name, "seconds": 1.0}], "handoff": 0.0, "idle": 1.0, "wall": 1.0,
        "n_workers": 2,
    }  # fmt: skip
    colours = op_colours({name: 1.0})
    assert anatomy_picture("a", {f"decode ({name})": step}, colours).startswith("<svg")
    found = roofline_picture("r", [(name, 1.0, 1e9, 0.5)], 1e9, 1e10, colours)
    assert found.startswith("<svg")
