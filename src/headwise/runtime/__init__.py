"""The modules that reshaped models run on. The files need nothing of Headwise and are copied into saved models."""

from __future__ import annotations

import json
from pathlib import Path

from headwise.runtime.hub_headwise import FILES

CODE = FILES[0]  # the file that a configuration names


def foreign_code(folder: Path) -> str | None:
    """The first file of a model folder that could run and is not ours, byte for byte; None where there is none.

    What differs between architectures is data in `config.json`, so that the files are the same beside every model.
    A configuration may name no other code either, neither beside it nor in another repository.
    """
    own = {folder / name: (Path(__file__).parent / name).read_bytes() for name in FILES}
    for path in sorted(folder.rglob("*.py")):
        if path not in own or not path.is_file() or path.read_bytes() != own[path]:
            return path.relative_to(folder).as_posix()
    try:
        named = json.loads((folder / "config.json").read_bytes()).get("auto_map") or {}
        texts = [str(text) for text in named.values()]
    except (OSError, ValueError, AttributeError, RecursionError):
        return "config.json"
    ours = all(text.startswith(f"{Path(CODE).stem}.") and "--" not in text for text in texts)
    return None if ours else "config.json"
