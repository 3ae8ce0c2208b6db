"""tokens.h5: what every rank chose, step by step, and where two records first differ.

Schema 1 of kind `tokens`. Dataset `prompt` u4 [T]; per rank a group `rank-NN` with one row per
generated token: `step` u4 (0 for the first), `position` u4 (absolute, of the token whose logits
these were), `id` u4, `best` and `second` f4 (global logits), `digest` u8 (of everything that is the
same on all ranks in the step) and `logits_digest` u8. A `logits_digest` is of the rank's own
vocabulary rows, with vocabulary-wide indices and nothing of the plan: its sum modulo 2^64 over the
ranks is the step's, the same at every TP degree. `digest` compares ranks of a run, and runs of one
program. Inputs: `checkpoint` (identity) and `isa` at least. Params: `tp`, `numerics` at least.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3tool.artifact import Artifact, Dataset, InputRef, open_artifact, write_artifact
from k3tool.errors import ArtifactError, quoted, shown
from k3tool.fields import column, params_of
from k3tool.isa.columns import Columns
from k3tool.tables import count_text
from k3tool.targets import MOST_RANKS
from k3tool.verdict import Check, failed, not_run, passed

TOKENS_SCHEMA = 1

TOKEN_DTYPE = np.dtype(
    [
        ("step", "<u4"),
        ("position", "<u4"),
        ("id", "<u4"),
        ("best", "<f4"),
        ("second", "<f4"),
        ("digest", "<u8"),
        ("logits_digest", "<u8"),
    ]
)
ONE_STREAM = "one stream only, nothing to compare it with: give a second file"
_ONE_QUESTION = {
    "checkpoint": "compare runs of one checkpoint",
    "numerics": "each mode of the arithmetic has bits of its own: compare runs of one --numerics",
    "prompt": "compare runs of one prompt (run --ids)",
}
_UNITS = {"best": "logit", "second": "logit"}
_ACROSS_RANKS = ("step", "position", "id", "best", "second", "digest")
_ACROSS_FILES = ("step", "position", "id", "best", "second", "logits_digest")


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A loaded record: `ranks` by rank number, each (N,) TOKEN_DTYPE."""

    name: str
    ranks: Mapping[int, Columns]
    prompt: tuple[int, ...]
    params: Mapping[str, Any]
    inputs: tuple[InputRef, ...]
    digest: str

    @property
    def tp(self) -> int:
        """Return the number of ranks that ran."""
        return int(self.params["tp"])  # read_tokens has checked it

    def input(self, role: str) -> InputRef:
        """Return the input of a role. Raises: ArtifactError naming the file when it has none."""
        for ref in self.inputs:
            if ref.role == role:
                return ref
        raise ArtifactError(f"{self.name}: inputs", got=f"no {role}", need=f"a {role}")


def write_tokens(
    path: str | Path,
    ranks: Sequence[Columns],
    prompt: Sequence[int],
    *,
    params: Mapping[str, object],
    inputs: Iterable[InputRef],
    target: str | None = None,
) -> str:
    """Write tokens.h5 atomically and return its content digest.

    Shapes: ranks[r] (N,) TOKEN_DTYPE in step order.
    Raises: K3Error when the file cannot be written.
    """
    refs = list(inputs)
    assert {"checkpoint", "isa"} <= {ref.role for ref in refs}, refs
    assert {"tp", "numerics"} <= set(params), sorted(params)
    datasets = {"prompt": Dataset(np.array(prompt, "<u4"), ("position",), "token id")}
    for rank, rows in enumerate(ranks):
        assert rows.dtype == TOKEN_DTYPE, rows.dtype
        for name in TOKEN_DTYPE.names or ():
            data = np.ascontiguousarray(rows[name])
            datasets[f"rank-{rank:02d}/{name}"] = Dataset(data, ("step",), _UNITS.get(name, name))
    return write_artifact(
        path, "tokens", TOKENS_SCHEMA, datasets, inputs=refs, params=params, target=target
    )


def read_tokens(path: str | Path) -> TokenFile:
    """Read tokens.h5; a record of fewer ranks than ran is returned as it is, for a check to name.

    Raises: ArtifactError naming the file and what is damaged.
    """
    with open_artifact(path, "tokens", TOKENS_SCHEMA) as file:
        groups = sorted({n.split("/")[0] for n in file.names() if n.startswith("rank-")})
        ranks = {_rank_of(file, group): _read_rank(file, group) for group in groups}
        if len(ranks) != len(groups):
            raise ArtifactError(f"{path}: ranks", got=groups, need="each rank once")
        prompt = tuple(column(file, "prompt", "<u4").tolist())
        fields = params_of(file)
        fields.count("tp", most=MOST_RANKS)  # of none a check says that nothing is compared
        fields.present("numerics")
        return TokenFile(str(path), ranks, prompt, file.params, tuple(file.inputs), file.digest)


def _read_rank(file: Artifact, group: str) -> Columns:
    n_rows = len(column(file, f"{group}/step", TOKEN_DTYPE["step"]))
    rows = np.zeros(n_rows, TOKEN_DTYPE)
    for name in TOKEN_DTYPE.names or ():
        rows[name] = column(file, f"{group}/{name}", TOKEN_DTYPE[name], n_rows=n_rows)
    return rows


