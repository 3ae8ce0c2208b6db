"""Compare what the model expects, what the index says, what the headers hold, what the graph reads.

It reads headers only, and reports everything it finds instead of stopping at the first fault.
Values are not looked at. A layer that is all it has to be is accepted whole (layer_match); only
what is left is looked at tensor by tensor, so that half a million sound tensors cost no loop.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from k3tool.checkpoint.downloads import unfinished_downloads
from k3tool.checkpoint.findings import Finding, file_finding
from k3tool.checkpoint.headers import Header, TensorInfo
from k3tool.checkpoint.index import INDEX_NAME
from k3tool.checkpoint.layer_match import LayerMatcher
from k3tool.checkpoint.reader import Checkpoint
from k3tool.checkpoint.side_files import side_file_findings
from k3tool.checkpoint.small_values import compare_copies, padding_fault
from k3tool.errors import ArtifactError
from k3tool.model.sizes import n_tensors
from k3tool.model.vision import expected_vision, is_vision
from k3tool.model.weight_slices import dtype_fault, rank_spec, shape_fault
from k3tool.model.weights import (
    TensorSpec,
    expected_leaves,
    idle_leaves,
    layer_rows,
    layer_tensors,
    padded_tensors,
)

_OF_THE_MODEL = "a tensor of the model"
# A config of more tensors than this, and than twice those that are there, is another model's: to
# name what is missing would take minutes and say nothing.
MOST_EXPECTED = 1_000_000


class ModuleCount(NamedTuple):
    """Tensors of one module of one layer (None: outside the layers): expected, sound, bytes."""

    layer: int | None
    module: str
    expected: int
    sound: int
    n_bytes: int


class VisionCount(NamedTuple):
    """The image side, which nobody reads: tensors described by the config, found, bytes found."""

    expected: int
    found: int
    n_bytes: int


@dataclass(slots=True)
class Coverage:
    """The comparison's result. `identity` is None when a file could not be read.

    `dtypes` counts all tensors of the index's files, the image side's too. `idle` names leaves that
    the release stores and no formula reads.
    """

    path: Path
    tp: int | None
    rank: int | None
    n_files: int
    n_tensors: int
    from_headers: bool
    identity: str | None = None
    modules: list[ModuleCount] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    dtypes: dict[str, int] = field(default_factory=dict)
    vision: VisionCount = field(default_factory=lambda: VisionCount(0, 0, 0))
    idle: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Return whether every expected tensor is there, sound and read, and nothing else is."""
        return not self.findings

    @property
    def expected(self) -> int:
        """Return how many tensors the text model has."""
        return sum(row.expected for row in self.modules)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the text model's sound tensors."""
        return sum(row.n_bytes for row in self.modules)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all sound tensors, the image side's too."""
        return self.n_bytes + self.vision.n_bytes


def coverage_of(checkpoint: Checkpoint, claimed: Iterable[str]) -> Coverage:
    """Compare a checkpoint or rank folder with the weight table and the graph's `claimed` leaves.

    What is wrong becomes a finding; of files only headers and config are read.
    """
    coverage = Coverage(
        path=checkpoint.path,
        tp=checkpoint.tp,
        rank=checkpoint.rank,
        n_files=len(checkpoint.index.files),
        n_tensors=len(checkpoint.index.weight_map),
        from_headers=checkpoint.index.from_headers,
    )
    _Comparison(checkpoint, coverage).run()
    _check_graph(checkpoint, coverage, set(claimed))
    coverage.idle = sorted(idle_leaves(checkpoint.config))
    coverage.findings.sort(key=lambda finding: finding.order)
    return coverage


