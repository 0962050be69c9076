"""`python -m weft.worker.process`, the name of ranks in lists of processes: `ranks.worker.process`."""

import sys

from weft.ranks.worker.process import main

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
