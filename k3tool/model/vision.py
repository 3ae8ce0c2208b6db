"""The image side's tensors, known so that they can be named as dropped; the text model reads none.

Source: released index and `vision_config`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from k3tool.errors import ArtifactError
from k3tool.model.config import K3Config
from k3tool.model.weights import Shape, Split, TensorRow, TensorSpec, Where


class VisionRow(NamedTuple):
    """One vision tensor pattern; its shape comes from `vision_config`."""

    pattern: str
    shape: Callable[[Mapping[str, int]], Shape]


def _merged(v: Mapping[str, int]) -> int:
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

    Raises: ArtifactError naming a field that is missing.
    """
    vision = config.config_dict.get("vision_config")
    if vision is None:
        return
    for row in VISION_TABLE:
        try:
            shape = row.shape(vision)
            blocks = range(vision["vt_num_hidden_layers"]) if "{B}" in row.pattern else (None,)
        except KeyError as error:
            raise ArtifactError(
                f"vision_config.{error.args[0]}", got="no such field", need="an integer"
            ) from None
        table_row = TensorRow(
            row.pattern, "BF16", lambda _: (), Split.DROP, "", Where.VISION, "vision"
        )
        for block in blocks:
            name = row.pattern if block is None else row.pattern.replace("{B}", str(block))
            yield TensorSpec(name, "BF16", shape, Split.DROP, shape[0], table_row, None, None, name)
