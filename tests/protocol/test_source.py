"""The explored programs are those of kernels_common/simt_interp.h: its own text says what it does.

The text is compiled for one thread, on words that print themselves (recorder/). What is printed
are the steps that tests/protocol/programs.py writes for the same entries; a fence that the text
loses, or a step that it takes elsewhere, is a difference. What each vendor's words are as
instructions is test_words.py; that lanes need their barriers, tests/runtime/test_gpu_barriers.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kernels.conftest import ROOT
from tests.protocol.explorer import DEVICE, SYSTEM, Op
from tests.protocol.programs import Block

RECORDER = Path(__file__).with_name("recorder")
INTERPRETER = ROOT / "kernels_common" / "simt_interp.h"
VENDORS, PROGRAMS = ("cuda", "hip"), ("flat", "domains")
N_INSTS = 8
WORDS = ("counter", "gate", "peer_gate", "cursor", "arrived", "elected", "open", "departed")
# Counters of the model by what the recorder calls them; those of the next step's bank behind.
NAMES = {f"{word}{i}": 10 * n + i for n, word in enumerate(WORDS) for i in range(N_INSTS)}
NAMES |= {f"other_{name}": 100 + number for name, number in NAMES.items()}
BODY = Op("body")


def recorded(text: str, vendor: str) -> list[Op]:
    """Return the recorder's lines as steps of the explorer."""
    steps: list[Op] = []
    lines = [line.split() for line in text.splitlines()]
    steps += [Op(f"no barrier at {word}") for word in unordered(lines)]
    for word, *rest in lines:
        name = NAMES[rest[0]] if rest and rest[0] in NAMES else 0
        number = int(rest[1]) if len(rest) > 1 else 0
        scope = rest[-1] if rest else ""
        acquires = [Op("invalidate", scope)] if vendor == "cuda" else []
        steps += {
            "body": [BODY], "retire": [Op("retire")], "end": [Op("end", *rest)],
            "add_release": [Op("write_back", DEVICE), Op("drain"), Op("add", name, number)],
            "release_system": [Op("write_back", SYSTEM), Op("drain")],
            "add_system": [Op("add", name, number)],
            "poll": [Op("wait", name, number), *acquires],
            "acquire": [Op("invalidate", scope)],
            "take": [Op("add", name, number)], "count_out": [Op("add", name, number)],
            "domain_count": [Op("add", name, 1)], "domain_open": [Op("add", name, 1)],
            "domain_is_open": [Op("wait", name, 1)], "domain_acquire": [Op("drop_l1")],
            "zero": [Op("zero", name)], "sync": [],
        }[word]  # fmt: skip
    return steps


