"""A worker whose import takes for ever."""

import sys
import time

print("rank hangs in import", file=sys.stderr, flush=True)
time.sleep(600)
