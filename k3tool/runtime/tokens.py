"""tokens.h5: what every rank chose, step by step. Comparing records is k3tool.compare's.

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
from k3tool.errors import ArtifactError
from k3tool.fields import column, params_of
from k3tool.isa.columns import Columns
from k3tool.targets import MOST_RANKS

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
_UNITS = {"best": "logit", "second": "logit"}


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