def unordered(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the words that a barrier must stand at and does not.

    One lane acquires for all: behind the polls of all, and before any goes on.
    """
    words = [line[0] for line in lines if line[0] != "zero"]
    for before, word, behind in zip(words, words[1:], words[2:], strict=False):
        if word == "poll" and behind not in ("poll", "sync"):
            yield word
        if word == "acquire" and (before, behind) != ("sync", "sync"):
            yield word
        if word == "domain_acquire" and behind != "sync":
            yield word


def path(block: Block, **before: int) -> list[Op]:
    """Return the steps that a block takes, its branches decided by what the counters hold."""
    counters = {NAMES[name]: value for name, value in before.items()}
    steps: list[Op] = []
    at = register = 0
    while at < len(block.steps):
        step = block.steps[at]
        at += 1
        if step.kind == "jump" or (step.kind == "unless" and register != step.a):
            at = step.b
        elif step.kind != "unless":
            steps.append(step)
            if step.kind == "add":
                register = counters.get(int(step.a), 0)
                counters[int(step.a)] = register + step.b
    return steps


def waits(vendor: str, *counters: tuple[str, int, str], scope: str) -> Block:
    """Write k3_wait_all; where polls acquire, each does for its own scope."""
    block = Block()
    for name, threshold, own in counters[:-1]:
        if vendor == "cuda":
            block.wait(NAMES[name], threshold, own)
        else:
            block.do("wait", NAMES[name], threshold)
    name, threshold, own = counters[-1]
    block.wait(NAMES[name], threshold, own if vendor == "cuda" else scope)
    return block


def published(*names: str, scope: str = DEVICE) -> list[Op]:
    block = Block()
    block.publish(*(NAMES[name] for name in names), scope=scope)
    return path(block) if names else [Op("retire")]


def left(vendor: str) -> list[Op]:
    """Write k3_leave of the last block out."""
    acquired = [Op("invalidate", SYSTEM)] if vendor == "hip" else []
    return [Op("retire"), Op("add", NAMES["departed0"], 1), *acquired,
            Op("zero", NAMES["departed0"]), Op("end", "0")]  # fmt: skip


def flat(vendor: str) -> list[Op]:
    """A counter; a gate behind the clearing of the next bank; who waits for both."""
    cleared = [name for name in NAMES if name.startswith("other_") and in_a_bank(name)]
    return [
        BODY, *published("counter0"),
        *waits(vendor, ("counter0", 1, DEVICE), scope=SYSTEM).steps,
        BODY, *(Op("zero", NAMES[name]) for name in ordered(cleared)),
        *published("gate0", "peer_gate0", scope=SYSTEM),
        *waits(vendor, ("counter0", 1, DEVICE), ("gate0", 1, SYSTEM), scope=SYSTEM).steps,
        BODY, *published(), *left(vendor),
    ]  # fmt: skip


def in_a_bank(name: str) -> bool:
    """Whether the recorded launch has it, and its own rank clears it."""
    word, index = name.removeprefix("other_")[:-1], int(name[-1])
    held = {"counter": 2, "gate": 2, "cursor": 2, "arrived": 8, "elected": 8, "open": 8}
    return index < held.get(word, 0)


def ordered(names: Sequence[str]) -> list[str]:
    """Return them as the recorder looks for what has been cleared."""
    groups = (("counter",), ("gate",), ("cursor",), ("arrived", "elected", "open"))
    return [
        name
        for group in groups
        for i in range(N_INSTS)
        for word in group
        if (name := f"other_{word}{i}") in names
    ]


def domains(vendor: str) -> list[Op]:
    """Two blocks of a domain meet at every instruction but those of gates, and one it has alone."""
    steps: list[Op] = []

    def entry(begin: Block, end: list[Op]) -> None:
        steps.extend([Op("add", NAMES["cursor0"], 1), *begin.steps, BODY, *end])

    def together(inst: int, *signals: str, arrived: int) -> list[Op]:
        block = Block()
        word = f"arrived{inst}"
        block.publish_together(NAMES[signals[0]] if signals else -1, NAMES[word], 2)
        return path(block, **{word: arrived})

    def met(inst: int, elected: int) -> Block:
        block, words = Block(), (f"elected{inst}", f"open{inst}")
        block.wait_together(NAMES["counter0"], 2, (NAMES[words[0]], NAMES[words[1]]))
        return Block(steps=path(block, **{words[0]: elected}))

    alone = waits(vendor, ("counter0", 2, DEVICE), scope=DEVICE)
    entry(Block(), together(0, "counter1", arrived=0))
    entry(Block(), together(1, "counter0", arrived=1))
    entry(met(2, elected=0), together(2, arrived=0))
    entry(met(3, elected=1), together(3, arrived=0))
    gate = waits(vendor, ("counter0", 2, DEVICE), scope=SYSTEM)
    entry(gate, published("gate0", "peer_gate0", scope=SYSTEM))
    entry(waits(vendor, ("gate0", 1, SYSTEM), scope=SYSTEM), published())
    entry(alone, published())
    return [*steps, Op("add", NAMES["cursor0"], 1), *left(vendor)]


EXPECTED = {
    (vendor, program): {"flat": flat, "domains": domains}[program](vendor)
    for vendor in VENDORS
    for program in PROGRAMS
}


def record(folder: Path, edits: Sequence[tuple[str, str]] = ()) -> dict[tuple[str, str], list[Op]]:
    """Compile the interpreter's text into `folder`, edited, and run every program."""
    text = INTERPRETER.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "simt_interp.h").write_text(text)
    command = [
        "g++", "-std=c++17", "-O0", "-Wall", "-Wno-unused", "-Wno-missing-field-initializers",
        "-DK3_PHASES=3u", "-DK3_INTERP_OPS(X)=X(NOP, nop)", f"-I{folder}", f"-I{RECORDER}",
        f"-I{ROOT / 'kernels_common'}", str(RECORDER / "record.cpp"), "-o", str(folder / "record"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for vendor, program in EXPECTED:
        ran = subprocess.run(
            [folder / "record", vendor, program], capture_output=True, text=True, check=True
        )
        found[vendor, program] = recorded(ran.stdout, vendor)
    return found


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Op]]:
    """Return what the text does as it is."""
    return record(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(("vendor", "program"), EXPECTED)
def test_the_text_takes_the_steps_that_are_explored(
    sound: dict[tuple[str, str], list[Op]], vendor: str, program: str
) -> None:
    assert sound[vendor, program] == EXPECTED[vendor, program]


PUBLISH = "    uint32_t n = 1u;\n    K3_RETIRE(b);\n"
ACQUIRE = "    if (K3_LANE0) k3_acquire(b->is_system != 0u ? K3_SYSTEM_SCOPE : K3_DEVICE_SCOPE);\n"
POLLS = "    K3_FOR(i, 0u, (uint32_t)b->entry.n_waits) { k3_wait_for("
POLLED = "    K3_SYNC(b);\n    if (K3_POLLS_ACQUIRE) return;"
DROPPED = "        k3_domain_acquire();\n    }\n    K3_SYNC(b);\n"
OPEN = "        if (K3_LANE0 && b->stopped == 0u) k3_domain_open(&words[K3_OPEN]);\n"
ELECTED = "        k3_wait_all(b, l);\n" + OPEN
LAST = "b->is_elected = k3_domain_count(&k3_rendezvous(b, l)[K3_ARRIVED]) + 1u == b->party;"
LATE = (
    "(void)k3_domain_count(&k3_rendezvous(b, l)[K3_ARRIVED]),"
    "b->is_elected = k3_domain_count(&k3_rendezvous(b, l)[K3_ARRIVED]) == b->party;"
)
REARM = "            if ((b->entry.flags & K3_ENTRY_REARM) != 0u) k3_rearm(b, l);\n"
BEHIND = "            k3_publish(b, l);\n"
RELEASE = "    k3_release_system(); /* once, not once a rank: it may write a whole cache back */\n"
GATES = (
    "    for (uint32_t r = 0; r < l->n_ranks; r++)"
    " k3_add_system(k3_gate(l, bank, r, id & ~K3_SYSTEM), n);\n}"
)
SCOPE = "(wait.counter & K3_SYSTEM) != 0u ? K3_SYSTEM_SCOPE : K3_DEVICE_SCOPE;\n    const uint64_t"
PARTY = "    if (l->n_domains > 1u && b->is_system == 0u) b->party ="
# What the explorer finds of the programs, made to the text.
MISTAKES = {
    "no retire": [(PUBLISH, PUBLISH.replace("    K3_RETIRE(b);\n", ""))],
    "no acquire": [(ACQUIRE, "")],
    "acquire before the poll": [(ACQUIRE, ""), (POLLS, ACQUIRE + POLLS)],
    "device acquire": [(ACQUIRE, "    if (K3_LANE0) k3_acquire(K3_DEVICE_SCOPE);\n")],
    "polls of a gate at device scope": [(SCOPE, "K3_DEVICE_SCOPE;\n    const uint64_t")],
    "no release": [(RELEASE, "")],
    "released behind": [(RELEASE, ""), (GATES, GATES[:-1] + RELEASE + "}")],
    "device release": [(RELEASE, "    k3_add_release(k3_counter(l, bank, 1u), 0u);\n")],
    "a counter that is not released": [("k3_add_release(k3_counter(", "k3_add_system(k3_counter(")],
    "a gate at its own rank alone": [(GATES, GATES.replace("r < l->n_ranks", "r < 1u"))],
    "opened before the acquire": [(ELECTED, OPEN + "        k3_wait_all(b, l);\n")],
    "followers keep their L1": [("        k3_domain_acquire();\n", "")],
    "followers do not wait": [("!k3_domain_is_open(&words[K3_OPEN]); n++", "false; n++")],
    "count fetched late": [(LAST, LATE)],
    "one counted for a party": [("        n = b->party;\n", "")],
    "elected on a collective": [(PARTY, PARTY.replace(" && b->is_system == 0u", ""))],
    "gates that are waited for not looked at": [
        ("i < e->n_waits; i++) found |=", "i < e->n_waits; i++) (void)")],
    "gates that are signalled not looked at": [
        ("i < e->n_signals; i++) found |=", "i < e->n_signals; i++) (void)")],
    "cleared after arriving": [(REARM, ""), (BEHIND, BEHIND + REARM)],
    "never cleared": [(REARM, "")],
    "its own bank cleared": [("k3_bank(b) ^ 1u", "k3_bank(b)")],
    "rendezvous not cleared": [("words[K3_ELECTED] = words[K3_OPEN] =", "words[K3_OPEN] =")],
    "cursors not cleared": [("(i, 0u, l->max_cursors)", "(i, 1u, l->max_cursors)")],
    "a cursor's value looked at twice": [
        ("l->order[b->window0 + n]", "l->order[b->window0 + (*k3_cursor(b, l) - 1u) / 2u]")],
    "left without retiring": [
        ("    k3_check_scratch(b, l);\n    K3_RETIRE(b);\n", "    k3_check_scratch(b, l);\n")],
    "no barrier behind the polls": [(POLLED, POLLED.replace("    K3_SYNC(b);\n", ""))],
    "no barrier behind the acquire": [(ACQUIRE + "    K3_SYNC(b);\n", ACQUIRE)],
    "no barrier behind a follower": [(DROPPED, DROPPED.replace("    K3_SYNC(b);\n", ""))],
    "left without an acquire": [("        k3_acquire(K3_SYSTEM_SCOPE);\n", "")],
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name.replace(" ", "-"))
def test_control_a_mistake_in_the_text_is_a_difference(
    tmp_path: Path, sound: dict[tuple[str, str], list[Op]], mistake: str
) -> None:
    assert record(tmp_path, MISTAKES[mistake]) != sound == EXPECTED
