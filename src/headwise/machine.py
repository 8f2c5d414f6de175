"""What the processor may do in this process, settled before torch is imported. No torch.

A virtual machine or sandbox may show AMX tiles in CPUID and yet refuse them to programs: the first product in bfloat16
then ends the process with an illegal instruction. oneDNN, which computes these products, can be set to do without.
"""

import ctypes
import os
import platform
from pathlib import Path

LIMIT = "ONEDNN_MAX_CPU_ISA"
CPUINFO = Path("/proc/cpuinfo")
WITHOUT_TILES = "AVX512_CORE_BF16"
ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18  # the call of x86-64 Linux, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def settle() -> None:
    """Limit oneDNN where tiles are not permitted, unless the user has set a limit."""
    if LIMIT not in os.environ and may_have_tiles() and not tiles_permitted():
        os.environ[LIMIT] = WITHOUT_TILES


def may_have_tiles() -> bool:
    """Whether the processor could have tiles. All that do have AVX-512 for bfloat16, also where tiles are hidden."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        with CPUINFO.open() as lines:
            flags = next((line.split() for line in lines if line.startswith("flags")), [])
    except (OSError, ValueError):
        return False
    return "amx_tile" in flags or "avx512_bf16" in flags


def tiles_permitted() -> bool:
    """Ask the system for permission to use tiles in this process."""
    try:
        return bool(_syscall(ARCH_PRCTL, REQUEST, TILES) == 0)
    except (OSError, AttributeError, ValueError):
        return False


def _syscall(*arguments: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    found: int = call(*(ctypes.c_long(argument) for argument in arguments))
    return found
