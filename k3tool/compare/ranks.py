"""Compare the ranks inside each record of tokens, then every record with the first.

Every record is first held against itself: ranks recorded, steps in order, margins and ids that can
be. What cannot be compared at all (another checkpoint, prompt or arithmetic) is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from k3tool.compare.differences import NEAR_TIE, Decode, Difference, compare_streams
from k3tool.compare.event_lines import Request
from k3tool.compare.majority import Majority, majority
from k3tool.compare.records import Record, common_fields, margins
from k3tool.compare.spill import BLOCK_ROWS, Columns
from k3tool.errors import ArtifactError, listed
from k3tool.tables import count_text
from k3tool.verdict import Check, failed, not_run, passed

ONE_STREAM = "one stream only, nothing to compare it with: give a second file"
_ACROSS_RANKS = ("step", "position", "id", "best", "second", "digest")
_ONE_QUESTION = {
    "checkpoint": "compare runs of one checkpoint",
    "numerics": "each mode of the arithmetic has bits of its own: compare runs of one --numerics",
    "prompt": "compare runs of one prompt (run --ids)",
    "prompt_tokens": "compare runs of one prompt (run --ids)",
    "sampling": "compare runs of one --temperature, --top-p, --top-k and --seed",
}
_WORDS = {
    "id": "ids", "position": "positions", "best": "logits", "margin": "margins",
    "logits_digest": "digests of logits", "digest": "digests of all replicated results",
}  # fmt: skip

Overall = Literal["identical", "near tie", "real", "prefix", "unsound", "nothing compared"]


@dataclass(slots=True)
class Comparison:
    """All checks in order, the differences found, and who is with most."""

    checks: list[Check] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    majorities: list[Majority] = field(default_factory=list)
    compared: bool = False

    @property
    def verdict(self) -> Overall:
        """Return what it amounts to: the gravest difference, or why equality says nothing."""
        found = {difference.verdict for difference in self.differences}
        for verdict in ("real", "prefix", "near tie"):
            if verdict in found:
                return verdict
        if any(check.status == "FAIL" for check in self.checks):
            return "unsound"
        return "identical" if self.compared else "nothing compared"


@dataclass(frozen=True, slots=True)
class Terms:
    """What differences are judged by: the bound of a near tie, what shows text, the vocabulary."""

    near_tie: float = NEAR_TIE
    decode: Decode | None = None
    vocab_size: int | None = None


_DEFAULT = Terms()


def compare(records: Sequence[Record], terms: Terms = _DEFAULT) -> Comparison:
    """Compare ranks and records; of several requests in a file each with its own in the others.

    Raises: ArtifactError when records are known to answer different questions.
    """
    found = Comparison()
    requests: dict[Request, list[Record]] = {}
    for record in records:
        requests.setdefault(record.request, []).append(record)
    files = list(dict.fromkeys(record.file for record in records))
    for request, group in requests.items():
        part = _compare_group(group, terms)
        found.checks += part.checks
        found.differences += part.differences
        found.majorities += part.majorities
        found.compared |= part.compared
        have = {record.file for record in group}
        found.checks += [
            failed(f"{file} request {request}", f"absent: only {listed(sorted(have))} has it")
            for file in files
            if file not in have
        ]
    return found


def _compare_group(records: Sequence[Record], terms: Terms) -> Comparison:
    found = Comparison()
    for record in records:
        _compare_ranks(found, record, terms)
    is_alone = len(records) == 1 and len(records[0].ranks) <= 1 and (records[0].n_ranks or 1) == 1
    if is_alone and not any(check.status == "FAIL" for check in found.checks):
        # That the one stream is in order compares nothing: as a PASS it would carry the verdict.
        found.checks = [not_run(f"{records[0].name}: streams equal", ONE_STREAM)]
    for other in records[1:]:
        _compare_records(found, records[0], other, terms)
    if len(records) > 1:
        _note_majority(found, records)
    return found


# -- one record ----------------------------------------------------------------------------------


def _compare_ranks(found: Comparison, record: Record, terms: Terms) -> None:
    if record.n_ranks is not None:
        found.checks.append(_present(record))
        if found.checks[-1].status == "FAIL":
            return
    found.checks.append(_in_order(record, terms.vocab_size))
    if len(record.ranks) < 2 or not all(map(len, record.ranks.values())):
        return
    name = f"{record.name}: tokens and bits equal on all ranks"
    fields = [each for each in _ACROSS_RANKS if each in record.fields]
    ranks = sorted(record.ranks)
    first, found.compared = record.ranks[ranks[0]], True
    for rank in ranks[1:]:
        names = (f"rank {ranks[0]}", f"rank {rank}")
        near_tie = None if record.is_sampled else terms.near_tie
        difference = compare_streams(
            first, record.ranks[rank], fields, names, near_tie=near_tie, decode=terms.decode
        )
        if difference is not None:
            found.differences.append(difference)
            streams = {f"{record.name} rank {each}": record.ranks[each] for each in ranks}
            _note(found, majority(streams, fields))
            found.checks.append(failed(name, difference.text))
            return
    bits = "ids, logits, digests" if "best" in fields else "ids"
    detail = f"{count_text(len(first), 'step')} on {len(ranks)} ranks: {bits}"
    found.checks.append(passed(name, detail))


def _present(record: Record) -> Check:
    name, n_ranks = f"{record.name}: every rank recorded", record.n_ranks or 0
    missing = sorted(set(range(n_ranks)) - set(record.ranks))
    beyond = sorted(set(record.ranks) - set(range(n_ranks)))
    if missing or beyond or not record.ranks:
        wrong = [
            f"{word} {', '.join(map(str, ranks))}"
            for word, ranks in (("missing", missing), ("unexpected", beyond))
            if ranks
        ]
        return failed(name, f"of {count_text(n_ranks, 'rank')}, {'; '.join(wrong)}")
    return passed(name, f"{n_ranks} of {n_ranks}")


def _in_order(record: Record, vocab_size: int | None) -> Check:
    """Say whether a record holds what it is to: each step once and in order, values that can be."""
    name = f"{record.name}: steps in order, ids and margins possible"
    faults = list(record.faults)
    for rank, rows in sorted(record.ranks.items()):
        where = "" if record.n_ranks is None else f"rank {rank}: "
        if len(rows) == 0:
            faults.append(f"{where}no token: nothing to compare")
        else:
            fault = _row_fault(rows, "margin" in record.fields, vocab_size)
            faults += [] if fault is None else [where + fault]
    if not record.ranks:
        faults.append("no token: nothing to compare")
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return failed(name, faults[0] + more)
    longest = max(map(len, record.ranks.values()))
    return passed(name, count_text(longest, "step"))


def _row_fault(rows: Columns, has_margins: bool, vocab_size: int | None) -> str | None:
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        need = start + np.arange(len(block))
        wrong = np.flatnonzero(block["step"] != need)
        if len(wrong):
            row = int(wrong[0])
            got = int(block["step"][row])
            word = "comes again" if got < need[row] else "comes"
            return f"step {got} {word} where step {need[row]} is due"
        if has_margins:
            gap = margins(block)
            wrong = np.flatnonzero(~(np.isfinite(gap) & (gap >= 0)))
            if len(wrong):
                return f"the margin of step {need[wrong[0]]} is {gap[wrong[0]]}"
        if vocab_size is not None:
            wrong = np.flatnonzero(block["id"] >= vocab_size)
            if len(wrong):
                token = int(block["id"][wrong[0]])
                return f"id {token} at step {need[wrong[0]]}: the vocabulary has {vocab_size}"
    return None


# -- two records ---------------------------------------------------------------------------------


def _compare_records(found: Comparison, left: Record, right: Record, terms: Terms) -> None:
    _require_comparable(left, right)
    fields = common_fields(left, right)
    bits = [_WORDS[each] for each in fields if each in _WORDS]
    is_bits = "logits_digest" in fields or "margin" in fields
    name = f"{left.name} and {right.name}: same {'bits' if is_bits else 'tokens'}"
    for record in (left, right):
        if record.n_ranks and 0 not in record.ranks:
            found.checks.append(failed(name, "a file has no rank 0: nothing to compare"))
            return
    if not left.ranks or not right.ranks:
        found.checks.append(failed(name, "no token: nothing to compare"))
        return
    a, b = left.stream(), right.stream()
    if len(a) == 0 or len(b) == 0:
        found.checks.append(failed(name, "no token: nothing to compare"))
        return
    found.compared, names = True, (left.name, right.name)
    near_tie = None if left.is_sampled or right.is_sampled else terms.near_tie
    difference = compare_streams(a, b, fields, names, near_tie=near_tie, decode=terms.decode)
    if difference is not None:
        found.differences.append(difference)
        found.checks.append(failed(name, difference.text))
        return
    scope = ""
    if "logits_digest" in fields and "digest" not in fields:
        scope = " (other programs: only these)"
    ranks = f", TP {left.n_ranks} and {right.n_ranks}" if left.n_ranks and right.n_ranks else ""
    detail = f"{count_text(len(a), 'step')}{ranks}: {', '.join(bits)}{scope}"
    found.checks.append(passed(name, detail))


def _require_comparable(left: Record, right: Record) -> None:
    """Refuse records of different questions, as far as both say what they answer."""
    for what, hint in _ONE_QUESTION.items():
        if what not in left.facts or what not in right.facts:
            continue
        (need, need_text), (got, got_text) = left.facts[what], right.facts[what]
        if got != need:
            raise ArtifactError(
                f"{right.name}: {what}", got=got_text, need=f"{need_text}, as {left.name}",
                hint=hint,
            )  # fmt: skip


def _note_majority(found: Comparison, records: Sequence[Record]) -> None:
    """Say which records differ from most, in what all of them have."""
    if any(not record.ranks for record in records):
        return
    common = [common_fields(records[0], other) for other in records[1:]]
    fields = [name for name in common[0] if all(name in each for each in common)]
    streams: Mapping[str, Columns] = {record.name: record.stream() for record in records}
    _note(found, majority(streams, fields))


def _note(found: Comparison, one: Majority | None) -> None:
    if one is not None:
        found.majorities.append(one)
