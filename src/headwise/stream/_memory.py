"""How much memory there is for a model, and how much it would take."""

from __future__ import annotations

import os
from pathlib import Path

HELD = 3 * 4  # bytes for every number of a model in memory: source and cut model in float32, and a copy on the way


def available_bytes() -> int:
    """What can be used without swapping, within the limits of a container."""
    found = [_known_to_system()]
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    try:
        if (text := limit.read_text().strip()) != "max":
            found.append(int(text) - int(used.read_text()))
    except (OSError, ValueError):  # no such limit
        pass
    return max(0, min(found))


def _known_to_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
