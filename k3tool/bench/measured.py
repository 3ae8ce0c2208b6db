"""This machine as a device of the roofline: what it reads, computes and hands over, measured."""

from k3tool.bench.baseline import cpu_model
from k3tool.bench.devices import MEASURED, Device
from k3tool.bench.frame import spread
from k3tool.bench.handoff import local_handoff_us
from k3tool.bench.probe import Probe

PASSES = 5


def this_machine() -> Device:
    """Measure; medians of some passes, one thread a CPU of this process.

    Raises: TargetError where the interpreter is absent or stale.
    """
    with Probe() as probe:
        way = probe.choose_read()
        read = spread([probe.read() for _ in range(PASSES)]).median
        f32 = spread([probe.fma() for _ in range(PASSES)]).median
        pairs = [rate for _ in range(PASSES) if (rate := probe.pairs("auto")) is not None]
        threads = probe.threads
    sources = (
        f"{cpu_model()}, {threads} threads; medians of {PASSES} passes, now",
        f"read bandwidth: {way}, 2 MiB pages",
        "operations: multiply-adds in registers",
        "hand-off: an empty packet that all workers wait for (bench handoff)",
    )
    bf16 = spread(pairs).median if pairs else None
    return Device(MEASURED, "cpu", 0.0, read, f32, bf16, sources, local_handoff_us(threads))
