"""A child process that prints a line in two pieces, and ends within another line."""

from __future__ import annotations

import os
import sys
import time

from weft.engine.processes.launch import Parent

if __name__ == "__main__":
    parent = Parent(int(sys.argv[1]), None)
    os.write(1, b"first ")
    time.sleep(0.3)  # so that the two pieces are read one by one
    os.write(1, b"second\nthird")
    parent.exit()
