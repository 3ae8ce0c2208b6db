"""Explores every interleaving of small block programs on a memory that is only as coherent as told.

What a GPU promises of plain memory is modelled as: a store lies in its block's buffer and leaves it
whenever it likes, in any order but with itself; it then is in its domain's L2, where a write-back
brings it to the device, at system scope to other devices too. A load takes what its block's L1
has, else what the domain's L2 has, and keeps both; a cache may fetch what it lacks at any time,
because somebody else asked. Nothing is dropped but by an invalidation, which keeps at device scope
what came from another device. A write-back is begun, and done at any time before its block has
waited for it. Every cache starts with the old value of everything. Counters are atomics beyond all
caches, and order nothing.

It does not model time: a wait is a step that is possible once its counter is high enough. States in
which nothing is possible and not all have ended are deadlocks.

Letters: B blocks, D domains, R ranks, L places in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

DEVICE, SYSTEM = "device", "system"
T = TypeVar("T")


class Op(NamedTuple):
    """One step of a block. `kind` says which of a, b and c mean what; see `_STEPS`."""

    kind: str
    a: int | str = 0
    b: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class System:
    """Blocks and where they are. `domain[block]`, `rank[domain]`, `owner[place]`: a rank."""

    programs: tuple[tuple[Op, ...], ...]
    domain: tuple[int, ...]
    rank: tuple[int, ...]
    owner: tuple[int, ...]
    n_counters: int
    final: dict[int, int] = field(default_factory=dict)  # counter -> value at the end


class Found(NamedTuple):
    """What an exploration met first, empty where nothing is wrong, and how many states it saw."""

    fault: str
    states: int


_Lines = tuple[tuple[tuple[int, bool] | None, ...], ...]


class _State(NamedTuple):
    at: tuple[int, ...]  # B: next step
    register: tuple[int, ...]  # B
    counters: tuple[int, ...]
    device: tuple[int, ...]  # L: what the owner's device has
    system: tuple[int, ...]  # L: what other devices would read
    l2: _Lines  # D, L: value, is dirty
    l1: tuple[tuple[int | None, ...], ...]  # B, L
    buffer: tuple[tuple[tuple[str, int | str, int], ...], ...]  # B: what is begun and not done


# Steps that no other block can see or hinder: taken at once, without trying all the others first.
_PRIVATE = {"store", "zero", "write_back", "drop_l1", "jump", "unless", "expect"}


def explore(system: System, most: int = 400_000) -> Found:
    """Visit every reachable state; return the first fault. Raises: RuntimeError above `most`."""
    n_places, n_blocks = len(system.owner), len(system.programs)
    old = (0,) * n_places
    first = _State(
        (0,) * n_blocks, (0,) * n_blocks, (0,) * system.n_counters, old, old,
        (((0, False),) * n_places,) * len(system.rank), (old,) * n_blocks, ((),) * n_blocks,
    )  # fmt: skip
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        count = 0
        for following in _following(system, state):
            if isinstance(following, str):
                return Found(following, len(seen))
            count += 1
            if following not in seen:
                seen.add(following)
                todo.append(following)
        for following in _fetches(system, state):
            if following not in seen:
                seen.add(following)
                todo.append(following)
        if len(seen) > most:
            raise RuntimeError(f"more than {most} states")
        if count == 0:
            fault = _at_rest(system, state)
            if fault:
                return Found(fault, len(seen))
    return Found("", len(seen))


def _at_rest(system: System, state: _State) -> str:
    waiting = [b for b, at in enumerate(state.at) if at < len(system.programs[b])]
    if waiting:
        steps = ", ".join(f"block {b} at {system.programs[b][state.at[b]]}" for b in waiting)
        return f"deadlock: {steps}"
    for counter, value in system.final.items():
        if state.counters[counter] != value:
            return f"audit: counter {counter} ended at {state.counters[counter]}, need {value}"
    return ""


def _following(system: System, state: _State) -> Iterator[_State | str]:
    for block, program in enumerate(system.programs):
        if state.at[block] < len(program) and program[state.at[block]].kind in _PRIVATE:
            yield from _step(system, state, block)
            return
    for block, program in enumerate(system.programs):
        yield from _leave_buffer(system, state, block)
        if state.at[block] < len(program):
            yield from _step(system, state, block)


def _fetches(system: System, state: _State) -> Iterator[_State]:
    """Bring any absent line into a cache; what is there already, or in a lower cache, it stays."""
    for home, lines in enumerate(state.l2):
        for place in (p for p, line in enumerate(lines) if line is None):
            yield state._replace(l2=_with_line(system, state, home, place))
    for block, lines in enumerate(state.l1):
        for place in (p for p, value in enumerate(lines) if value is None):
            found = state.l2[system.domain[block]][place]
            if found is not None:
                yield state._replace(l1=_put(state.l1, block, _put(lines, place, found[0])))


def _with_line(system: System, state: _State, home: int, place: int) -> _Lines:
    own = system.owner[place] == system.rank[home]
    value = (state.device if own else state.system)[place]
    return _put(state.l2, home, _put(state.l2[home], place, (value, False)))


def _put(whole: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*whole[:index], value, *whole[index + 1 :])


def _leave_buffer(system: System, state: _State, block: int) -> Iterator[_State]:
    pending = state.buffer[block]
    for index, (kind, place, value) in enumerate(pending):
        if any(store[:2] == (kind, place) for store in pending[:index]):
            continue  # stores to one place keep their order
        buffer = _put(state.buffer, block, pending[:index] + pending[index + 1 :])
        if kind == "write_back":
            yield _write_back_now(system, state._replace(buffer=buffer), block, place)
            continue
        if kind == "counter":
            yield state._replace(buffer=buffer, counters=_put(state.counters, place, value))
            continue
        home = system.domain[block]
        l2 = _put(state.l2, home, _put(state.l2[home], place, (value, True)))
        l1 = _put(state.l1, block, _put(state.l1[block], place, value))
        yield state._replace(buffer=buffer, l2=l2, l1=l1)


def _step(system: System, state: _State, block: int) -> Iterator[_State | str]:
    op = system.programs[block][state.at[block]]
    after = _STEPS[op.kind](system, state, block, op)
    if after is None:
        return
    if isinstance(after, str):
        yield f"block {block}, step {state.at[block]}: {after}"
    elif after.at == state.at:
        yield after._replace(at=_put(after.at, block, after.at[block] + 1))
    else:
        yield after


# -- what a step does: the state after it, None where it is not possible yet, a fault in words -----


def _store(system: System, state: _State, block: int, op: Op) -> _State:
    """Write value b to place a."""
    pending = (*state.buffer[block], ("place", int(op.a), op.b))
    return state._replace(buffer=_put(state.buffer, block, pending))


def _zero(system: System, state: _State, block: int, op: Op) -> _State:
    """Clear counter a with a plain store."""
    pending = (*state.buffer[block], ("counter", int(op.a), 0))
    return state._replace(buffer=_put(state.buffer, block, pending))


def _load(system: System, state: _State, block: int, op: Op) -> _State:
    """Read place a into the register."""
    place, home = int(op.a), system.domain[block]
    for kind, where, value in reversed(state.buffer[block]):
        if (kind, where) == ("place", place):
            return state._replace(register=_put(state.register, block, value))
    found = state.l1[block][place]
    if found is None:
        if state.l2[home][place] is None:
            state = state._replace(l2=_with_line(system, state, home, place))
        line = state.l2[home][place]
        assert line is not None
        found = line[0]
        state = state._replace(l1=_put(state.l1, block, _put(state.l1[block], place, found)))
    return state._replace(register=_put(state.register, block, found))


def _retire(system: System, state: _State, block: int, op: Op) -> _State | None:
    """Wait until the block's stores have left it."""
    return None if state.buffer[block] else state


