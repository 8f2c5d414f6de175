"""Fingerprints of files, by content: small ones are read whole, of large ones many parts."""

import hashlib
import platform
from pathlib import Path

MIB = 1 << 20
WHOLE = 64 * MIB  # files up to this size are read whole
BLOCKS, BLOCK = 256, 64 << 10  # of larger ones, spaced evenly, beside the first and the last MiB
CARD = "README.md"  # of a model's folder: a text, which reports write again and people may edit
WEIGHTS = ("*.safetensors", "*.gguf", "*.json", "*.model", "*.txt", "*.py")  # files of a model's folder that count


def of_file(path: Path) -> str:
    """A hash of a file's content; of its size and parts where it is large."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256(str(size).encode())
        for start, length in _parts(size):
            file.seek(start)
            found.update(file.read(length))
    return f"parts-{found.hexdigest()}"


def _parts(size: int) -> list[tuple[int, int]]:
    spaced = [(number * (size - BLOCK) // (BLOCKS - 1), BLOCK) for number in range(BLOCKS)]
    return [(0, MIB), *spaced, (size - MIB, MIB)]


def of_path(path: Path) -> str:
    """A hash of a file, or of the names and contents of a folder without its card; empty where there is nothing."""
    if path.is_file():
        return of_file(path)
    if not path.is_dir():
        return ""
    found = hashlib.sha256()
    for part in sorted(part for part in path.rglob("*") if part.is_file() and part != path / CARD):
        found.update(f"{part.relative_to(path).as_posix()} {of_file(part)}\n".encode())
    return found.hexdigest()


def of_listing(path: Path) -> str:
    """A hash of a folder's names, sizes and times: for images and recordings, which are many."""
    found = hashlib.sha256()
    for part in sorted(part for part in path.rglob("*") if part.is_file()):
        about = part.stat()
        found.update(f"{part.relative_to(path).as_posix()} {about.st_size} {about.st_mtime_ns}\n".encode())
    return found.hexdigest()


def of_model(name: str, source: str) -> dict[str, str]:
    """The files of a model, or the commit of one from the hub; empty where that is not known yet."""
    if Path(name).suffix == ".gguf" and Path(name).is_file():
        return {name: of_file(Path(name))}
    if Path(source).is_file():
        return {name: of_file(Path(source))}
    if not Path(source).is_dir():
        return {name: _commit(source)}
    files = sorted({path for pattern in WEIGHTS for path in Path(source).glob(pattern) if path.is_file()})
    return {f"{name}/{path.name}": of_file(path) for path in files}


def _commit(repository: str) -> str:
    """The commit of a hub repository as it lies in the cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except ValueError:  # no name of a repository
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def of_data(source: str | None) -> dict[str, str]:
    """A text by content, a folder by its listing, `stdlib` by Python's version; nothing for what a model writes."""
    name = (source or "").removesuffix("+self")
    if name == "stdlib":
        return {name: platform.python_version()}
    if Path(name).is_file():
        return {name: of_file(Path(name))}
    return {name: of_listing(Path(name))} if name and Path(name).is_dir() else {}


def difference(before: dict[str, str], now: dict[str, str]) -> str | None:
    """The first input that changed; one that was not known then or is not known now counts as unchanged."""
    for name in sorted({*before, *now}):
        old, new = before.get(name, "absent"), now.get(name, "absent")
        if old and new and old != new:
            return name
    return None
