"""The image side's tensors, known so that they can be named as dropped; the text model reads none.

Source: released index and `vision_config`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from k3tool.model.config import K3Config
from k3tool.model.config_fields import Section
from k3tool.model.weights import Shape, Split, TensorRow, TensorSpec, Where


class Counts:
    """The counts of a section of the config, each looked at when a shape needs it."""

    def __init__(self, section: Section) -> None:
        """Take the section."""
        self._section = section

    def __getitem__(self, name: str) -> int:
        """Return a count. Raises: ArtifactError naming the field."""
        return self._section.count(name)


class VisionRow(NamedTuple):
    """One vision tensor pattern; its shape comes from `vision_config`."""

    pattern: str
    shape: Callable[[Counts], Shape]


def _merged(v: Counts) -> int:
    return v["mm_hidden_size"] * 4  # a merge kernel of 2 by 2 patches


_BLOCK = "vision_tower.encoder.blocks.{B}."
# The text model reads none of these: shard names them as dropped, inspect lists them apart.
# fmt: off
VISION_TABLE: tuple[VisionRow, ...] = (
    VisionRow("vision_tower.patch_embed.proj.weight",
              lambda v: (v["vt_hidden_size"], 3, v["patch_size"], v["patch_size"])),
    VisionRow("vision_tower.patch_embed.pos_emb.weight",
              lambda v: (v["init_pos_emb_height"], v["init_pos_emb_width"], v["vt_hidden_size"])),
    VisionRow(_BLOCK + "norm0.weight",   lambda v: (v["vt_hidden_size"],)),
    VisionRow(_BLOCK + "norm1.weight",   lambda v: (v["vt_hidden_size"],)),
    VisionRow(_BLOCK + "wqkv.weight",    lambda v: (3 * v["qkv_hidden_size"], v["vt_hidden_size"])),
    VisionRow(_BLOCK + "wo.weight",      lambda v: (v["vt_hidden_size"], v["qkv_hidden_size"])),
    VisionRow(_BLOCK + "mlp.fc0.weight", lambda v: (v["vt_intermediate_size"], v["vt_hidden_size"])),
    VisionRow(_BLOCK + "mlp.fc1.weight", lambda v: (v["vt_hidden_size"], v["vt_intermediate_size"])),
    VisionRow("vision_tower.encoder.final_layernorm.weight", lambda v: (v["vt_hidden_size"],)),
    VisionRow("mm_projector.proj.0.weight",    lambda v: (_merged(v), _merged(v))),
    VisionRow("mm_projector.proj.2.weight",    lambda v: (v["text_hidden_size"], _merged(v))),
    VisionRow("mm_projector.post_norm.weight", lambda v: (v["text_hidden_size"],)),
)
# fmt: on
_VISION_PREFIXES = tuple(sorted({row.pattern.split(".")[0] + "." for row in VISION_TABLE}))


def is_vision(name: str) -> bool:
    """Return whether a tensor belongs to the image side, which the text model never reads."""
    return name.startswith(_VISION_PREFIXES)


def expected_vision(config: K3Config) -> Iterator[TensorSpec]:
    """Yield the vision tensors `vision_config` describes; none for a text-only config.

    Raises: ArtifactError naming a field that is missing or no count.
    """
    if config.config_dict.get("vision_config") is None:
        return
    vision = Counts(Section(config.config_dict, "config.json").section("vision_config"))
    for row in VISION_TABLE:
        shape = row.shape(vision)
        blocks = range(vision["vt_num_hidden_layers"]) if "{B}" in row.pattern else (None,)
        table_row = TensorRow(
            row.pattern, "BF16", lambda _: (), Split.DROP, "", Where.VISION, "vision"
        )
        for block in blocks:
            name = row.pattern if block is None else row.pattern.replace("{B}", str(block))
            yield TensorSpec(name, "BF16", shape, Split.DROP, shape[0], table_row, None, None, name)
