"""The one place that reads JSON files: any of them may be damaged, and every fault is an error of ours. No torch."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError, PlanError

LARGEST = 256 << 20  # bytes of a file
DEEPEST = 64  # lists and objects inside each other
INTEGER = 1 << 63  # larger ones fit nowhere
AGAIN = "restore it or run its stage again"


def regular(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> int:
    """The size of a file; a folder, a pipe or a device in its place is refused, so that reading never hangs."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as problem:
        raise error(f"{path} cannot be read ({_reason(problem)}); {advice}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path} is not a regular file; {advice}.")
    return found.st_size


def read_bytes(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> bytes:
    """The bytes of a regular file that is not too large."""
    if (size := regular(path, error, advice)) > LARGEST:
        raise error(f"{path} has {size:,} bytes, more than the {LARGEST:,} that are read; {advice}.")
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise error(f"{path} cannot be read ({_reason(problem)}); {advice}.") from None


def parse_json(raw: bytes | str, where: Path | str, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> Any:
    """What a text holds as JSON, with a limit on its depth."""
    try:
        text = raw if isinstance(raw, str) else raw.decode()
        data = json.loads(text)
        if "\\u" in text:
            json.dumps(data, ensure_ascii=False).encode()  # half a character cannot be written again
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not valid JSON ({_reason(problem)}); {advice}.") from None
    level, depth = [data], 0
    while level := [item for found in level for item in _inside(found)]:
        depth += 1
        if depth > DEEPEST:
            raise error(f"{where} is nested more than {DEEPEST} levels deep; {advice}.")
    return data


def read_json(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> Any:
    """What a JSON file holds."""
    return parse_json(read_bytes(path, error, advice), path, error, advice)


def read_object(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> dict[str, Any]:
    """What a JSON file holds, which must be an object."""
    data = read_json(path, error, advice)
    if not isinstance(data, dict):
        raise error(f"{path} must hold an object, not {shortened(data)}; {advice}.")
    return data


def shortened(value: Any) -> str:
    """A value for an error message, however large it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < INTEGER


def _inside(value: Any) -> list[Any]:
    """The lists and objects directly in a value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, (dict, list))]


def _reason(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "nested too deeply"
    return (isinstance(problem, OSError) and problem.strerror) or " ".join(str(problem).split())[:200]
