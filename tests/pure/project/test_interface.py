"""Version 0.1.0 compared with this one: commands and flags, the API's description, metrics, plans, error codes stay.

An intended change is a line in CHANGELOG.md, and the document written anew: pytest --update-golden.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pure.interface import documents, lost_parts

KEPT = Path(__file__).parents[2] / "data/compat/0.1.0"


async def test_nothing_is_lost(request: pytest.FixtureRequest) -> None:
    found = await documents()
    if request.config.getoption("--update-golden"):
        KEPT.mkdir(parents=True, exist_ok=True)
        for name, document in found.items():
            (KEPT / f"{name}.json").write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    kept = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")}
    assert set(kept) == set(found)
    lost = [f"{name}{line}" for name in kept for line in lost_parts(kept[name], found[name])]
    assert lost == [], "\n".join(lost[:40])


OLD: dict[str, Any] = {
    "flag": {"choices": ["a", "b"], "help": "a sentence"},
    "rows": [{"x": 1, "tok_s": 1.5}],
    "why": None,
}


@pytest.mark.parametrize(
    ("new", "lost"),
    [
        ({**OLD, "more": 1}, []),
        ({**OLD, "flag": {"choices": ["c", "b", "a"], "help": "another sentence", "short": "-f"}}, []),
        ({**OLD, "flag": {"choices": ["a"], "help": "a sentence"}}, ["/flag/choices: 'b' gone"]),
        ({**OLD, "rows": [{"x": 1, "tok_s": 2.5}, {"x": 7}]}, []),
        ({**OLD, "rows": [{"x": 2, "tok_s": 1.5}]}, ["/rows[0]/x: 2, was 1"]),
        (
            {**OLD, "rows": [{"x": True, "tok_s": None}]},
            ["/rows[0]/x: True, was 1", "/rows[0]/tok_s: None, was 1.5"],
        ),
        ({**OLD, "rows": []}, ["/rows: 0 members, were 1"]),
        ({"flag": None, "rows": OLD["rows"]}, ["/flag: NoneType, was an object", "/why: gone"]),
    ],
)
def test_what_counts_as_lost(new: dict[str, Any], lost: list[str]) -> None:
    assert sorted(lost_parts(OLD, new)) == sorted(lost)
