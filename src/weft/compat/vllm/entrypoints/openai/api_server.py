"""Entry point of `python -m vllm.entrypoints.openai.api_server --model MODEL [flags]`, the same as `weft serve`."""

from __future__ import annotations

import sys

from weft.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
