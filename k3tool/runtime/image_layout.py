"""The layout of an image: rows, kinds of sections and places, as `kernels_cpu/image.h` has them.

Written by `image`, read back by `image_view`. A field that changes here changes there and VERSION.
"""

import numpy as np

MAGIC, VERSION = b"K3IMAGE\0", 3
N_OPCODES, NO_SLOT, ALIGN = 256, 0xFF, 64
NO_COPY = 0xFFFFFFFF
ROUTE_IN_SCRATCH = 0x80
SECTIONS = (
    "phase", "inst", "entry", "queue", "wait", "signal", "expect", "op", "tensor", "expert", "file",
    "text", "prompt", "stop",
)  # fmt: skip

HEADER_DTYPE = np.dtype(
    [
        ("magic", "S8"), ("version", "<u4"), ("n_sections", "<u4"),
        ("file_bytes", "<u8"), ("checksum", "<u8"), ("isa_hash", "S64"),
        ("rank", "<u4"), ("n_ranks", "<u4"), ("n_workgroups", "<u4"), ("n_slots", "<u4"),
        ("max_pages", "<u4"), ("max_context", "<u4"), ("max_counters", "<u4"), ("max_gates", "<u4"),
        ("arena_bytes", "<u8"), ("private_bytes", "<u8"), ("peer_bytes", "<u8"),
        ("chunk", "<u4"), ("n_gen", "<u4"), ("all_logits", "<u4"), ("vocab", "<u4"),
        ("first_phase", "<u4"), ("n_load_queues", "<u4"), ("n_fetch_queues", "<u4"),
        ("n_expert_slots", "<u4"),
        ("ring_bytes", "<u8"), ("pinned_bytes", "<u8"), ("slot_bytes", "<u8"),
    ]
)  # fmt: skip
SECTION_DTYPE = np.dtype(
    [
        ("kind", "<u4"), ("phase", "<u4"), ("offset", "<u8"), ("count", "<u8"),
        ("elem_bytes", "<u4"), ("reserved", "<u4"),
    ]
)  # fmt: skip
PHASE_DTYPE = np.dtype(
    [
        ("max_tokens", "<u4"), ("scratch_floats", "<u4"), ("n_counters", "<u4"), ("n_gates", "<u4"),
        ("output_handle", "<u4"), ("logits_handle", "<u4"), ("logits_cols", "<u4"),
        ("reserved", "<u4"),
    ]
)  # fmt: skip
OP_DTYPE = np.dtype(
    [
        ("output_slot", "u1"), ("digest_mode", "u1"), ("unit_kind", "u1"), ("route_slot", "u1"),
        ("n_outputs", "u1"), ("reserved", "u1", 3),
    ]
)  # fmt: skip
TENSOR_DTYPE = np.dtype(
    [
        ("place", "<u4"), ("elem_bytes", "<u4"), ("offset", "<u8"), ("bytes", "<u8"),
        ("file", "<u4"), ("row_elems", "<u4"), ("expert0", "<u4"), ("n_experts", "<u4"),
        ("packed_bytes", "<u8"), ("scale_bytes", "<u8"), ("replicated", "<u4"),
        ("is_primed", "<u4"), ("home", "<u8"),
    ]
)  # fmt: skip
EXPERT_DTYPE = np.dtype(
    [
        ("packed_file", "<u4"), ("scale_file", "<u4"),
        ("packed_offset", "<u8"), ("scale_offset", "<u8"),
    ]
)  # fmt: skip
FILE_DTYPE = np.dtype(
    [("path_offset", "<u8"), ("bytes", "<u8"), ("copy", "<u4"), ("device", "<u4")]
)
assert HEADER_DTYPE.itemsize == 208
assert TENSOR_DTYPE.itemsize == 72

PLACE_FILE, PLACE_EXPERTS, PLACE_ARENA, PLACE_PEER, PLACE_PRIVATE = 1, 2, 3, 4, 5
PLACE_PINNED, PLACE_RING, PLACE_SLOTS = 6, 7, 8
DIGEST_NONE, DIGEST_ROWS, DIGEST_CACHE, DIGEST_GROUP = 0, 1, 2, 3
UNIT_COLUMNS, UNIT_TOKEN, UNIT_STEP, UNIT_MEMBER = 0, 1, 2, 3
UNIT_KINDS = {"token": UNIT_TOKEN, "step": UNIT_STEP, "member": UNIT_MEMBER}
PLACE_OF_ROLE = {
    "arena": PLACE_ARENA, "peer": PLACE_PEER, "state": PLACE_PRIVATE, "output": PLACE_PRIVATE,
    "logits": PLACE_PRIVATE, "weight": PLACE_FILE, "experts": PLACE_EXPERTS,
    "ring": PLACE_RING, "slots": PLACE_SLOTS,
}  # fmt: skip
ELEM_BYTES = {"bf16": 2, "f32": 4, "u32": 4, "mxfp4": 1}
