"""Processes that compile the Triton kernels for GPUs, which the interpreter of this one cannot."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """This process's, without TRITON_INTERPRET and with `scripts` to be imported from."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return given | {"PYTHONPATH": path}
