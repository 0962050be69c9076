"""The page of `weft top`: its tables at several widths, findings, and sparklines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.pure.cli.test_top import FINDING, MODEL, RANK, figures, look_at, printed
from weft.cli.top.cells import VERY_WIDE, WIDE, used_of
from weft.cli.top.sparks import POINTS, Sparks
from weft.cli.top.tables import page
from weft.cli.top.watch import TopSnapshot
from weft.monitor.figures import join_figures

PAIR = [RANK | {"rank": rank, "node": "rig", "stage": 0, "first_layer": 0, "delayed": 0.0} for rank in range(2)]
STORM = FINDING | {"code": "preemption_storm", "text": "lost caches", "ranks": [], "model": "m"}


def rows(text: str, section: str) -> list[str]:
    """The lines of a section, without its name and the line above its table."""
    return text.partition(f"\n{section}\n")[2].partition("\n\n")[0].splitlines()[1:]


def test_the_page_fits_any_width() -> None:
    snapshot = TopSnapshot(
        [("http://rig:8000", figures())], join_figures([figures()], None, 0.0), ["http://b: no answer"], {}
    )
    for width in (40, 80, 200):
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=False).print(page(snapshot, Sparks(), width))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for word in ("straggler", "--tensor-split", "no answer"):
            assert word in text


def test_ranks_and_findings_of_several_servers_have_their_url() -> None:
    servers = [("http://rig:8000", figures()), ("http://other:8001", figures(node="other", diagnosis=[]))]
    out = io.StringIO()
    snapshot = TopSnapshot(servers, join_figures([one for _, one in servers], None, 0.0), [], {})
    Console(file=out, width=200).print(page(snapshot, Sparks(), 200))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert any(line.startswith("▲ http://rig:8000: straggler: ") for line in lines)
    assert lines.index("rig:8000") < lines.index("other:8001"), "above their ranks"


def test_what_the_memory_of_a_gpu_is_used_for() -> None:
    rank = {**RANK, "node": "rig", "first_layer": 0, "weight_bytes": 7 << 30, "kv_bytes": 20 << 30}
    lines = printed(look_at(ranks=[rank]), 120).splitlines()
    (line,) = [line for line in lines if "python (7)" in line]
    assert line.split()[:8] == ["rig:0", "64.0", "GiB", "80.0", "GiB", "████████░░", "80%", "7.0"]
    assert "20.0 GiB" in line and "python (7) 1.0 GiB" in line


def test_the_parts_of_a_step_are_a_bar() -> None:
    rank = {**RANK, "compute": 0.5, "communication": 0.25, "waiting": 0.25, "first_layer": 4, "layers": 26}
    text = printed(
        look_at(ranks=[rank, rank | {"rank": 1, "compute": None, "communication": None, "waiting": None}]), 120
    )
    assert "██████████▒▒▒▒▒····· " in text and "4-29 (26)" in text
    assert "idle" in text, "a rank without a step in the last seconds"
    assert "▒" not in printed(look_at(ranks=[]), 120)


def test_sparklines_come_with_the_second_look_on_a_wide_page() -> None:
    sparks, snapshot = Sparks(), look_at()
    sparks.add(snapshot)
    assert "██ " not in printed(snapshot, VERY_WIDE, sparks)
    sparks.add(snapshot)
    assert "██ " in printed(snapshot, VERY_WIDE, sparks) and "██ " not in printed(snapshot, WIDE - 1, sparks)


def test_the_share_without_a_core_has_a_column_if_there_is_one() -> None:
    slow = [PAIR[0], PAIR[1] | {"delayed": 0.57}]
    for width in (80, WIDE, VERY_WIDE):
        text = printed(look_at(ranks=slow), width)
        assert "no core" in text and [line.count("57%") for line in rows(text, "Ranks")[:2]] == [0, 1]
        assert max(map(len, text.splitlines())) <= width
    assert "no core" not in printed(look_at(ranks=PAIR), 120)
    assert "no core" not in printed(look_at(ranks=[RANK]), 120), "an older server does not tell"


def test_the_rank_that_a_finding_names_has_a_sign() -> None:
    slow = FINDING | {"ranks": [1], "model": "m", "follows_from": None}
    text = printed(look_at(ranks=PAIR, diagnosis=[slow]), 120)
    assert [line.lstrip().startswith("▲ ") for line in rows(text, "Ranks")] == [False, True]
    assert not rows(text, "Models")[0].lstrip().startswith("▲"), "it is the rank's fault"
    waits = slow | {"code": "allreduce_wait", "ranks": [0], "follows_from": "straggler"}
    text = printed(look_at(ranks=PAIR, diagnosis=[waits, slow]), 120)
    assert [line.lstrip().startswith("▲ ") for line in rows(text, "Ranks")] == [False, True], "rank 0 only waits"


def test_the_model_of_a_fault_of_its_requests_has_a_sign() -> None:
    servers = [
        ("http://a:1", figures(diagnosis=[STORM])),
        ("http://b:2", figures(diagnosis=[], models=[MODEL | {"layout": None}])),
    ]
    text = printed(TopSnapshot(servers, join_figures([one for _, one in servers], None, 0.0), [], {}), 120)
    first, second = rows(text, "Models")
    assert first.startswith(" ▲ m at a:1 ") and second.startswith("   m at b:2 ")
    assert "▲" not in "".join(rows(text, "Ranks"))


def test_a_finding_that_follows_from_another_is_no_second_fault() -> None:
    full = FINDING | {"code": "kv_starved", "text": "no room", "follows_from": None}
    text = printed(look_at(diagnosis=[STORM | {"follows_from": "kv_starved"}, full]), 120)
    lines = [line.strip() for line in text.partition("\nDiagnosis\n")[2].splitlines()]
    assert lines == [
        "▲ kv_starved: no room",
        "remedy: --tensor-split 2,1",
        "└ preemption_storm follows from kv_starved: lost caches",
        "remedy if it remains: --tensor-split 2,1",
    ]


def test_the_layout_and_the_cache_of_a_model() -> None:
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4, "expert_parallel": 8}
    model = MODEL | {"layout": sizes, "kv_usage": 0.3, "kv_used_bytes": 1.2e9, "kv_size_bytes": 4e9}
    for width in (WIDE, VERY_WIDE):
        first, second = rows(printed(look_at(models=[model]), width), "Models")
        assert "30%" in first and "TP2 PP3 DP4 EP8" in second and "1.2 of 4.0 GB" in second
    (only,) = rows(printed(look_at(), WIDE), "Models")
    assert "50%" in only, "an older server tells neither"


@pytest.mark.parametrize(
    ("used", "size", "words"),
    [(1.2e9, 4e9, "1.2 of 4.0 GB"), (120e6, 4e9, "120 MB of 4.0 GB"), (0, 24e6, "0 of 24 MB")],
)
def test_bytes_in_use(used: float, size: float, words: str) -> None:
    assert used_of(used, size) == words


def snapshots(count: int, apart_s: float, **more: Any) -> Sparks:
    """The lines after several looks at a server."""
    sparks = Sparks()
    for number in range(count):
        snapshot = look_at(models=[MODEL | {"tok_s": 10.0 * number}], **more)
        snapshot.figures["time"] = apart_s * number
        sparks.add(snapshot)
    return sparks


def test_the_time_and_the_scale_of_sparklines() -> None:
    first, second = rows(printed(look_at(), 140, snapshots(5, 2.0)), "Models")
    assert first.rstrip().endswith("█") and second.rstrip().endswith("0 to 40 tok/s")
    text = printed(look_at(), 140, snapshots(5, 2.0))
    assert "use 0 to 100%, last 8 s" in text and "tok/s, last 8 s" in text
    assert snapshots(2 * POINTS, 5.0).window == "last 2 min", "older values are forgotten"


def test_a_line_has_no_values_of_before_its_time() -> None:
    sparks = snapshots(3, 2.0)
    for number in range(3, POINTS + 2):
        away = TopSnapshot([], join_figures([], None, 2.0 * number), [], {})
        sparks.add(away)
    assert sparks.values("tok http://rig:8000 m") == [20.0], "of the last looks, one had it"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"ranks": [RANK | {"delayed": 0.76}]}, "76%"),
        ({"models": [MODEL | {"kv_usage": 0.97}]}, "97%"),
        ({"ranks": [RANK | {"delayed": 0.1}]}, "Nothing found"),
    ],
    ids=str,
)
def test_what_the_tables_show_is_not_called_nothing(more: dict[str, Any], word: str) -> None:
    """A finding needs seconds; until then the page does not contradict itself."""
    said = printed(look_at(diagnosis=[], **more), 120).partition("\nDiagnosis\n")[2]
    assert word in said and ("Nothing found" in said) == (word == "Nothing found")


@pytest.mark.parametrize("width", [60, 80, 100, WIDE, 160])
def test_columns_are_left_out_and_never_cut(width: int) -> None:
    name = "SmolLM2-135M-Instruct"
    snapshot = look_at(ranks=[RANK | {"delayed": 0.3}], models=[MODEL | {"name": name, "kv_usage": 0.3}])
    text = printed(snapshot, width)
    assert all(len(line) <= width for line in text.splitlines())
    heads = [line for line in text.splitlines() if line.strip().startswith(("model ", "rank "))]
    assert len(heads) == 2
    known = (
        "model run running wait waiting KV used cache hits prefix TTFT p50/p95 ITL tok/s rank stage layers weights size"
    )
    known += " █ ▒ · comp comm compute communication no core share of a step"
    assert {word for head in heads for word in head.split()} <= set(known.split())
    assert all(word in "".join(heads) for word in ("model", "tok/s", "rank", "comp"))
    assert name in "".join(line.strip().split(" ")[0] for line in text.splitlines()), "folded if need be, but there"
