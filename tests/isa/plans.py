"""A small legal plan written by hand, so that tests of the stream need no compiler.

Two ranks, four workgroups: embed, a norm, a row-parallel product into a peer slot, its all-reduce
added to the residual, logits, argmax and its fold; one scratch buffer's bytes are used twice.
"""

import numpy as np

from k3tool.compiler.plan import Fired, Phase, Plan, Tensor
from k3tool.compiler.rules import RULES
from k3tool.compiler.theorems import theorem_hash
from k3tool.isa.columns import GATE, PACKET_DIGEST, PACKET_REARM, WAIT_DTYPE, empty_packets
from k3tool.isa.table import ALL_PHASES, SPECS, Op

H, V, RANKS, WORKGROUPS = 64, 128, 2, 4
MADE_BY = ("down-reduce-fuse", "reduce-residual-fuse", "argmax-fold-fuse")
RULE_OF = {
    Op.GEMV_BF16_BLOCKS: MADE_BY[0], Op.ALL_REDUCE_ADD: MADE_BY[1],
    Op.ARGMAX: MADE_BY[2], Op.ARGMAX_FOLD: MADE_BY[2],
}  # fmt: skip
PART = "sum.gemv_bf16_blocks"  # what the first rule makes inside its root
# Bytes of the peer segment that hold candidates in both phases: were they anything else in one of
# them, a fast rank's next step would overwrite what a slow one still folds.
CANDIDATES = 256  # three rows of 16, and the next buffer on its alignment


def tensors(phase: str, tokens: int) -> list[Tensor]:
    """Return what one phase owns. x lives at 0, h and later r at 256 t, y at 512 t."""
    row = 4 * H * tokens

    def own(name: str, role: str, local: tuple[int, ...], offset: int = 0) -> Tensor:
        return Tensor(f"{phase}.{name}", role, "f32", local, local, 4 * local[0] * local[1],
                      offset, phase)  # fmt: skip

    return [
        own("x", "arena", (tokens, H), 0),
        own("h", "arena", (tokens, H), row),
        own("y", "arena", (tokens, H), 2 * row),
        own("r", "arena", (tokens, H), row),
        own(PART, "peer", (tokens, H), CANDIDATES),
        own("token.argmax", "peer", (tokens, 4), 0),
        own("logits", "logits", (tokens, V // RANKS)),
        own("token", "output", (tokens, 4)),
    ]


def weights() -> list[Tensor]:
    """Return the weights, which phases share."""

    def leaf(name: str, logical: tuple[int, ...], local: tuple[int, ...], split: str) -> Tensor:
        n_bytes = 2 * int(np.prod(local))
        return Tensor(name, "weight", "bf16", logical, local, n_bytes, 0, "", name,
                      f"model.{name}", split)  # fmt: skip

    return [
        leaf("embed", (V, H), (V, H), "replicate"),
        leaf("norm", (H,), (H,), "replicate"),
        leaf("o", (H, H * RANKS), (H, H), "cols"),
        leaf("lm_head", (V, H), (V // RANKS, H), "rows"),
    ]


def phase(name: str, tokens: int, handle: dict[str, int]) -> Phase:
    """Return one phase's packets with exact waits."""
    eps = int(np.float32(1e-5).view("<u4"))
    # op, operands, params, (units, width, unit_cols, grain), waits on, gate
    rows = [
        (Op.EMBED_BF16, "embed x", [V], (4, H, 16, 1), [], None),
        (Op.RMSNORM, "x norm h", [eps], (tokens, H, 0, 1), [0], None),
        (Op.GEMV_BF16_BLOCKS, f"h o {PART}", [H, 4], (H, H, 1, 8), [1], 0),
        (Op.ALL_REDUCE_ADD, f"x {PART} y", [], (H // 16, H, 16, 1), [2], None),
        (Op.RMSNORM, "y norm r", [eps], (tokens, H, 0, 1), [3], None),
        (Op.GEMV_BF16, "r lm_head logits", [H, 1], (V // RANKS, V // RANKS, 1, 8), [4], None),
        (Op.ARGMAX, "logits token.argmax", [V // RANKS, V // RANKS], (1, 4, 0, 1), [5], 1),
        (Op.ARGMAX_FOLD, "token.argmax token", [], (1, 4, 0, 1), [6], None),
    ]
    packets, waits = empty_packets(len(rows)), []
    for index, (op, operands, params, shape, after, gate) in enumerate(rows):
        row = packets[index : index + 1]
        row["op"] = op
        for slot, operand in enumerate(operands.split()):
            row["handles"][0, slot] = handle.get(f"{name}.{operand}", handle.get(operand))
        row["params"][0, : len(params)] = params
        row["n_units"], row["width"], row["unit_cols"], row["grain"] = shape
        row["n_slices"] = min(WORKGROUPS, -(-shape[0] // shape[3]))
        row["counter"] = index if gate is None else GATE | gate
        row["threshold"] = row["n_slices"][0] * (1 if gate is None else RANKS)
        row["flags"] = PACKET_REARM if op == Op.ARGMAX else 0
        if SPECS[op].placement in ("replicated", "follow"):
            row["flags"] |= PACKET_DIGEST
        row["wait_ofs"], row["n_waits"] = len(waits), len(after)
        waits += [(packets["counter"][p], packets["threshold"][p]) for p in after]
    made_by = tuple(
        (len(MADE_BY) * ALL_PHASES.index(name) + MADE_BY.index(rule),) if rule else ()
        for rule in (RULE_OF.get(row[0]) for row in rows)
    )
    row_bytes = 4 * H * tokens
    return Phase(name, tokens, packets, np.array(waits, WAIT_DTYPE), made_by, 2, 3 * row_bytes,
                 row_bytes + CANDIDATES, len(rows), len(rows))  # fmt: skip


def plan() -> Plan:
    """Return the plan, unsaved."""
    table = (*tensors("decode", 1), *tensors("prefill", 3), *weights())
    handle = {tensor.name: index for index, tensor in enumerate(table)}
    phases = {"decode": phase("decode", 1, handle), "prefill": phase("prefill", 3, handle)}
    params = {"tp": RANKS, "target": "cpu", "workgroups": WORKGROUPS, "chunk": 3, "batch": 1,
              "ctx": 4096, "checkpoint_identity": "", "numerics": {"mode": "f32", "version": 1},
              "eps": {}, "rules_off": [], "rules": sorted(MADE_BY),
              "pages_per_slot": 16}  # fmt: skip
    params["theorems"] = {rule.name: theorem_hash(rule) for rule in RULES if rule.name in MADE_BY}
    fired = tuple(
        Fired(rule, f"{name}.{root}", binding.replace("@", f"{name}."), True)
        for name in ALL_PHASES
        for rule, root, binding in (
            (MADE_BY[0], "sum", "x=@h w=o x_bf16=0 round=0"),  # a value inside the next rule's
            (MADE_BY[1], "y", f"residual=@x x=@{PART}"),
            (MADE_BY[2], "token", "logits=@logits"),
        )
    )
    return Plan(table, phases, params, fired)
