"""`scripts/bench suite`: starts, batches, Python and the server of Weft alone, the figures of docs/benchmarks.md."""

import sys

from weft.study.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
