"""One measurement: `python -m ...gpu_check.work NAME OPTIONS`, options and figures as JSON, a figure per line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scripts.programs.gpu_check.work import measurement


def main(name: str, options: str) -> None:
    for figure in measurement(name)(json.loads(options)):
        print(json.dumps({"figure": asdict(figure)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