def _write_back(system: System, state: _State, block: int, op: Op) -> _State:
    """Begin a write-back at scope a."""
    pending = (*state.buffer[block], ("write_back", op.a, 0))
    return state._replace(buffer=_put(state.buffer, block, pending))


def _drain(system: System, state: _State, block: int, op: Op) -> _State | None:
    """Wait for the write-back: one lane does, so stores of the others may be under way."""
    return None if any(kind == "write_back" for kind, _, _ in state.buffer[block]) else state


def _write_back_now(system: System, state: _State, block: int, scope: int | str) -> _State:
    """Bring what the domain's L2 has to the device; at system scope beyond it."""
    home = system.domain[block]
    device, shared = list(state.device), list(state.system)
    lines = list(state.l2[home])
    for place, line in enumerate(lines):
        if line is not None and line[1]:
            device[place], lines[place] = line[0], (line[0], False)
        if scope == SYSTEM and system.owner[place] == system.rank[home]:
            shared[place] = device[place]
    return state._replace(
        device=tuple(device), system=tuple(shared), l2=_put(state.l2, home, tuple(lines))
    )


def _drop_l1(system: System, state: _State, block: int, op: Op) -> _State:
    """Forget what the block's own L1 has."""
    return state._replace(l1=_put(state.l1, block, (None,) * len(system.owner)))


def _invalidate(system: System, state: _State, block: int, op: Op) -> _State:
    """Forget the L1 and the domain's L2: at device scope what is the device's own."""
    home = system.domain[block]
    lines = tuple(
        line if line is None or line[1] or (op.a == DEVICE and owner != system.rank[home]) else None
        for line, owner in zip(state.l2[home], system.owner, strict=True)
    )
    return _drop_l1(system, state._replace(l2=_put(state.l2, home, lines)), block, op)


def _wait(system: System, state: _State, block: int, op: Op) -> _State | None:
    """Go on once counter a is at least b."""
    return state if state.counters[int(op.a)] >= op.b else None


def _add(system: System, state: _State, block: int, op: Op) -> _State:
    """Add b to counter a; the register has what it was."""
    was = state.counters[int(op.a)]
    return state._replace(
        counters=_put(state.counters, int(op.a), was + op.b),
        register=_put(state.register, block, was),
    )


def _look(system: System, state: _State, block: int, op: Op) -> _State:
    """Read counter a into the register."""
    return state._replace(register=_put(state.register, block, state.counters[int(op.a)]))


def _clear(system: System, state: _State, block: int, op: Op) -> _State:
    """Set counter a to 0 at once: what a host does between launches."""
    return state._replace(counters=_put(state.counters, int(op.a), 0))


def _jump(system: System, state: _State, block: int, op: Op) -> _State:
    """Go to step b."""
    return state._replace(at=_put(state.at, block, op.b))


def _unless(system: System, state: _State, block: int, op: Op) -> _State:
    """Go to step b where the register is not a."""
    if state.register[block] == op.a:
        return state
    return state._replace(at=_put(state.at, block, op.b))


def _expect(system: System, state: _State, block: int, op: Op) -> _State | str:
    """Require the register to be a."""
    got = state.register[block]
    return state if got == op.a else f"read {got}, need {op.a}"


_STEPS = {
    "store": _store, "zero": _zero, "load": _load, "retire": _retire, "write_back": _write_back,
    "drain": _drain, "drop_l1": _drop_l1, "invalidate": _invalidate, "wait": _wait, "add": _add,
    "look": _look, "clear": _clear, "jump": _jump, "unless": _unless, "expect": _expect,
}  # fmt: skip
