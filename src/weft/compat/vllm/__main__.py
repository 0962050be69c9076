"""Entry point of `python -m vllm serve MODEL`. As `python -m weft.compat.vllm` it prints the folder for PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.cli.main import main

if __name__ == "__main__":
    if __package__ == "vllm":
        sys.exit(main())
    print(Path(__file__).parents[1])
