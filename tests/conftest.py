"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# No test judges by the clock: a slow machine is not a bug.
settings.register_profile("weft", deadline=None, print_blob=True)
settings.load_profile("weft")
