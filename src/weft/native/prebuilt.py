"""`python -m weft.native.prebuilt`: `machine.native.build` under the name that images call."""

import sys

from weft.machine.native.build import main

if __name__ == "__main__":
    main(*sys.argv[1:])
