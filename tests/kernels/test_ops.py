"""Every op body: its meaning, its bits in every compilation, at every slicing and chunking.

Kills: an op that depends on where a slice or a chunk begins, state that leaks from another slot or
an earlier sequence, a fold that prefers the wrong index. Fused ops: test_fused_ops and _chain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from k3tool.isa.table import CANDIDATE_WORDS, SPECS, Op
from k3tool.ref.formats import Step
from k3tool.ref.ops import REFERENCE, keyword_names, operand_names, returns_state
from tests.kernels.bodies import Tokens
from tests.kernels.op_cases import CASES, RANKS, TOP_K, Case, T, dense

FILL = np.float32(6e6)
OPS = sorted(CASES)
SLICED = [op for op in OPS if SPECS[op].unit != "step"]
PUSHES = (Op.BLOCK_PUSH, Op.EMBED_PUSH)
BY_TOKEN = [op for op in OPS if not SPECS[op].is_collective and op not in PUSHES]


def ids(op):
    return op.name


def execute(bodies, case: Case, slices=None, stored=None, tokens=None, **more):
    """Run a case; returns (result, state) as words."""
    written = (*states_of(case), case.out)
    operands = {n: a.copy() if n in written else a for n, a in (stored or case.stored).items()}
    outs = [operand.name for operand in SPECS[case.op].outputs] if case.widths else [case.out]
    for name, width in zip(outs, case.widths, strict=True) if case.widths else ():
        operands[name] = np.full((case.out_shape[0], width), FILL)
    if case.out not in operands:
        operands[case.out] = np.full(case.out_shape, FILL)
    peers = [o.name for o in SPECS[case.op].operands if o.role == "peer"]
    stride = 0
    if peers:  # one segment per rank, the buffers of a rank one after another
        stride = sum(operands[n][0].nbytes for n in peers)
        segment = np.concatenate([operands[n].reshape(case.ranks, -1) for n in peers], axis=1)
        at = 0
        rank = case.ranks - 1
        for name in peers:
            size = operands[name][0].size
            operands[name] = segment[rank, at : at + size]
            at += size
        more["ranks"] = (rank, case.ranks, stride)
    bodies.run(
        case.op, operands, n_units=case.n_units, width=case.width, unit_cols=case.unit_cols,
        params=case.params, tokens=tokens or case.tokens(), slices=slices, **more,
    )  # fmt: skip
    results = [operands[n] for n in outs]
    result = np.concatenate(results, axis=1) if case.widths else results[0]
    states = [operands[n] for n in states_of(case)]
    state = states[0] if len(states) == 1 else None
    if len(states) > 1:
        state = np.concatenate([s.reshape(len(s), -1) for s in states], axis=1)
    return result.view(np.uint32), None if state is None else state.view(np.uint32)


def states_of(case: Case) -> tuple[str, ...]:
    return (case.state,) if isinstance(case.state, str) else case.state or ()


def state_parts(case: Case, state) -> dict[str, np.ndarray]:
    """The states by name, of what `execute` returned."""
    names, at, parts = states_of(case), 0, {}
    for name in names:
        like = case.stored[name]
        size = like[0].size
        parts[name] = state.reshape(len(like), -1)[:, at : at + size].reshape(like.shape)
        at += size
    return {n: np.ascontiguousarray(a).view(np.float32) for n, a in parts.items()}


def meaning(case: Case, rounded: bool = False):
    """(result, state) of the float64 meaning, with every rounding point or none."""
    spec, reference = SPECS[case.op], REFERENCE[case.op]
    tokens = case.tokens()
    numbers = np.zeros(T, np.int64) if tokens.ids is None else tokens.ids.astype(np.int64)
    known = dict.fromkeys(spec.flags, int(rounded)) | case.params
    known |= {"unit_cols": case.unit_cols, "step": Step(numbers, tokens.first)}

    def number(value):
        return value.astype(np.float64) if isinstance(value, np.ndarray) else value

    operands = [number(case.meaning[name]) for name in operand_names(spec)]
    result = reference(*operands, **{k: known[k] for k in keyword_names(reference)})
    result, state = result if returns_state(spec) else (result, None)
    if isinstance(result, tuple):
        result = np.concatenate(result, axis=1)
    if isinstance(state, tuple):
        state = np.concatenate([s.reshape(-1) for s in state])
    return result, state


def assert_close(words, want, tolerance=2e-5):
    got = words.view(np.float32).astype(np.float64)
    scale = max(float(np.sqrt(np.mean(want**2))), 1e-30)
    worst = np.max(np.abs(got - want)) / scale
    assert worst <= tolerance, f"worst {worst:.3g} of the rms"


# ---- meaning ----


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_body_means_what_the_reference_says(bodies, op):
    case = CASES[op]
    got, state = execute(bodies, case)
    want, want_state = meaning(case)
    if op == Op.ROUTER_TOPK:
        assert np.array_equal(got[:, :TOP_K], want[:, :TOP_K].astype(np.uint32))
        got, want = got[:, TOP_K:], want[:, TOP_K:]
    if op in PUSHES:
        got, want = got[:2], np.concatenate([np.zeros((1, *want.shape[1:])), want[1:]])
    if op == Op.MLA_CACHE:
        got = got[[5, 2, 7]].reshape(-1, got.shape[-1])[: len(want)]
    assert_close(got, want.reshape(got.shape))
    if want_state is not None:
        assert_close(state[1], want_state.reshape(state[1].shape))


# ---- bits ----


@pytest.mark.parametrize("op", OPS, ids=ids)
def test_bits_equal_in_every_compilation(body_library, op):
    want = execute(body_library("scalar"), CASES[op])
    for isa in ("avx2", "avx512", "avx512_bf16"):
        got = execute(body_library(isa), CASES[op])
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)), isa


@pytest.mark.parametrize("op", SLICED, ids=ids)
def test_slices_change_no_bit(bodies, op):
    case = CASES[op]
    want = execute(bodies, case)
    rng = np.random.default_rng(int(op))
    for _ in range(4):
        inner = rng.integers(0, case.n_units + 1, 3)
        cuts = np.unique([0, *inner, case.n_units])
        slices = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        got = execute(bodies, case, slices=slices[::-1])
        assert all(np.array_equal(g, w) for g, w in zip(got, want, strict=True)), slices


@pytest.mark.parametrize("op", SLICED, ids=ids)
def test_a_slice_writes_only_its_part(bodies, op):
    """Leaving one slice out leaves exactly its part of the result untouched."""
    case = CASES[op]
    assert case.n_units >= 3, "a case too small to leave a slice out of"
    whole, _ = execute(bodies, case)
    before = case.stored.get(case.out, np.full(case.out_shape, FILL)).view(np.uint32)
    without, _ = execute(bodies, case, slices=[(0, 1), (2, case.n_units)])
    only, _ = execute(bodies, case, slices=[(1, 2)])
    assert np.array_equal(np.where(only != before, only, without), whole)
    assert not np.any((only != before) & (without != before))


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("op", BY_TOKEN, ids=ids)
def test_prefill_equals_decodes(bodies, op, chunk):
    """T tokens at once and in chunks: the same bits in result and state."""
    case = CASES[op]
    want, want_state = execute(bodies, case)
    full = case.tokens()
    position = full.first + np.arange(T)
    per_token = [n for n, a in case.stored.items() if a.ndim >= 2 and a.shape[0] == T
                 and n not in (case.out, *states_of(case)) and role_of(op, n) == "in"]  # fmt: skip
    stored = dict(case.stored)
    rows = []
    for at in range(0, T, chunk):
        part = slice(at, min(at + chunk, T))
        n = part.stop - part.start
        now = {k: np.ascontiguousarray(a[part]) if k in per_token else a for k, a in stored.items()}
        if "blocks" in now:
            now["blocks"] = np.ascontiguousarray(now["blocks"][:, part])
        tokens = replace(full, n=n, position=position[part],
                         ids=None if full.ids is None else full.ids[part],
                         slot=None if full.slot is None else full.slot[part])  # fmt: skip
        small = case
        if SPECS[op].unit == "token":
            small = replace(case, n_units=n)
        in_place = op == Op.MLA_CACHE
        if not in_place:
            small = replace(small, out_shape=(n, *case.out_shape[1:]))
        got, state = execute(bodies, small, stored=now, tokens=tokens)
        if case.state:
            stored |= state_parts(case, state)
        if in_place:
            stored[case.out] = got.view(np.float32)
        rows.append(got)
    result = rows[-1] if op == Op.MLA_CACHE else np.concatenate(rows)
    assert np.array_equal(result, want)
    assert case.state is None or np.array_equal(state, want_state)


def role_of(op, name):
    return next(o.role for o in SPECS[op].operands if o.name == name)


# ---- the order of a reduction ----


def run_parts(bodies, op, inputs, params, width, unit_cols=1, n_units=None, tokens=None):
    """One primitive on full-width activations."""
    y = np.full((T, width), FILL)
    units = n_units or (T if SPECS[op].unit == "token" else width // max(unit_cols, 1))
    bodies.run(op, {**inputs, "y": y}, n_units=units, width=width, unit_cols=unit_cols,
               params=params, tokens=tokens or Tokens(T))  # fmt: skip
    return y


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_reduce_is_the_top_of_the_tree(bodies, ranks):
    """A row-parallel product over 8 / ranks blocks a rank, reduced, has the bits of one rank's."""
    x, w = dense(Op.ADD, T, 1056), CASES[Op.GEMV_BF16].stored["w"]
    w = np.ascontiguousarray(np.concatenate([w, w[::-1]], axis=1))
    assert w.shape == (21, 1056)
    local = 1056 // ranks
    parts = np.empty((ranks, T, 21), np.float32)
    for r in range(ranks):
        cut = slice(r * local, (r + 1) * local)
        inputs = {"x": np.ascontiguousarray(x[:, cut]), "w": np.ascontiguousarray(w[:, cut])}
        p = {"K": local, "n_blocks": 8 // ranks}
        parts[r] = run_parts(bodies, Op.GEMV_BF16_BLOCKS, inputs, p, 21)
    case = Case(Op.ALL_REDUCE, 21, 21, 1, {}, {"x": parts}, {}, "y", (T, 21), ranks=ranks)
    whole = run_parts(bodies, Op.GEMV_BF16_BLOCKS, {"x": x, "w": w}, {"K": 1056, "n_blocks": 8}, 21)
    got = execute(bodies, case)[0].view(np.float32)
    assert np.array_equal(got, whole)
    left = parts[0]
    for part in parts[1:]:
        left = left + part
    if ranks > 2:  # control: left to right is another sum
        assert np.count_nonzero(left != whole) > 4


# ---- argmax ----


def candidates(bodies, logits, base=0, head_from=0):
    y = np.zeros((len(logits), CANDIDATE_WORDS), np.uint32)
    bodies.run(Op.ARGMAX, {"logits": logits, "y": y}, n_units=1, width=4, unit_cols=0,
               params={"vocab_base": base, "vocab": logits.shape[1]},
               tokens=Tokens(len(logits), head_from=head_from))  # fmt: skip
    return y


def test_argmax_takes_the_lowest_index_and_a_global_margin(bodies):
    logits = np.array([[1, 7, 7, 3], [-0.0, 0.0, -1, -2], [5, 4, 3, 2], [2, 3, 4, 5]], np.float32)
    y = candidates(bodies, logits, base=100)
    assert y[:, 1].tolist() == [101, 100, 100, 103]
    assert y[:, 2].view(np.float32).tolist() == [7, 0, 4, 4]
    assert not y[:, 3].any()
    assert not candidates(bodies, logits, head_from=3)[:3].any()  # the head runs on token 3 only
    many = dense(Op.ARGMAX, RANKS, 6, 50)
    many[2, 3] = many[0, 3]  # ties across ranks
    parts = np.stack(
        [candidates(bodies, np.ascontiguousarray(m), 50 * r) for r, m in enumerate(many)]
    )
    out = np.zeros((6, CANDIDATE_WORDS), np.uint32)
    bodies.run(Op.ARGMAX_FOLD, {"x": parts[1], "y": out}, n_units=1, width=4, unit_cols=0,
               tokens=Tokens(6), ranks=(1, RANKS, parts[0].nbytes))  # fmt: skip
    flat = many.transpose(1, 0, 2).reshape(6, -1)
    assert out[:, 1].tolist() == flat.argmax(axis=1).tolist()
    ordered = np.sort(flat, axis=1)
    assert np.array_equal(out[:, 0].view(np.float32), ordered[:, -1])
    assert np.array_equal(out[:, 2].view(np.float32), ordered[:, -2])


# ---- refusals ----

NONFINITE, SCRATCH, RANGE = 2, 4, 5


def test_not_finite_is_a_fault_that_names_the_token(bodies):
    for op, name in ((Op.RMSNORM, "x"), (Op.ATTN_RES, "blocks"), (Op.ROUTER_TOPK, "logits"),
                     (Op.L2NORM, "x"), (Op.KDA_CORE, "k"), (Op.NORM_GEMV_BF16, "x"),
                     (Op.MIX_LINEARS_6, "prefix"), (Op.ATTN_PARTS_8, "blocks"), (Op.KDA_HEADS, "q"),
                     (Op.MOE_GLU_TOPK, "scores")):  # fmt: skip
        case = CASES[op]
        for bad in (np.nan, np.inf):
            stored = {k: v.copy() for k, v in case.stored.items()}
            stored[name][..., 3, 1] = bad
            fault = execute_fault(bodies, case, stored)
            assert fault == NONFINITE << 32 | 3, op.name
    logits = dense(Op.ARGMAX, 4, 50)
    logits[2, 9] = np.inf
    y = np.zeros((4, 4), np.uint32)
    fault = bodies.run(Op.ARGMAX, {"logits": logits, "y": y}, n_units=1, width=4, unit_cols=0,
                       params={"vocab_base": 0, "vocab": 50}, tokens=Tokens(4),
                       check_fault=False)  # fmt: skip
    assert fault == NONFINITE << 32 | 2


def execute_fault(bodies, case, stored, tokens=None, **more):
    operands = {**stored, case.out: stored.get(case.out, np.full(case.out_shape, FILL))}
    for operand, width in zip(SPECS[case.op].outputs, case.widths, strict=False):
        operands[operand.name] = np.full((T, width), FILL)
    return bodies.run(
        case.op, operands, n_units=case.n_units, width=case.width, unit_cols=case.unit_cols,
        params=case.params, tokens=tokens or case.tokens(), check_fault=False, **more,
    )  # fmt: skip


def test_out_of_range_is_a_fault(bodies):
    for op in (Op.EMBED_BF16, Op.EMBED_PUSH):
        tokens = Tokens(T, ids=np.array([0, 1, 30, 2, 3], np.uint32))
        assert execute_fault(bodies, CASES[op], CASES[op].stored, tokens) == RANGE << 32 | 2
    for op in (Op.MLA_CACHE, Op.MLA_ATTEND, Op.MLA_HEADS, Op.MLA_PAGES, Op.MLA_MERGE):
        case = CASES[op]
        tokens = replace(case.tokens(), first=3 * 256 - 2)
        stored = {k: v.copy() for k, v in case.stored.items()}
        assert execute_fault(bodies, case, stored, tokens) == RANGE << 32 | 2


def test_short_scratch_is_a_fault(bodies):
    for op in OPS:
        case = CASES[op]
        if SPECS[op].is_collective:
            continue
        stored = {k: v.copy() for k, v in case.stored.items()}
        fault = execute_fault(bodies, case, stored, scratch_floats=0)
        assert fault in (0, SCRATCH << 32 | (fault & 0xFFFFFFFF)), op.name
        if op in (Op.NORM_GEMV_BF16, Op.ATTN_RES, Op.KDA_CORE, Op.MLA_ATTEND, Op.MOE_DOWN_MXFP4,
                  Op.MLA_QUERY, Op.MLA_PAGES, Op.MLA_MERGE):  # fmt: skip
            assert fault >> 32 == SCRATCH, op.name


def test_head_only_leaves_earlier_tokens_alone(bodies):
    for op in (Op.GEMV_BF16, Op.NORM_GEMV_BF16):
        case = replace(CASES[op], params={**CASES[op].params, "head_only": 1})
        whole, _ = execute(bodies, CASES[op])
        for head_from in (0, 3, T):
            got, _ = execute(bodies, case, tokens=replace(case.tokens(), head_from=head_from))
            assert np.array_equal(got[head_from:], whole[head_from:])
            assert np.all(got[:head_from].view(np.float32) == FILL)


def test_slots_do_not_mix(bodies):
    """Two sequences interleaved in one step give what each gives alone."""
    for op in (Op.CONV_SILU, Op.KDA_CORE, Op.KDA_HEADS):
        case = CASES[op]
        inputs = [n for n, a in case.stored.items() if role_of(op, n) == "in"]
        twice = {n: np.repeat(a, 2, axis=0) if n in inputs else a for n, a in case.stored.items()}
        tokens = Tokens(2 * T, position=np.repeat(np.arange(T), 2), slot=np.tile([0, 1], T))
        double = replace(case, out_shape=(2 * T, *case.out_shape[1:]))
        got, state = execute(bodies, double, stored=twice, tokens=tokens)
        alone, alone_state = execute(bodies, case)
        assert np.array_equal(got[0::2], alone)
        assert np.array_equal(got[1::2], alone)
        assert np.array_equal(state[0], alone_state[1])
        assert np.array_equal(state[1], alone_state[1])
