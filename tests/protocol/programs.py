"""The interpreters' protocol as programs for the explorer, each with mistakes that could be made.

A builder writes the steps of kernels_common/simt_interp.h, function by function: `wait` is k3_wait,
`publish` k3_publish, `rearm` k3_rearm. A mistake is the name of one change to that text.
test_source.py and test_words.py hold that text, and what it is compiled to, to these steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.protocol.explorer import DEVICE, SYSTEM, Op, System


@dataclass(slots=True)
class Block:
    """The steps of one block, as they are written."""

    mistake: str = ""
    steps: list[Op] = field(default_factory=list)

    def do(self, kind: str, a: int | str = 0, b: int = 0, *, unless: str = "") -> None:
        """Add a step, but not under the mistake `unless`."""
        if not unless or self.mistake != unless:
            self.steps.append(Op(kind, a, b))

    def read(self, place: int, value: int) -> None:
        """Load a place that must hold `value` by now."""
        self.do("load", place)
        self.do("expect", value)

    def acquire(self, scope: str) -> None:
        """After the polls: one invalidation."""
        self.do("invalidate", scope, unless="no acquire")

    def release(self, scope: str, *counters: int, n: int = 1) -> None:
        """k3_add_release: write back, wait for it, then add."""
        self.do("write_back", scope, unless="no release")
        self.do("drain", unless="counted before the write-back is done")
        for counter in counters:
            self.do("add", counter, n)

    def wait(self, counter: int, threshold: int, scope: str = DEVICE) -> None:
        """k3_wait_all."""
        if self.mistake == "acquire before the poll":
            self.acquire(scope)
        self.do("wait", counter, threshold)
        if self.mistake != "acquire before the poll":
            self.acquire(scope)

    def publish(self, *counters: int, scope: str = DEVICE) -> None:
        """k3_publish of a block on its own."""
        self.do("retire", unless="no retire")
        self.release(scope, *counters)

    def wait_together(self, counter: int, threshold: int, words: tuple[int, int]) -> None:
        """k3_wait_together; `words` are elected and open."""
        elected, opened = words
        self.do("add", elected, 1)
        branch = len(self.steps)
        self.do("unless", 0, 0)
        if self.mistake == "opened before the acquire":
            self.do("wait", counter, threshold)
            self.do("add", opened, 1)
            self.acquire(DEVICE)
        else:
            self.wait(counter, threshold)
            self.do("add", opened, 1)
        end = len(self.steps)
        self.do("jump", 0, 0)
        self.steps[branch] = Op("unless", 0, len(self.steps))
        self.do("wait", opened, 1)
        self.do("drop_l1", unless="followers keep their L1")
        self.steps[end] = Op("jump", 0, len(self.steps))

    def publish_together(self, counter: int, arrived: int, party: int) -> None:
        """k3_publish of a block that meets others."""
        self.do("retire", unless="no retire")
        self.do("add", arrived, 1)
        if self.mistake == "count fetched late":
            self.do("look", arrived)
            self.do("unless", party, 0)
        else:
            self.do("unless", party - 1, 0)
        branch = len(self.steps) - 1
        self.release(DEVICE, counter, n=party)
        self.steps[branch] = self.steps[branch]._replace(b=len(self.steps))


def flat(mistake: str = "") -> System:
    """One domain: two blocks write, two wait for both."""
    blocks = []
    for index in range(4):
        block = Block(mistake)
        if index < 2:
            block.do("store", index, 1)
            block.publish(0)
        else:
            block.wait(0, 2)
            block.read(0, 1)
            block.read(1, 1)
        blocks.append(tuple(block.steps))
    return System(tuple(blocks), (0, 0, 0, 0), (0,), (0, 0), 1, {0: 2})


def by_domain(mistake: str = "") -> System:
    """Two domains, every block for itself: one in each writes and reads what the other wrote."""
    blocks = []
    for index in range(3):
        block = Block(mistake)
        if index < 2:
            block.do("store", index, 1)
            block.publish(0)
        block.wait(0, 2)
        block.read(0 if index == 1 else 1, 1)
        blocks.append(tuple(block.steps))
    return System(tuple(blocks), (0, 1, 0), (0, 0), (0, 0), 1, {0: 2})


def windows(mistake: str = "") -> System:
    """Entries through a cursor: two blocks share a window, two entries of each of two instructions.

    Whoever takes an entry of the second instruction waits for the first; a block may take them all.
    """
    cursor, counter = 0, 1
    order = (1, 1, 0, 0) if mistake == "window out of order" else (0, 0, 1, 1)
    is_late = mistake == "cursor fetched late"
    blocks = []
    for _ in range(2):
        block = Block(mistake)
        for _ in order:
            block.do("add", cursor, 1)
            if is_late:  # what others have added is counted too
                block.do("look", cursor)
            _take(block, order, counter, first=1 if is_late else 0)
        blocks.append(tuple(block.steps))
    final = {cursor: 2 * len(order), counter: 2}
    return System(tuple(blocks), (0, 0), (0,), (0,) * len(order), 2, final)


def _take(block: Block, order: tuple[int, ...], counter: int, first: int) -> None:
    """Run the entry whose number is in the register, none where the window has ended."""
    ends = []
    for at, instruction in enumerate(order):
        branch = len(block.steps)
        block.do("unless", at + first, 0)
        if instruction == 0:
            block.do("store", at, 1)
            block.publish(counter)
        else:
            block.wait(counter, 2)
            for place in (p for p, other in enumerate(order) if other == 0):
                block.read(place, 1)
        ends.append(len(block.steps))
        block.do("jump", 0, 0)
        block.steps[branch] = Op("unless", at + first, len(block.steps))
    for end in ends:
        block.steps[end] = Op("jump", 0, len(block.steps))


def two_level(mistake: str = "") -> System:
    """Two blocks of domain 0 write, two of domain 1 wait for both together and read."""
    counter, arrived, elected, opened = range(4)
    blocks = []
    for index in range(4):
        block = Block(mistake)
        if index < 2:
            block.do("store", index, 1)
            block.publish_together(counter, arrived, 2)
        else:
            block.wait_together(counter, 2, (elected, opened))
            block.read(0, 1)
            block.read(1, 1)
        blocks.append(tuple(block.steps))
    final = {counter: 2, arrived: 2, elected: 2, opened: 1}
    return System(tuple(blocks), (0, 0, 1, 1), (0, 0), (0, 0), 4, final)


def few_workgroups(mistake: str = "") -> System:
    """A collective of two ranks: one entry and two readers on rank 0, one block on rank 1.

    Rank 0's blocks share a domain. With `elected on a collective` one of them acquires for both, as
    among its own; with `party of the whole domain` the number that meets is the domain's blocks,
    not the packet's entries there.
    """
    gate0, gate1, arrived, elected, opened = range(5)
    blocks = []
    for index in range(2):
        block = Block(mistake)
        if mistake == "party of the whole domain" and index == 0:
            # The packet has one entry here, and the other block never comes.
            block.do("store", 0, 1)
            block.do("retire")
            block.do("add", arrived, 1)
            block.do("unless", 1, 0)
            branch = len(block.steps) - 1
            block.release(SYSTEM, gate0, gate1, n=2)
            block.steps[branch] = Op("unless", 1, len(block.steps))
        elif index == 0:
            block.do("store", 0, 1)
            block.publish(gate0, gate1, scope=SYSTEM)
        if mistake == "elected on a collective":
            block.wait_together(gate0, 2, (elected, opened))
        else:
            block.wait(gate0, 2, SYSTEM)
        block.read(1, 1)
        blocks.append(tuple(block.steps))
    peer = Block()
    peer.do("store", 1, 1)
    peer.publish(gate0, gate1, scope=SYSTEM)
    peer.wait(gate1, 2, SYSTEM)
    peer.read(0, 1)
    return System((*blocks, tuple(peer.steps)), (0, 0, 1), (0, 1), (0, 1), 5, {gate0: 2, gate1: 2})


def collectives(mistake: str = "") -> System:
    """Two ranks, three sums in a row through two slots in turn. Place 2 * rank + slot."""
    release = DEVICE if mistake == "device release" else SYSTEM
    acquire = DEVICE if mistake == "device acquire" else SYSTEM
    blocks = []
    for rank in range(2):
        block = Block(mistake)
        for turn in range(3):
            slot = 0 if mistake == "slot reused early" else turn % 2
            block.do("store", 2 * rank + slot, turn + 1)
            block.publish(2 * turn, 2 * turn + 1, scope=release)  # a gate is at every rank
            block.wait(2 * turn + rank, 2, acquire)
            block.read(2 * (1 - rank) + slot, turn + 1)
        blocks.append(tuple(block.steps))
    final = dict.fromkeys(range(6), 2)
    return System(tuple(blocks), (0, 1), (0, 1), (0, 0, 1, 1), 6, final)


def segments(mistake: str = "") -> System:
    """A step in two launches on two ranks: counters outlive a launch.

    A launch begins when all blocks of its rank have left the one before: here one block is a rank,
    so launches follow each other in its program. The second waits for a counter of the first and
    for a gate at which the peer may already have arrived.
    """
    counters, gates = (0, 1), (2, 3)
    blocks = []
    for rank in range(2):
        block = Block(mistake)
        block.do("store", rank, 1)
        block.publish(counters[rank])
        if mistake == "zeroed per segment":
            block.do("clear", gates[rank])
            block.do("clear", counters[rank])
        block.publish(*gates, scope=SYSTEM)
        block.wait(counters[rank], 1)
        block.wait(gates[rank], 2, SYSTEM)
        block.read(1 - rank, 1)
        blocks.append(tuple(block.steps))
    final = {counters[0]: 1, counters[1]: 1, gates[0]: 2, gates[1]: 2}
    return System(tuple(blocks), (0, 1), (0, 1), (0, 1), 4, final)


def rearm(mistake: str = "") -> System:
    """Two ranks, three steps, two banks: the gate of a step's first sum and that of its fold.

    Counter 4 * bank + 2 * which + rank. The bank of the next step is cleared before the arrival at
    this step's fold; nobody clears between steps.
    """
    blocks = []
    for rank in range(2):
        block = Block(mistake)
        for step in range(3):
            bank, other = 4 * (step % 2), 4 * ((step + 1) % 2)
            block.publish(bank, bank + 1, scope=SYSTEM)
            block.wait(bank + rank, 2, SYSTEM)
            if mistake not in ("cleared between steps", "never cleared", "cleared after arriving"):
                block.do("zero", other + rank)
                block.do("zero", other + 2 + rank)
            block.publish(bank + 2, bank + 3, scope=SYSTEM)
            if mistake == "cleared after arriving":
                block.do("zero", other + rank)
                block.do("zero", other + 2 + rank)
            block.wait(bank + 2 + rank, 2, SYSTEM)
            if mistake == "cleared between steps":
                block.do("retire")
                block.do("zero", bank + rank)
                block.do("zero", bank + 2 + rank)
                block.do("zero", other + rank)
                block.do("zero", other + 2 + rank)
                block.do("retire")
        block.do("retire")
        blocks.append(tuple(block.steps))
    final = dict.fromkeys(range(4), 2)  # the bank of the last step
    return System(tuple(blocks), (0, 1), (0, 1), (), 8, final)


def arrivals(mistake: str = "") -> System:
    """Two fetches of two experts into the same two slots, by two that read and one that computes.

    kernels_cpu/residency.c: a fetch is signalled when its experts have slots; each expert's pointer
    is a counter of its own. The next fetch waits for the readers of the one before, which end only
    when all its experts have come. Counters: begun, expert 0, expert 1, readers; 4 a fetch.
    """
    blocks = []
    for slot in range(2):
        block = Block(mistake)
        for fetch in range(2):
            begun, come = 4 * fetch, 4 * fetch + 1 + slot
            if fetch:
                block.do("wait", 3, 1, unless="next fetch does not wait for readers")
            block.publish(begun)
            if mistake == "published before its bytes":
                block.publish(come)
                block.do("store", slot, fetch + 1)
                block.do("retire")
            else:
                block.do("store", slot, fetch + 1)
                block.publish(come)
        blocks.append(tuple(block.steps))
    reader = Block(mistake)
    for fetch in range(2):
        reader.wait(4 * fetch, 2)
        for slot in range(2):
            if mistake != "used as soon as the fetch has begun":
                reader.wait(4 * fetch + 1 + slot, 1)
            reader.read(slot, fetch + 1)
        reader.publish(4 * fetch + 3)
    blocks.append(tuple(reader.steps))
    final = {n: 2 if n % 4 == 0 else 1 for n in range(8)}
    return System(tuple(blocks), (0, 0, 0), (0,), (0, 0), 8, final)


# What each system must hold, and which single changes must be found there.
CASES = {
    flat: ("no retire", "no acquire", "acquire before the poll"),
    by_domain: (
        "no retire", "no release", "no acquire", "acquire before the poll",
        "counted before the write-back is done",
    ),
    windows: ("no retire", "window out of order", "cursor fetched late"),
    two_level: (
        "no retire", "no release", "no acquire", "acquire before the poll",
        "opened before the acquire", "followers keep their L1", "count fetched late",
        "counted before the write-back is done",
    ),
    few_workgroups: ("elected on a collective", "party of the whole domain", "no release"),
    collectives: (
        "no retire", "no release", "no acquire", "device release", "device acquire",
        "slot reused early", "counted before the write-back is done",
    ),
    segments: ("zeroed per segment", "no release", "no acquire"),
    arrivals: (
        "published before its bytes", "used as soon as the fetch has begun",
        "next fetch does not wait for readers", "no retire", "no acquire",
    ),
    rearm: ("cleared between steps", "never cleared", "cleared after arriving", "no retire"),
}  # fmt: skip
