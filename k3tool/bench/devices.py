"""The devices that a roofline can be drawn for: figures of each with where they come from.

Peaks are data sheets'. A read bandwidth is what somebody's stream of reads reached, 0 where nobody
we know of says; a floor is then drawn at the peak, which nothing reaches. Wrong if: a peak of
sparse matrices is taken, which doubles it.
"""

from dataclasses import dataclass, replace

from k3tool.errors import UsageError
from k3tool.targets import get_target

MEASURED = "measured"  # in place of a name: this machine, measured now


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Units: bytes a second, operations a second (a multiply-add is two), us.

    `bf16_ops` is of dense products of bf16 (matrix units, or pairs on a CPU), None where there is
    none; `handoff_us` what one hand-off of the target's interpreter costs.
    """

    name: str
    target: str
    peak_bytes: float
    read_bytes: float
    f32_ops: float
    bf16_ops: float | None
    sources: tuple[str, ...]
    handoff_us: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Return the bytes a second that floors are drawn at."""
        return self.read_bytes or self.peak_bytes

    def seconds(self, operations: float, mode: str) -> float:
        """Return the least time of operations in a mode of the arithmetic contract."""
        peak = self.bf16_ops if mode == "bf16" and self.bf16_ops else self.f32_ops
        return operations / peak


_AMD, _NVIDIA = "data sheet of AMD Instinct {}", "data sheet of NVIDIA {} (SXM, dense)"
_STREAM = "read bandwidth: a stream of reads, as measured for the system this one starts from"
DEVICES = (
    Device("MI355X", "hip:gfx950", 8.0e12, 6.2e12, 157.3e12, 2516.6e12,
           (_AMD.format("MI355X"), _STREAM)),
    Device("MI325X", "hip:gfx942", 6.0e12, 4.164e12, 163.4e12, 1307.4e12,
           (_AMD.format("MI325X"), _STREAM)),
    Device("MI300X", "hip:gfx942", 5.3e12, 4.0919e12, 163.4e12, 1307.4e12,
           (_AMD.format("MI300X"), _STREAM)),
    Device("H100", "cuda:sm_90a", 3.35e12, 0.0, 67e12, 989.4e12, (_NVIDIA.format("H100"),)),
    Device("H200", "cuda:sm_90a", 4.8e12, 0.0, 67e12, 989.4e12, (_NVIDIA.format("H200"),)),
    Device("B200", "cuda:sm_100a", 8.0e12, 0.0, 75e12, 2250e12, (_NVIDIA.format("B200"),)),
)  # fmt: skip
_HANDOFF = "hand-off: {:g} us of target {} (k3tool/targets.py), taken from that system too"


def device_names() -> tuple[str, ...]:
    """Return the names that `get_device` knows."""
    return tuple(device.name for device in DEVICES)


def get_device(name: str) -> Device:
    """Return a device by name. Raises: UsageError listing the known ones."""
    for device in DEVICES:
        if device.name.lower() == name.lower():
            us = get_target(device.target).handoff_us
            sources = (*device.sources, _HANDOFF.format(us, device.target))
            return replace(device, handoff_us=us, sources=sources)
    need = f"{', '.join(device_names())} or {MEASURED}"
    raise UsageError("--device", got=name, need=need)


def with_figures(device: Device, bandwidth: float | None, handoff_us: float | None) -> Device:
    """Return a device with figures that somebody gave in place of its own."""
    if bandwidth is not None:
        sources = _in_place_of("read bandwidth:", device.sources)
        device = replace(device, read_bytes=bandwidth, sources=sources)
    if handoff_us is not None:
        sources = _in_place_of("hand-off:", device.sources)
        device = replace(device, handoff_us=handoff_us, sources=sources)
    return device


def _in_place_of(figure: str, sources: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sources of all figures but one, which is as given."""
    others = (source for source in sources if not source.startswith(figure))
    return (*others, f"{figure} as given")