class _Comparison:
    """One run of the comparison: what was read, and what is left to explain."""

    def __init__(self, checkpoint: Checkpoint, coverage: Coverage) -> None:
        self.checkpoint = checkpoint
        self.coverage = coverage
        self.weight_map = checkpoint.index.weight_map
        self.headers: dict[str, Header] = {}  # of the index's files
        self.explained: set[str] = set()  # files whose tensors are one sound layer, all of it
        self.held: dict[str, list[TensorInfo]] = {}  # of the other files, the index's first

    def find(self, kind: str, file: str, name: str, got: str, need: str) -> None:
        self.coverage.findings.append(Finding(kind, file, name, got, need))

    def run(self) -> None:
        self.coverage.findings += self._in_folders(unfinished_downloads)
        stray = list(self._read_headers())
        if not any(finding.kind.endswith("file") for finding in self.coverage.findings):
            self.coverage.identity = self.checkpoint.identity
        self.coverage.findings += self._in_folders(side_file_findings)
        if self._is_of_another_model():
            self._check_totals()
            return
        counts = self._whole_layers()
        for header in [*self.headers.values(), *stray]:
            if header.file not in self.explained:
                for name, info in header.tensors.items():
                    self.held.setdefault(name, []).append(info)
        expected = self._check_layers(counts)
        self._check_duplicates({header.file for header in stray})
        self._check_others(expected)
        self._check_padding()
        self._check_totals()

    def _in_folders(self, look: Callable[[Path], Iterable[Finding]]) -> Iterator[Finding]:
        """Yield what is wrong in any folder that files are read from; the others' by their path."""
        for folder in self.checkpoint.folders:
            own = folder == self.checkpoint.path
            for finding in look(folder):
                yield finding if own else finding._replace(file=str(folder / finding.file))

    # -- headers -------------------------------------------------------------------------------

    def _read_headers(self) -> Iterator[Header]:
        """Read all headers; yield those of files that the index does not list."""
        path, listed = self.checkpoint.path, set(self.checkpoint.index.files)
        here = {f.name for folder in self.checkpoint.folders for f in folder.glob("*.safetensors")}
        for name in sorted(listed | here):
            if not os.path.lexists(self.checkpoint.file_path(name)):
                self.find("missing file", name, "", "absent", "a file of the index")
                continue
            try:
                header = self.checkpoint.header(name)
            except ArtifactError as error:
                if name in listed:
                    damage = file_finding("damaged file", path, name, error)
                    self.coverage.findings.append(damage)
                    continue
                header = None
            if name not in listed:
                need = "only files of the index"
                self.find("unlisted file", name, "", "a file that is not in the index", need)
            elif header is not None:
                self.headers[name] = header
                continue
            if header is not None:
                yield header

    # -- out of proportion ---------------------------------------------------------------------

    def _is_of_another_model(self) -> bool:
        """Compare counts before names are made; say so where they cannot belong together."""
        config, known = self.checkpoint.config, len(self.weight_map)
        expected = n_tensors(config)
        if expected <= max(MOST_EXPECTED, 2 * known):
            return False
        counts = f"num_hidden_layers {config.num_hidden_layers}, num_experts {config.num_experts}"
        self.coverage.findings.append(
            Finding(
                "missing", "config.json", counts, f"counts of {expected} tensors",
                f"those of the {known} tensors here", "take the config.json of these weights",
            )
        )  # fmt: skip
        for layer in (None, *config.layers):
            totals: Counter[str] = Counter()
            for spec, count in layer_rows(config, layer):
                totals[spec.row.module] += count
            rows = [ModuleCount(layer, module, n, 0, 0) for module, n in totals.items()]
            self.coverage.modules += rows
        return True

    # -- whole layers --------------------------------------------------------------------------

    def _whole_layers(self) -> dict[int, list[ModuleCount]]:
        """Return the counts of layers that one file holds wholly and alone, as the index says."""
        matcher = LayerMatcher(self.checkpoint.config, self.checkpoint.tp)
        by_layer: dict[int, list[Header]] = {}
        for header in self.headers.values():
            if header.layer is not None:
                by_layer.setdefault(header.layer, []).append(header)
        n_indexed = Counter(self.weight_map.values())
        counts = {}
        for layer in self.checkpoint.config.layers:
            if len(headers := by_layer.get(layer, [])) != 1:
                continue
            file, table = headers[0].file, headers[0].table
            totals = matcher.match(layer, table)
            if totals is None or n_indexed[file] != len(table.names):
                continue
            if set(map(self.weight_map.get, headers[0].names())) == {file}:
                self.explained.add(file)
                counts[layer] = [ModuleCount(layer, t.module, t.n_tensors, *t[1:]) for t in totals]
        return counts

    # -- tensor by tensor ----------------------------------------------------------------------

    def _check_layers(self, whole: dict[int, list[ModuleCount]]) -> set[str]:
        """Count and check the tensors of the text model; return the names that were looked at."""
        config, tp = self.checkpoint.config, self.checkpoint.tp
        names: set[str] = set()
        for layer in (None, *config.layers):
            if layer is not None and layer in whole:
                self.coverage.modules += whole[layer]
                continue
            counts: dict[str, list[int]] = {}
            for released in layer_tensors(config, layer):
                spec = rank_spec(released, tp) if tp else released
                names.add(spec.name)
                count = counts.setdefault(spec.row.module, [0, 0, 0])
                count[0] += 1
                info = self._check_one(spec)
                if info is not None:
                    count[1] += 1
                    count[2] += info.n_bytes
            self.coverage.modules += [ModuleCount(layer, *item) for item in _flat(counts)]
        return names

    def _check_one(self, spec: TensorSpec) -> TensorInfo | None:
        """Return where a sound tensor lies; of another say what is wrong."""
        file = self.weight_map.get(spec.name)
        infos = self.held.get(spec.name, [])
        if not infos:
            known = file is None or file in self.headers
            got = "absent" if known else "a tensor in a file that cannot be read"
            self.find("missing", file or "", spec.name, got, f"{spec.dtype} {list(spec.shape)}")
            return None
        info = next((info for info in infos if info.file == file), infos[0])
        if file is None:
            self._unindexed(info)
        elif info.file != file:
            self._misplaced(info, file)
        elif need := dtype_fault(spec, info.dtype):
            self.find("mis-typed", file, spec.name, info.dtype, need)
        elif need := shape_fault(spec, info.shape):
            self.find("mis-shaped", file, spec.name, str(list(info.shape)), need)
        else:
            return info
        return None

    def _unindexed(self, info: TensorInfo) -> None:
        need = "every tensor of the file in it"
        self.find("unindexed", info.file, info.name, "a tensor absent from the index", need)

    def _misplaced(self, info: TensorInfo, file: str) -> None:
        need = f"it in {file}, as the index says"
        self.find("mis-placed", file, info.name, f"the tensor in {info.file}", need)

    def _check_duplicates(self, stray: set[str]) -> None:
        """Find tensors that two of the index's files hold; a stray file is one finding already."""
        for name, infos in self.held.items():
            file = self.weight_map.get(name)
            for info in infos:
                if info.file == (file or infos[0].file) or info.file in stray:
                    continue
                others = {other.file for other in infos if other.file not in stray}
                if file in self.explained or len(others) > 1:
                    self._duplicated(file or infos[0].file, info)

    def _duplicated(self, file: str, copy: TensorInfo) -> None:
        first = self.headers[file].tensors.get(copy.name) if file in self.headers else None
        how = "" if first is None else f", {compare_copies(self.checkpoint, first, copy)}"
        self.find("duplicated", file, copy.name, f"another in {copy.file}{how}", "one of this name")

    def _check_padding(self) -> None:
        """Look behind the live heads of what is stored padded; a rank's part has no padding."""
        for spec in padded_tensors(self.checkpoint.config) if self.checkpoint.tp is None else ():
            header = self.headers.get(self.weight_map.get(spec.name, ""))
            info = header.find(spec.name) if header else None
            if info is None or dtype_fault(spec, info.dtype) or shape_fault(spec, info.shape):
                continue  # said already
            if (fault := padding_fault(self.checkpoint, spec, info)) is not None:
                place = f"{spec.name}: element {fault.element}"
                self.find("padding", info.file, place, fault.got, fault.need)

    def _check_others(self, expected: set[str]) -> None:
        """Find tensors that nobody reads, and count the image side apart."""
        indexed = {name for name, file in self.weight_map.items() if file not in self.explained}
        n_vision, vision_bytes = 0, 0
        for name in sorted((indexed | self.held.keys()) - expected):
            info = self.held[name][0] if name in self.held else None
            if is_vision(name):
                n_vision += 1
                vision_bytes += info.n_bytes if info else 0
                self._check_vision(name, info)
            elif self.weight_map.get(name) not in self.explained:
                file = info.file if info else self.weight_map[name]
                got = f"{info.dtype} {list(info.shape)}" if info else "a name in the index alone"
                self.find("unclaimed", file, name, f"{got} that nothing reads", _OF_THE_MODEL)
        described = sum(1 for _ in expected_vision(self.checkpoint.config))
        self.coverage.vision = VisionCount(
            0 if self.checkpoint.tp else described, n_vision, vision_bytes
        )

    def _check_vision(self, name: str, info: TensorInfo | None) -> None:
        """Nobody reads it, but what the index promises has to be there."""
        file = self.weight_map.get(name)
        if info is None:
            if file in self.headers:
                self.find("missing", file, name, "absent", "the tensor that the index promises")
        elif file is None:
            self._unindexed(info)
        elif info.file != file:
            self._misplaced(info, file)

    def _check_totals(self) -> None:
        dtypes: Counter[str] = Counter()
        layouts = Counter(header.table.layout for header in self.headers.values())
        for table in {h.table.layout: h.table for h in self.headers.values()}.values():
            for kind, count in Counter(table.kind_of).items():
                dtypes[table.kinds[kind][0]] += count * layouts[table.layout]
        self.coverage.dtypes = dict(sorted(dtypes.items()))
        total = self.checkpoint.index.total_size
        found = sum(header.table.n_bytes for header in self.headers.values())
        if total is not None and total != found:
            # With tensors absent this follows from them; it stands here to catch what they do not.
            got, need = f"{total} bytes", f"{found} bytes by the headers"
            self.find("total_size", INDEX_NAME, "metadata.total_size", got, need)


def _flat(counts: dict[str, list[int]]) -> Iterator[tuple[str, int, int, int]]:
    for module, (expected, sound, n_bytes) in counts.items():
        yield module, expected, sound, n_bytes


def _check_graph(checkpoint: Checkpoint, coverage: Coverage, claimed: set[str]) -> None:
    expected = expected_leaves(checkpoint.config)
    if not claimed:
        raise ArtifactError("operator graph", got="no weight leaves", need="at least one")
    for leaf in sorted(expected - claimed):
        coverage.findings.append(
            Finding("unread leaf", "", leaf, "no node reads it", "a node of the operator graph")
        )
    for leaf in sorted(claimed - expected):
        coverage.findings.append(
            Finding("unknown leaf", "", leaf, "read by the graph", "a row of the weight table")
        )