def _rank_of(file: Artifact, group: str) -> int:
    digits = group.removeprefix("rank-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 4):
        raise ArtifactError(f"{file.path}: {group}", got="no rank number", need="rank-00, ...")
    return int(digits)


# -- comparison ----------------------------------------------------------------------------------


def verify_ranks(files: Sequence[TokenFile]) -> list[Check]:
    """Compare the ranks inside each file, then every file with the first one.

    Raises: ArtifactError when files cannot be compared at all (another checkpoint, prompt or
    arithmetic).
    """
    checks = [check for file in files for check in compare_ranks(file)]
    if len(files) == 1 and files[0].tp == 1 and not any(c.status == "FAIL" for c in checks):
        # That the one rank is recorded compares nothing: kept as a PASS it would carry the verdict.
        return [not_run(f"{files[0].name}: streams equal", ONE_STREAM)]
    for other in files[1:]:
        checks += compare_files(files[0], other)
    return checks


def compare_ranks(file: TokenFile) -> list[Check]:
    """Compare all ranks of one run, bit by bit."""
    present = _present(file)
    if present.status == "FAIL":
        return [present]
    first = file.ranks[0]
    name = f"{file.name}: tokens and bits equal on all ranks"
    if len(first) == 0:
        return [present, failed(name, "no token: nothing to compare")]
    if file.tp == 1:
        return [present]
    for rank in sorted(file.ranks)[1:]:
        found = _divergence(first, file.ranks[rank], _ACROSS_RANKS, "rank 0", f"rank {rank}")
        if found is not None:
            return [present, failed(name, found)]
    detail = f"{count_text(len(first), 'step')} on {file.tp} ranks: ids, logits, digests"
    return [present, passed(name, detail)]


def _present(file: TokenFile) -> Check:
    name = f"{file.name}: every rank recorded"
    missing = sorted(set(range(file.tp)) - set(file.ranks))
    beyond = sorted(set(file.ranks) - set(range(file.tp)))
    if missing or beyond or not file.ranks:
        wrong = [
            f"{word} {', '.join(map(str, ranks))}"
            for word, ranks in (("missing", missing), ("unexpected", beyond))
            if ranks
        ]
        return failed(name, f"of {count_text(file.tp, 'rank')}, {'; '.join(wrong)}")
    return passed(name, f"{file.tp} of {file.tp}")


def compare_files(left: TokenFile, right: TokenFile) -> list[Check]:
    """Compare two runs of one prompt on one checkpoint, whatever their TP degrees.

    Ids, logits and the digest of all logits have to be equal; the digest of all replicated results
    too where both ran the same program. Raises: ArtifactError when they are not of one question.
    """
    _require_comparable(left, right)
    name = f"{left.name} and {right.name}: same bits"
    if 0 not in left.ranks or 0 not in right.ranks:
        return [failed(name, "a file has no rank 0: nothing to compare")]
    a, b = _global_rows(left), _global_rows(right)
    if len(a) == 0 or len(b) == 0:
        return [failed(name, "no token: nothing to compare")]
    same_program = left.input("isa").content_sha256 == right.input("isa").content_sha256
    fields = (*_ACROSS_FILES, "digest") if same_program else _ACROSS_FILES
    found = _divergence(a, b, fields, left.name, right.name)
    if found is not None:
        return [failed(name, found)]
    scope = "and of all replicated results" if same_program else "(other programs: only these)"
    steps = f"{count_text(len(a), 'step')}, TP {left.tp} and {right.tp}"
    detail = f"{steps}: ids, logits, digests of logits {scope}"
    return [passed(name, detail)]


def _require_comparable(left: TokenFile, right: TokenFile) -> None:
    for what, hint in _ONE_QUESTION.items():
        (need, need_text), (got, got_text) = (_question(file)[what] for file in (left, right))
        if got != need:
            raise ArtifactError(
                f"{right.name}: {what}", got=got_text, need=f"{need_text}, as {left.name}",
                hint=hint,
            )  # fmt: skip


def _question(file: TokenFile) -> dict[str, tuple[object, str]]:
    """Return what two comparable runs have in common, each with its text: long prompts are cut."""
    identity, numerics = file.input("checkpoint").content_sha256, file.params["numerics"]
    return {
        "checkpoint": (identity, f"{identity[:16]}.."),
        "numerics": (numerics, shown(numerics)),
        "prompt": (file.prompt, quoted(file.prompt)),
    }


def _global_rows(file: TokenFile) -> Columns:
    """Return rank 0's rows with the digest of all ranks' logits."""
    rows = file.ranks[0].copy()
    for rank, other in file.ranks.items():
        if rank and len(other) == len(rows):  # unequal lengths are a failure of their own
            rows["logits_digest"] += other["logits_digest"]
    return rows


def _divergence(
    a: Columns, b: Columns, fields: Sequence[str], name_a: str, name_b: str
) -> str | None:
    """Return where two streams first differ in any field, in words; None if nowhere."""
    n_rows = min(len(a), len(b))
    differs = {field: _bits(a[field][:n_rows]) != _bits(b[field][:n_rows]) for field in fields}
    anywhere = np.logical_or.reduce(list(differs.values()))
    if anywhere.any():
        row = int(np.argmax(anywhere))
        which = ", ".join(field for field in fields if differs[field][row])
        sides = "; ".join(_side(rows[row], name) for rows, name in ((a, name_a), (b, name_b)))
        note = "" if differs["id"][row] else " (equal ids, other bits)"
        return f"first difference at step {a['step'][row]} in {which}{note}: {sides}"
    if len(a) != len(b):
        return f"{name_a} has {count_text(len(a), 'step')}, {name_b} {len(b)}; equal up to there"
    return None


def _bits(column: Columns) -> Columns:
    """Return floats as their bits: a NaN equals itself and -0 is not +0 here."""
    return column.view("<u4") if column.dtype.kind == "f" else column


def _side(row: Any, name: str) -> str:
    margin = float(row["best"]) - float(row["second"])
    return f"{name} has id {row['id']} (logit {row['best']:.9g}, margin {margin:.3g})"
