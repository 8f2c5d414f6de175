"""Runs the notebooks in Jupyter and keeps their outputs (make notebooks): python notebooks/run.py [NAME ...]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def tidy(book: Any) -> None:
    """Leave out what a library warned of, the text of what is drawn, and the Python that it happened to run on."""
    for cell in book["cells"]:
        outputs: list[Any] = []
        for one in cell.get("outputs", []):
            if one.get("name") == "stderr":
                continue
            if one.get("name") == "stdout" and outputs and outputs[-1].get("name") == "stdout":
                outputs[-1]["text"] += one["text"]
                continue
            if "text/html" in one.get("data", {}):
                one["data"]["text/plain"] = "".join(one["data"]["text/plain"]).partition("(")[0]
            outputs.append(one)
        if "outputs" in cell:
            cell["outputs"] = outputs
    book["metadata"].pop("widgets", None)
    book["metadata"]["language_info"] = {"name": "python"}


def main() -> None:
    """Run those that are named, or all; a notebook that fails is not written."""
    for path in [HERE / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        NotebookClient(book, timeout=1800, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
        tidy(book)
        nbformat.write(book, path)
        print(f"{path.name}: {len(book.cells)} cells")


if __name__ == "__main__":
    main()
