"""Runs the notebooks in Jupyter and keeps their outputs (make notebooks): python notebooks/run.py [NAME ...]"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def main() -> None:
    """Run those that are named, or all; a notebook that fails is not written."""
    for path in [HERE / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        NotebookClient(book, timeout=1800, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
        for cell in book.cells:  # what a library warns of is not part of the lesson
            if "outputs" in cell:
                cell["outputs"] = [one for one in cell["outputs"] if one.get("name") != "stderr"]
        book.metadata.pop("widgets", None)
        book.metadata["language_info"] = {"name": "python"}  # not the version that it happened to run on
        nbformat.write(book, path)
        print(f"{path.name}: {len(book.cells)} cells")


if __name__ == "__main__":
    main()
