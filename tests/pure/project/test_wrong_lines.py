"""Wrong command lines of each command: one line on standard error, whose wording lies in tests/data/golden/errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pure.commands import refused_line
from tests.pure.wrong_lines import BY_COMMAND


@pytest.mark.parametrize("command", BY_COMMAND)
def test_mistakes_get_one_line(command: str, golden: Callable[[str, str], None]) -> None:
    lines = BY_COMMAND[command]
    golden(f"errors/{command}.txt", "".join(refused_line(*line) for line in lines))
