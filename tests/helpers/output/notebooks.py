"""Notebooks of the docs, run from top to bottom.

    python tests/helpers/output/notebooks.py docs/examples/first_steps.ipynb

runs one and stores it with its outputs (`make notebook`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

_LONGEST_TEXT = 200


class ThisPython(KernelSpecManager):
    """Kernels of the Python at hand, whatever is installed under their names."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, language="python", display_name="Python 3")


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of all its cells. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    NotebookClient(notebook, timeout=300, km=kernel).execute(cwd=str(folder))
    return notebook


def outputs(notebook: Any) -> list[tuple[str, dict[str, str]]]:
    """Per output in sequence, the kind and what it has by its type; streams as "text/plain"."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = dict(output.get("data", {"text/plain": output.get("text", "")}))
            found.append((output.output_type, data))
    return found


def main(path: Path) -> None:
    """Store what is worth it: pictures and tables, not the objects' long texts beside them."""
    notebook = executed(path, path.parent)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                text = re.sub(r"'\S*/tmp\w+", "'…", data["text/plain"])
                data["text/plain"] = text[:_LONGEST_TEXT] + " …" * (len(text) > _LONGEST_TEXT)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
