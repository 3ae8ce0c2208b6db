"""What differs between the vendors' driver libraries, as far as they are called through ctypes.

Both have the same calls for devices, links and virtual memory behind their own prefix, and the same
layouts of what is passed; a row says the rest. CuPy has none of these calls, or answers them with
an error for one of the vendors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Driver:
    """A vendor's driver library. Source: cuda.h; hip/hip_runtime_api.h."""

    library: str
    package: str
    cupy: str  # the PyPI package of CuPy for it
    monitor: str  # the command that names who else uses a device
    prefix: str  # of its calls
    count: str  # the one call that is not named after the other vendor's
    access: int  # the P2P attribute: reaches the other's memory
    atomics: int | None  # the P2P attribute: its link carries atomics; None asks for its kind
    kind: int  # of an allocation whose words are counted from other devices
    is_current: bool = False  # whether memory is made on the current device, whatever is asked
    least: int = 0  # the version from which `kind` is what it says
    occupancy: str = ""  # the call for the blocks that fit a unit; empty: CuPy has it
    queues: str = ""  # the variable that says how many streams of a process run at once
    n_queues: int = 0  # the same where it says nothing

    @property
    def start(self) -> str:
        """Return the call before all others."""
        return f"{self.prefix}Init"


XGMI = 4  # HSA_AMD_LINK_INFO_TYPE_XGMI, which hipExtGetLinkTypeAndHopCount returns; PCIe is 2

DRIVERS = {
    "cuda": Driver(
        "libcuda.so.1", "NVIDIA's driver", "cupy-cuda13x", "nvidia-smi", "cu", "cuDeviceGetCount",
        access=2, atomics=3, kind=1,  # CU_MEM_ALLOCATION_TYPE_PINNED
        queues="CUDA_DEVICE_MAX_CONNECTIONS", n_queues=8,  # CUDA C++ Programming Guide
    ),
    # The library is named as CuPy's build for ROCm 7 loads it: a second copy of the runtime in the
    # process would know nothing of the first one's memory. hipDevP2PAttrNativeAtomicSupported is
    # not asked: runtimes have answered it with the kind of the link, which is not 0 for PCIe either
    # (clr, hip_peer.cpp). hipMemAllocationTypePinned would be coarse-grained memory, where atomics
    # of system scope reach no other device; the type that is uncached was silently ignored before
    # the version that AMD's own RCCL asks for to use it. CuPy 14.2 for ROCm answers its occupancy
    # with hipErrorUnknown, whatever the kernel (cupy_hip.h), so HIP is asked.
    "hip": Driver(
        "libamdhip64.so.7", "ROCm", "cupy-rocm-7-0", "amd-smi process", "hip", "hipGetDeviceCount",
        access=1, atomics=None, kind=0x40000000,  # hipMemAllocationTypeUncached
        is_current=True, least=71260540,
        occupancy="hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
        queues="GPU_MAX_HW_QUEUES", n_queues=4,  # rocclr, flags.hpp
    ),
}  # fmt: skip


def version_text(version: int) -> str:
    """Return HIP_VERSION in words: 71260540 is 7.12.60540."""
    return f"{version // 10**7}.{version // 10**5 % 100}.{version % 10**5}"
