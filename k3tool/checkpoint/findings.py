"""What can be wrong with a checkpoint, in one set of words for inspect, shard and run.

inspect lists all findings; shard and run refuse with the first. Each has the next step for its
kind, so that a message never ends with the diagnosis.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from k3tool.errors import ArtifactError, bounded, printable, shown

# Every kind in the order of a report, and its next step: causes before what follows from them.
NEXT_STEPS: dict[str, str] = {
    "unfinished download": "finish or repeat the download, then remove what it left",
    "missing file": "fetch the file again",
    "damaged file": "fetch the file again",
    "unlisted file": "move it out of the folder: the index is what is read",
    "duplicated": "keep one copy: the other may be of another version",
    "missing": "fetch the file again; if it is whole, the export lost a tensor",
    "unindexed": "fetch the index again, or remove it: then the headers rule",
    "mis-placed": "fetch the index again, or remove it: then the headers rule",
    "mis-typed": "export the tensor again in the released dtype",
    "mis-shaped": "export the tensor again in the released shape; does config.json belong here?",
    "padding": "export the tensor again: its length means something else here",
    "unclaimed": "remove the tensor from the export; does config.json belong here?",
    "total_size": "fetch the index again, or correct the number",
    "unread leaf": "report this: the weight table and the operator graph differ",
    "unknown leaf": "report this: the weight table and the operator graph differ",
    # of values: inspect --values
    "non-finite": "fetch the file again; if it is whole, the export is broken",
    "scale byte": "the values are damaged or of another format: fetch the file again",
    "all zeros": "fetch the file again: a part of it may never have been written",
    "swapped": "fetch the file again, or move the tensors back",
    "changed": "fetch the file again, or record the new fingerprint with --fingerprint",
    "not recorded": "record the fingerprint of this checkpoint with --fingerprint",
}
FINDING_KINDS = tuple(NEXT_STEPS)
MOST_NAME = 1000  # letters of a file's or a tensor's name that are shown


class Finding(NamedTuple):
    """One thing that is wrong; `file` and `name` are empty where they mean nothing.

    `hint` is the next step where it is not the kind's own.
    """

    kind: str
    file: str
    name: str
    got: str
    need: str
    hint: str = ""

    @property
    def next_step(self) -> str:
        """Return what the user can do."""
        return self.hint or NEXT_STEPS[self.kind]

    @property
    def order(self) -> tuple[int, str, str]:
        """Return a sort key: the order of a report."""
        return FINDING_KINDS.index(self.kind), self.file, self.name

    @property
    def _short(self) -> tuple[str, str]:
        """Return file and name, cut where they are longer than any that is meant."""
        return bounded(self.file, MOST_NAME), bounded(self.name, MOST_NAME)

    def error(self, folder: Path, more: int = 0, asking: str = "inspect") -> ArtifactError:
        """Return the finding as a refusal; inspect prints the same words without the folder."""
        file, name = self._short
        place = ": ".join(part for part in (str(folder / file), name) if part)
        listed = f" (k3tool {asking} {folder} lists {more} more)" if more else ""
        return ArtifactError(place, got=self.got, need=self.need, hint=f"{self.next_step}{listed}")

    def text(self) -> str:
        """Return the finding in one line, without its next step."""
        place = ": ".join(part for part in self._short if part) or "the folder"
        place, got, need = (printable(bounded(part)) for part in (place, self.got, self.need))
        return f"{place}: got {got}, need {need}"


def file_finding(kind: str, folder: Path, file: str, error: ArtifactError) -> Finding:
    """Return an error about one file of a folder as a finding with the error's own words."""
    name = error.object.removeprefix(str(folder / file)).removeprefix(": ")
    return Finding(kind, file, name, shown(error.got), shown(error.need), error.hint or "")


def first_error(
    folder: Path, findings: Iterable[Finding], asking: str = "inspect"
) -> ArtifactError | None:
    """Return the refusal that shard and run give: the first finding, and how many there are.

    `asking` is the command that lists them all.
    """
    ordered = sorted(findings, key=lambda finding: finding.order)
    if not ordered:
        return None
    return ordered[0].error(folder, len(ordered) - 1, asking)
