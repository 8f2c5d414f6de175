"""Files and folders that are written whole or not at all: a kill, a power cut or a full disk leaves the old ones."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import HeadwiseError, OutputError

UNFINISHED = ".headwise-tmp-"  # begins the name of whatever is being written or deleted; cleared at the next start
WHOLE = ".headwise-new-"  # begins the name of a finished folder on its way to its place; put there at the next start
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # from file systems that cannot sync a folder


def temporary(path: Path) -> Path:
    """A free name beside `path`; whatever has it is deleted at the next start."""
    return path.with_name(f"{UNFINISHED}{path.name}.{secrets.token_hex(4)}")


def is_temporary(name: str) -> bool:
    """Whether a name is one of an unfinished file or folder."""
    return name.startswith((UNFINISHED, WHOLE))


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


def sync_all(path: Path) -> None:
    """`sync` for a file, or for a folder with everything in it."""
    for part in path.rglob("*") if path.is_dir() else ():
        sync(part)
    sync(path)


def write_file(path: Path, write: Callable[[Path], object], beside: Path | None = None) -> None:
    """Let `write` make a file in a folder of its own, as safetensors adds temporary names; then move it to `path`.

    `beside` is where that folder is made, where a kill must leave nothing in the folder of `path`.
    """
    with scratch((beside or path.parent) / path.name) as made:
        new = made / path.name
        write(new)
        new.chmod(0o644)
        sync(new)
        os.replace(new, path)
        sync(path.parent)


def write_atomically(path: Path, content: str | bytes, beside: Path | None = None) -> None:
    """Write a file: a reader sees the old content or the new, never half of one. `beside`: see `write_file`."""
    text = content.encode() if isinstance(content, str) else content
    write_file(path, lambda new: new.write_bytes(text), beside)


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary neighbour, then put it in the place of `folder`."""
    with explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = temporary(folder)
        new.mkdir()
        try:
            write(new)
            install(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def install(new: Path, folder: Path) -> None:
    """Put a finished folder in the place of another. A kill loses neither: `recover` completes what was begun."""
    for path in (new, *new.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    sync_all(new)
    whole = folder.with_name(WHOLE + folder.name)
    if whole.exists():
        _forward(whole, folder)
    os.rename(new, whole)
    sync(folder.parent)
    _forward(whole, folder)


def _forward(whole: Path, folder: Path) -> None:
    old = temporary(folder)
    if folder.exists():
        os.rename(folder, old)
    os.rename(whole, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file or folder, whole or not at all: what a kill leaves of it has a temporary name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    gone = path if path.name.startswith(UNFINISHED) else temporary(path)
    if gone != path:
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def refuse_pipes(folder: Path, error: type[HeadwiseError] = OutputError) -> None:
    """Refuse a folder that holds, at any depth, what is neither file nor folder: reading a pipe would never end."""
    for path in folder.rglob("*"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error(f"{path} is neither a file nor a folder; remove it, or restore the file that was there.")


def recover(folder: Path, work: tuple[str, ...] = ()) -> None:
    """Complete or undo what a kill interrupted in a folder; `work` are its subfolders in which to look as well."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(WHOLE):
            _forward(path, path.with_name(path.name.removeprefix(WHOLE)))
        elif is_temporary(path.name):
            remove(path)
    for name in work:
        _recover_below(folder / name)


def recover_one(path: Path) -> None:
    """`recover` for one file or folder whose neighbours are not ours."""
    ours = re.compile(re.escape(UNFINISHED + path.name) + r"\.[0-9a-f]{8}")
    for left in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if left.name == WHOLE + path.name:
            _forward(left, path)
        elif ours.fullmatch(left.name):
            remove(left)


def _recover_below(folder: Path) -> None:
    """`recover` at every depth of a folder in which all is ours: hidden names there are temporary ones."""
    for where, folders, files in os.walk(folder):
        recover(Path(where))
        for name in [name for name in (*folders, *files) if name.startswith(".")]:
            remove(Path(where, name))
        folders[:] = [name for name in folders if not name.startswith(".")]


def is_full(error: BaseException) -> bool:
    """Whether an error means that no space is left; safetensors and torch put that in a text alone."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(number) in str(error) or f"os error {number})" in str(error) for number in FULL)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into one line that says what to do."""
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        if is_full(error):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(errno.ENOSPC)
            raise OutputError(
                f"{folder} cannot be written ({reason}); free some space and run the same command again: it resumes."
            ) from None
        if isinstance(error, OSError):
            where, why = error.filename or folder, error.strerror or error
            raise OutputError(f"{where} cannot be read or written ({why}).") from None
        raise


@contextmanager
def scratch(path: Path) -> Iterator[Path]:
    """A folder beside `path` for short-lived files, and not where the system keeps temporary files."""
    made = temporary(path)
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
