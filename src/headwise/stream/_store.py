"""What flows between layers, kept while a walk over the layers needs it, so that the walk can be resumed."""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwise.errors import PlanError
from headwise.files import tensors as stored
from headwise.files.disk import explained, sync, write_file
from headwise.memory import available_bytes
from headwise.progress import Track
from headwise.types import write_atomically

DONE, KEY = "complete", "key.json"
AGAIN = "delete the run's folder streaming/ and run again"
HELD_SHARE = 1 / 8  # of free memory: a stream that takes less stays there
EVERY = 60.0  # seconds of work that a kill may lose where streams are held in memory


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file, whole or not at all."""
    held = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_file(path, lambda new: save_file(held, new, metadata={"format": "pt"}))


def read_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Copies of what a file holds; nothing stays mapped."""
    return stored.read(path, device, advice=AGAIN)


def write_stream(path: Path, stream: torch.Tensor) -> None:
    """Write a stream for this walk, whole or not at all. A power cut may lose it, so nothing waits for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with explained(path):
        save_file({"stream": stream.detach().cpu().contiguous()}, new)
        os.replace(new, path)


def read_stream(path: Path, device: str | torch.device) -> torch.Tensor:
    """The stream that a file holds."""
    found = read_tensors(path, device).get("stream")
    if found is None or not found.is_floating_point():
        raise PlanError(f"{path} holds no stream between layers; {AGAIN}.")
    return found


def checksum(rows: torch.Tensor) -> int:
    """What stands for rows in a key."""
    return zlib.crc32(rows.cpu().numpy().tobytes())


def _started() -> str:
    """What stands for the time since this machine was started; empty where the system has no name for it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class StreamStore:
    """Streams before every layer, in one folder for each; only those before the next layer are kept.

    A walk writes the streams behind a layer and then marks them `complete`. After a kill it resumes at `position`, the
    last complete layer. With a GPU, streams stay in its memory or in the host's where there is room, and are written
    once a minute; without one the host's memory is scarce, and all lie on disk. `key` stands for the work: other work
    starts with an empty store, and so does the same work after the machine was started anew, as streams are not forced
    to disk.
    """

    def __init__(self, folder: Path, key: dict[str, Any], device: str = "cpu") -> None:
        self.folder, self.device, self.key = folder, device, json.dumps({**key, "machine": _started()})
        self.held: dict[tuple[int, str], torch.Tensor] = {}
        self.written = time.monotonic()
        name = folder / KEY
        if not name.is_file() or name.read_bytes() != self.key.encode():
            self.restart()

    def position(self) -> int | None:
        """The layer that comes next, or None where nothing has begun."""
        found = [int(path.parent.name) for path in self.folder.glob(f"*/{DONE}") if path.parent.name.isdecimal()]
        return max(found, default=None)

    def walk(self, layers: int, begin: Callable[[], None], track: Track, label: str) -> Iterator[int]:
        """The layers that are not complete yet; `begin` puts the streams before the first one."""
        start = self.position()
        if start is None:
            begin()
            self.complete(start := 0)
        for index in track(range(start, layers), label):
            yield index
            self.complete(index + 1, last=index + 1 == layers)

    def _file(self, layer: int, name: str) -> Path:
        return self.folder / f"{layer:05d}" / f"{name}.safetensors"

    def __setitem__(self, place: tuple[int, str], stream: torch.Tensor) -> None:
        """Keep a stream before a layer, by a name."""
        for device in dict.fromkeys((self.device, "cpu")) if self.device != "cpu" else ():
            if stream.nbytes <= HELD_SHARE * available_bytes(device):
                self.held[place] = stream.detach().to(device)
                return
        write_stream(self._file(*place), stream)

    def __getitem__(self, place: tuple[int, str]) -> torch.Tensor:
        if (held := self.held.get(place)) is not None:
            return held.to(self.device)
        return read_stream(self._file(*place), self.device)

    def complete(self, layer: int, last: bool = False) -> None:
        """Mark that all streams before a layer are there, and delete those before earlier layers.

        Streams that are held in memory are written if it is time, or if the layer is the last.
        """
        self.held = {place: stream for place, stream in self.held.items() if place[0] >= layer}
        partly = (self.folder / f"{layer:05d}").exists()  # some had no room in memory
        if self.held and not (last or partly) and time.monotonic() - self.written < EVERY:
            return
        for place, stream in self.held.items():
            write_stream(self._file(*place), stream)
        self.written = time.monotonic()
        (self.folder / f"{layer:05d}").mkdir(parents=True, exist_ok=True)
        (self.folder / f"{layer:05d}" / DONE).touch()
        sync(self.folder / f"{layer:05d}")
        for path in [path for path in self.folder.iterdir() if path.name.isdigit() and int(path.name) < layer]:
            (path / DONE).unlink(missing_ok=True)  # first: what a kill leaves of the rest does not count
            shutil.rmtree(path)

    def restart(self) -> None:
        """Forget what was done."""
        self.clear()
        write_atomically(self.folder / KEY, self.key)

    def clear(self) -> None:
        """Delete everything, the key first: what a kill leaves of the rest does not count."""
        self.held = {}
        (self.folder / KEY).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
