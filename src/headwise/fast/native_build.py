"""Compiles coder.c, native.c and packed.c with the compiler of this machine, once, and loads them. Needs no torch.

The library lies in the user's cache folder. Its name tells what it was made from and for, and what it contains: a home
folder may be shared by unlike machines, and a damaged file is made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from headwise.fast.table import cache_folder
from headwise.files.disk import write_atomically

SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in ("coder", "native", "packed"))
HEADER = Path(__file__).with_name("coder.h")
FILES = ", ".join(source.name for source in SOURCES)
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared")
WAYS = (
    ("-march=native", "-fopenmp"),
    ("-march=native", "-fopenmp-simd"),
    ("-fopenmp-simd",),
    (),
)  # the first that works
P, N = ctypes.c_void_p, ctypes.c_int64
CALLS = {  # arguments, and whether they return a number
    "headwise_token": ([P, P, ctypes.c_int], ctypes.c_int),
    "headwise_rows": ([P, P, N, P, P, N, N, N, P, P, ctypes.c_int], None),
    "headwise_linear": ([P, P, P, P, N, N, N, ctypes.c_int], None),
    "headwise_packed": ([P, P, P, N, N, ctypes.c_int], None),
    "headwise_unpacked": ([P, N, N, P, ctypes.c_int], None),
}
SECONDS = 120  # that compiling may take


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return f"no C compiler was found ({', '.join(COMPILERS)})"
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return _kept(compiler) or _built(compiler, Path(scratch))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{FILES} could not be compiled by {compiler}: {error}"


def runs() -> bool:
    """Whether there is a library."""
    return not isinstance(library(), str)


def _ways() -> tuple[tuple[str, ...], ...]:
    """Flags to try. Only on Linux does torch have the OpenMP of the usual compilers: two of them disturb each other."""
    return WAYS if sys.platform == "linux" else WAYS[1:]


def _key(compiler: str) -> str:
    """What a library is made from and for."""
    told = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS, check=True).stdout
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part")  # on x86, and on Arm
    processor = sorted({line for line in lines if line.startswith(names)} or lines[:1])
    parts = [
        *(file.read_bytes() for file in (*SOURCES, HEADER)),
        told,
        repr((FLAGS, _ways(), platform.platform(), processor)).encode(),
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _kept(compiler: str) -> ctypes.CDLL | None:
    """The library of an earlier process, if it is whole."""
    with contextlib.suppress(OSError, RuntimeError):
        for file in cache_folder().glob(f"native-{_key(compiler)}-*.so"):
            if file.stem.endswith(_digest(file.read_bytes())):
                return _loaded(file)
    return None


def _built(compiler: str, scratch: Path) -> ctypes.CDLL | str:
    """A new library. It is loaded from where it was made if the cache folder does not take it."""
    made, told = scratch / "native.so", ""
    for way in _ways():
        command = [compiler, *FLAGS, *way, "-o", str(made), *map(str, SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode == 0:
            break
        told = done.stderr.strip()[-400:]
    else:
        return f"{compiler} could not compile {FILES}: {told}"
    with contextlib.suppress(OSError, RuntimeError):
        content = made.read_bytes()
        file = cache_folder() / f"native-{_key(compiler)}-{_digest(content)}.so"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
        return _loaded(file)
    return _loaded(made)


def _loaded(file: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(file))
    for name, (given, returned) in CALLS.items():
        call = getattr(found, name)
        call.argtypes, call.restype = given, returned
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
