"""The targets a program can be compiled for, and what a compiler must know of each.

It does not load a device; the interpreters' loaders do.
"""

from collections.abc import Collection
from dataclasses import dataclass

from k3tool.errors import TargetError, UsageError

# What a program is laid out for where nobody says: prompt tokens in a step, positions, sequences.
DEFAULT_CHUNK, DEFAULT_CONTEXT, BATCH = 64, 4096, 1
# The most that a program may be laid out for; of positions the model's own limit holds.
MOST = {"workgroups": 4096, "chunk": 4096, "batch": 4096}

MOST_RANKS = 1024


def check_layout(name: str, value: int, option: str | None = None) -> None:
    """Refuse a size that no program is laid out for, the same way for whoever asks for it.

    `option` is what the command calls it where that is not the size's name.
    Raises: UsageError naming the option.
    """
    if not 1 <= value <= MOST.get(name, value):
        need = f"1 to {MOST[name]}" if name in MOST else "at least 1"
        raise UsageError(f"--{option or name}", got=value, need=need)


@dataclass(frozen=True, slots=True)
class Target:
    """One target: its name on the command line, and the workgroups a stream is laid out for.

    `workgroups` is a default: the device's compute units, one workgroup each. On the CPU they are
    virtual: any number runs on any thread count. `domains` are groups of workgroups that share an
    L2 cache; workgroup w is in domain w % domains, as the hardware deals them out. `on_chip_bytes`
    is what one workgroup may ask for, None where scratch is plain memory; what a prefill needs
    beyond it lies in device memory, `workspace_bytes` for all workgroups together.
    `peak_bytes_per_s` is the memory's data-sheet bandwidth, 0 where there is no one number.

    `handoff_us` and `unit_bytes_per_s` (what one workgroup reads alone, from memory or a cache) are
    what fusing is judged by: of every target the two-level rendezvous of the system we start from
    and its bytes per compute unit, until somebody measures better. The CPU has the same, though its
    own hand-off takes a hundredth: its programs rehearse those of GPUs, so they have the same ops.
    """

    name: str
    family: str
    workgroups: int
    domains: int = 1
    on_chip_bytes: int | None = None
    workspace_bytes: int = 0
    peak_bytes_per_s: float = 0.0
    handoff_us: float = 3.46
    unit_bytes_per_s: float = 1e11

    def domain_of(self, workgroup: int) -> int:
        """Return the domain of a workgroup."""
        return workgroup % self.domains


KIB, GIB = 1024, 1 << 30

# Units, L2 domains and memory per workgroup: vendors' data sheets of MI355X, MI300X, H200 and B200.
# 227 KiB is what a block may ask for of the 228 KiB of an SM.
_ROWS = (
    Target("cpu", "cpu", 8),
    Target("cuda:sm_90a", "cuda", 132, 1, 227 * KIB, 8 * GIB, 4.8e12),
    Target("cuda:sm_100a", "cuda", 148, 1, 227 * KIB, 8 * GIB, 8.0e12),
    Target("hip:gfx942", "hip", 304, 8, 64 * KIB, 8 * GIB, 5.3e12),
    Target("hip:gfx950", "hip", 256, 8, 160 * KIB, 8 * GIB, 8.0e12),
)
TARGETS: dict[str, Target] = {target.name: target for target in _ROWS}


@dataclass(frozen=True, slots=True)
class Build:
    """The interpreter that serves a target in a phase; its opcodes are those of the program.

    `source` is below the repository, `kernel` the function launched, `lanes` a block's. With `ops`
    it serves the phases of a program that use one of them, before a build without.
    """

    source: str
    kernel: str
    lanes: int
    wave: int
    ops: tuple[str, ...] = ()


# Bodies of latent attention that have pages of the cache in shared memory in a build of their own.
_PAGES = ("MLA_PAGES", "MLA_ATTEND")
_CUDA = (
    Build("kernels_cuda/flash.cu", "k3_interp", 256, 32, _PAGES),
    Build("kernels_cuda/interp.cu", "k3_interp", 256, 32),
)
_HIP = (
    Build("kernels_hip/flash.hip", "k3_interp", 512, 64, _PAGES),
    Build("kernels_hip/interp.hip", "k3_interp", 512, 64),
)
# Which builds serve which target and phase. One that is absent has no interpreter.
BUILDS: dict[tuple[str, str], tuple[Build, ...]] = {
    ("cuda:sm_90a", "decode"): _CUDA,
    ("cuda:sm_90a", "prefill"): _CUDA,
    ("cuda:sm_100a", "decode"): _CUDA,
    ("cuda:sm_100a", "prefill"): _CUDA,
    ("hip:gfx942", "decode"): _HIP,
    ("hip:gfx942", "prefill"): _HIP,
    ("hip:gfx950", "decode"): _HIP,
    ("hip:gfx950", "prefill"): _HIP,
}


def get_build(target: str, phase: str, ops: Collection[str] = ()) -> Build:
    """Return the build for a phase that uses `ops`. Raises: TargetError where there is none."""
    if (target, phase) not in BUILDS:
        need = ", ".join(sorted({name for name, _ in BUILDS}))
        raise TargetError(f"GPU interpreter of {target} for {phase}", got="none", need=need)
    return next(b for b in BUILDS[target, phase] if not b.ops or not set(ops).isdisjoint(b.ops))


def get_target(name: str) -> Target:
    """Return a target by name. Raises: UsageError listing the known ones."""
    if name not in TARGETS:
        raise UsageError("--target", got=name, need=" or ".join(sorted(TARGETS)))
    return TARGETS[name]
