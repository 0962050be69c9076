"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# Triton reads it when it is imported: kernels run in its interpreter where there is no GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test judges by the clock: a slow machine is not a bug.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")
