"""A model that is not on this machine: a mistyped folder is reported before anybody waits for a network."""

import difflib
import os
import re
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from headwise.errors import ModelError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SECONDS = 5.0  # that a hub may take to answer
GIVE = "Give a hub id, a folder, a .gguf file or 'embedded'."


def check(model: str) -> None:
    """Refuse what is no hub id, lies in a folder that is here, or is of a hub that does not answer."""
    path, hint = Path(model), _near(model)
    if path.is_absolute() or model.startswith((".", "~")) or not HUB_ID.fullmatch(model):
        raise ModelError(f"{model} does not exist.{hint} {GIVE}")
    if _is_cached(model):
        return
    if "/" in model and path.parent.is_dir():
        raise ModelError(f"{model} does not exist, though the folder {path.parent} does.{hint} {GIVE}")
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or "huggingface.co"
    if not _answers(host):
        raise ModelError(
            f"no folder {model} is here, and {host} cannot be reached to look for it there.{hint} "
            "Check the network, or give the folder of a model that is on this machine, a .gguf file or 'embedded'."
        )


def _near(model: str) -> str:
    """The folders beside it that hold a model and have nearly its name."""
    parent = Path(model).expanduser().parent
    if not parent.is_dir():
        return ""
    found = [path.name for path in parent.iterdir() if (path / "config.json").is_file() or path.suffix == ".gguf"]
    found += ["embedded"] if "/" not in model else []
    near = difflib.get_close_matches(Path(model).name, found, 3)
    return f" Did you mean {' or '.join(str(parent / name) for name in near)}?" if near else ""


def _is_cached(model: str) -> bool:
    """Whether the hub's client has the model's configuration on this machine."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # no name of a repository
        return False


@cache
def _answers(host: str) -> bool:
    """Whether a host can be reached. Behind a proxy that is not known, so the hub's client has to find out."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.create_connection((host, 443), SECONDS).close()
    except OSError:
        return False
    return True
