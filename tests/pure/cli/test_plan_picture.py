"""The picture of a plan: on a terminal, on a pipe, as a page; for one GPU and for a thousand."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.commands import weft
from weft.cli import glossary
from weft.cli.plan import outputs, view
from weft.cli.plan.picture import PARTS, numbers, picture

UNEVEN = "plan Qwen3-14B --gpus 1xRTX4090+1xRTX4080"
EVEN = "plan Llama-3.1-70B --gpus 4xA100 --price 2"
NODES = "plan Llama-3.1-405B --nodes 2x8xH100 --network 400Gb"
EXPERTS = "plan gpt-oss-120b --gpus 3xRTX5090 --engine vllm"
THOUSAND = "plan Llama-3.1-8B --nodes 125x8xH100"
IDLE = "plan Llama-3.1-8B --gpus 5xRTX4090 -tp 4 -dp 1 -pp 1"
DEEP = "plan Llama-3.1-70B --nodes 40x1xRTX4090 -tp 1 -dp 1"
UNFIT = "plan Llama-3.1-70B --gpus 1xH100"
ALL = (UNEVEN, EVEN, NODES, EXPERTS, THOUSAND, IDLE, DEEP, UNFIT)


def told(words: str) -> dict[str, Any]:
    """JSON of weft with --json."""
    found: dict[str, Any] = json.loads(printed(words))
    return found


@cache
def printed(words: str) -> str:
    return weft(*words.split(), "--json")[1]


def lines(words: str, out: io.TextIOBase | None = None) -> list[str]:
    out = out or io.StringIO()
    view.print_plan_text(told(words), out)  # type: ignore[arg-type]
    out.seek(0)
    return out.read().splitlines()


def drawn(words: str) -> list[str]:
    """The lines of the picture: from the legend up to the table."""
    all_of_it = lines(words)
    start = next(number for number, line in enumerate(all_of_it) if "█ weights" in line)
    return all_of_it[start : all_of_it.index("", start)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- what is drawn ---


@pytest.mark.parametrize("words", ALL)
def test_a_pipe_has_no_colours_and_the_picture_has_80_columns(words: str) -> None:
    got = lines(words)
    assert not any("\x1b" in line for line in got)
    if words is not UNFIT:
        assert max(map(len, drawn(words))) <= 80
        table = got[next(at for at, line in enumerate(got) if line.startswith("layout,")) :]
        assert max(map(len, table[: table.index("")])) <= 80


def test_a_bar_has_the_shares_of_the_memory() -> None:
    bars = [line for line in drawn(EVEN) if "█" in line][1:]
    assert len(bars) == 4
    row = told(EVEN)["best"]["ranks"][0]
    bar = re.search("[█▓▒░]+", bars[0])
    assert bar is not None
    for sign, part in zip("█▓▒░", ("weight", "kv", "other", "free"), strict=True):
        share = row[f"{part}_bytes"] / row["memory_bytes"]
        assert abs(bar[0].count(sign) / len(bar[0]) - share) < 1.5 / len(bar[0])
        assert f"{row[f'{part}_bytes'] / 1e9:.1f} GB" in bars[0]


def test_the_picture_has_the_layers_heads_and_experts_of_each_gpu() -> None:
    text = "\n".join(drawn(UNEVEN))
    assert re.search(r"GPU 0 RTX 4090, 25\.8 GB .* rank 0 .* 0-39 .* 0-24 .* 0-4$", text, re.MULTILINE)
    assert re.search(r"GPU 1 RTX 4080, 17\.2 GB .* rank 1 .* 0-39 .* 25-39 .* 5-7$", text, re.MULTILINE)
    assert "experts 43-85" in "\n".join(drawn(EXPERTS))


def test_the_links_are_drawn_and_told() -> None:
    assert any(re.match(r"4 GPUs .*\bNVLink, 300 GB/s", line) for line in drawn(EVEN)) and drawn(EVEN)[-2].startswith(
        "   "
    )
    assert sum(line.startswith("╠═ GPU") for line in drawn(EVEN)) == 3
    assert sum(line.startswith("├─ GPU") for line in drawn(UNEVEN)) == 1
    nodes = drawn(NODES)
    assert " NVLink " in nodes[-2] and " network " in nodes[-1]
    assert sum(line.startswith("node ") for line in nodes) == 2
    assert "PCIe" in drawn(EXPERTS)[-1] and "experts" in drawn(EXPERTS)[-1]


def test_the_words_of_pictures(golden: Callable[[str, str], None]) -> None:
    golden("picture.txt", "\n\n".join("\n".join(drawn(words)) for words in (EVEN, UNEVEN, EXPERTS, NODES, THOUSAND)))


def test_gpus_that_a_bridge_joins_are_named() -> None:
    plan = told(EVEN)
    plan["hardware"]["nodes"][0] |= {"link": "pcie", "link_Bps": 32e9, "bridged": [[0, 1], [2, 3]]}
    (rack,) = picture(plan)
    assert re.search(r"^4 GPUs .*\bPCIe, 32 GB/s .*\bNVLink .*\b0-1 and 2-3$", rack.title)


def test_a_cpu_is_drawn_by_its_name() -> None:
    plan = told(UNEVEN)
    for spec in plan["hardware"]["types"].values():
        spec["kind"] = "cpu"
    plan["hardware"]["nodes"][0] |= {"link": "memory", "link_Bps": 30e9}
    (rack,) = picture(plan)
    assert re.match(r"2 ranks .*\b30 GB/s", rack.title)
    assert [bar.title for bar in rack.bars] == ["RTX 4090", "RTX 4080"]


def test_a_thousand_gpus_take_a_few_lines() -> None:
    assert len(drawn(THOUSAND)) < 8
    text = "\n".join(drawn(THOUSAND))
    assert re.search(r"\b0-124, 125 .*: 8 GPUs .*\bNVLink", text) and "GPUs 0-7 H100-SXM" in text
    assert "ranks 0-999" in text
    # Forty stages, each on a node of its own, and none holds exactly what another does.
    assert len(drawn(DEEP)) < 30


def test_memory_that_others_hold_is_drawn() -> None:
    plan = told(EVEN)
    for row in plan["best"]["ranks"][:1]:
        row["held_bytes"] = row["free_bytes"]
    out = io.StringIO()
    view.print_plan_text(plan, out)
    assert "▚ in use" in out.getvalue() and out.getvalue().count("▚▚▚") == 1
    assert "in use" in outputs.html_page(plan) and "in use" not in outputs.html_page(told(EVEN))
    assert max(map(len, out.getvalue().splitlines()[4:16])) <= 80


def test_gpus_that_are_left_idle_are_drawn_too() -> None:
    text = "\n".join(drawn(IDLE))
    assert "GPU 4 RTX 4090, 25.8 GB · idle" in text


@pytest.mark.parametrize("words", [words for words in ALL if words is not UNFIT])
def test_every_gpu_and_rank_is_in_the_picture_once(words: str) -> None:
    plan = told(words)
    racks = picture(plan)
    gpus = [(node, number) for rack in racks for node in rack.nodes for bar in rack.bars for number in bar.numbers]
    assert len(gpus) == len(set(gpus)) == plan["hardware"]["gpus"]
    ranks = [row["rank"] for rack in racks for bar in rack.bars for row in bar.ranks]
    assert sorted(ranks) == list(range(len(plan["best"]["ranks"])))
    for bar in (bar for rack in racks for bar in rack.bars):
        assert sum(bar.parts.values()) == bar.memory_bytes
        for row in bar.ranks:
            assert {part: row[f"{part}_bytes"] for part in PARTS} == bar.parts
    assert sum(len(bar.ranks) for rack in racks for bar in rack.bars) == len(plan["best"]["ranks"])


def test_a_terminal_gets_colours_and_broken_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    got = lines(EVEN, Terminal())
    assert any("\x1b[" in line for line in got)
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in got) <= 80


def test_an_encoding_without_the_signs_gets_others() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    got = "\n".join(lines(EVEN, out))  # type: ignore[arg-type]
    assert "# weights" in got and "|= GPU 0" in got and "?" not in got


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4), st.integers(8, 80))
def test_shares_fill_the_bar(parts: list[int], length: int) -> None:
    cells = view.shares(parts, length)
    assert sum(cells) == length and min(cells) >= 0
    if sum(parts):
        assert all(bool(cell) or not part for cell, part in zip(cells, parts, strict=True))


@pytest.mark.parametrize(
    ("given", "told"),
    [([3], "3"), (range(8), "0-7"), ([0, 1, 4, 5], "0-1, 4-5"), ([0, 2, 4, 6, 8], "0 to 8")],
)
def test_numbers(given: list[int], told: str) -> None:
    assert numbers(given) == told


# --- the page ---


class Page(HTMLParser):
    """Content of a page; tags that do not match are an error."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.data: list[float] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "data":
            self.data.append(float(dict(attrs)["value"] or "nan"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def figures(value: Any) -> Iterator[float]:
    """Every number of a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from figures(part)
    elif isinstance(value, int | float):
        yield float(value)


@pytest.mark.parametrize("words", ALL)
def test_a_page_is_complete_in_itself(words: str) -> None:
    text = outputs.html_page(told(words))
    page = Page(text)
    assert text.startswith("<!doctype html>") and page.tags & {"script", "link", "img", "iframe", "object"} == set()
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "action", "background"} and not any(n.startswith("on") for n in names)
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text
    assert len(text) < 60_000


@pytest.mark.parametrize("words", ALL)
def test_every_figure_of_a_page_is_one_of_the_json(words: str) -> None:
    plan = told(words)
    page = Page(outputs.html_page(plan))
    known = set(figures(json.loads(json.dumps(plan)))) | {0.0}
    assert page.data and set(page.data) <= known
    must = {float(plan["model"]["params"]), *map(float, plan["model"]["weight_bytes_by_precision"].values())}
    for candidate in plan["candidates"]:
        must |= {float(candidate["kv_tokens"]), candidate["max_concurrency"]}
        must |= {candidate["predicted"][name] for name in ("ttft_s", "single_tok_s", "saturated_tok_s")}
        must |= {dollars for dollars in [candidate["dollars_per_million_tokens"]] if dollars is not None}
    for rank in plan["best"]["ranks"] if plan["best"] else []:
        must |= {float(rank[f"{part}_bytes"]) for part in ("weight", "kv", "other", "free", "memory")}
    assert must <= set(page.data)


@pytest.mark.parametrize("words", ALL)
def test_a_page_has_the_reasons_the_advice_and_the_sources(words: str) -> None:
    plan = told(words)
    text = " ".join(Page(outputs.html_page(plan)).text.split())
    parts = [it["reason"] for it in plan["rejected"]] + plan["advice"] + plan["notes"] + [plan["binding"]["text"]]
    sources = plan["provenance"]
    parts += [sources["model"], *sources["gpus"].values(), *sources["links"].values(), *sources["engine"].values()]
    for part in parts:
        assert " ".join(part.split()) in text, part


def test_a_page_explains_its_words_once_each() -> None:
    text = outputs.html_page(told(EVEN))
    titles = dict(re.findall(r'<abbr title="([^"]+)">([^<]+)</abbr>', text))
    explained = list(titles.values())
    assert {"tok/s", "tokens", "context", "TP", "TTFT", "rank", "NVLink", "KV"} <= set(explained)
    assert len(explained) == len(set(explained)) == text.count("<abbr")
    assert {term.meaning for term in glossary.terms()} >= set(map(html.unescape, titles))
    hostile = glossary.TermTooltips()("<b>TTFT</b> & TTFTs, q4_1+q8_0")
    assert str(hostile).startswith("&lt;b&gt;<abbr title=") and str(hostile).count("<abbr") == 2


def test_the_glossary_has_the_words_of_the_field() -> None:
    assert glossary.PAGE.read_text(encoding="utf-8") == glossary.page(), "run python -m weft.cli.docs"
    words = {term.name for term in glossary.terms()}
    assert words >= {"token", "prompt", "prefill", "decode", "TTFT", "TPOT", "ITL", "KV cache", "prefix cache"}
    assert words >= {"TP", "PP", "DP", "EP", "rank", "stage", "replica", "goodput", "preemption", "q4_1+q8_0"}
    spellings = [form for term in glossary.terms() for form in (term.name, *term.forms)]
    assert len(spellings) == len(set(spellings))


def test_a_narrow_page_stacks_its_tables() -> None:
    text = outputs.html_page(told(EVEN))
    assert "@media (max-width: 40rem)" in text and "content: attr(data-label)" in text
    cells = re.findall(r"<td[^>]*>", text)
    assert cells and all("data-label=" in cell for cell in cells)
    heads = [
        html.unescape(re.sub("<[^>]+>", "", head)).removesuffix(" *")
        for head in re.findall(r'<th scope="col">(.*?)</th>', text)
    ]
    labels = re.findall(r'<td data-label="([^"]*)"', text)
    assert set(labels) == set(heads) - {"layout"}


def test_a_page_escapes_every_name() -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(part) for key, part in value.items()}
        if isinstance(value, list):
            return [hostile(part) for part in value]
        return f'{value}<script>alert("&{value}")</script>' if isinstance(value, str) else value

    plan = told(EVEN)
    for name in ("nodes", "types"):  # these are looked up by name
        plan["hardware"][name] = json.loads(json.dumps(plan["hardware"][name]).replace("A100", "<b>A100"))
    for row in plan["best"]["ranks"]:
        row["gpu"] = "<b>A100"
    parts = {name: hostile(plan[name]) for name in ("model", "rejected", "advice", "notes", "binding", "provenance")}
    parts["candidates"] = hostile(plan["candidates"])
    page = Page(outputs.html_page({**plan, **parts}))
    assert not page.tags & {"script", "b>A100"} and "<script>alert(" in page.text and "<b>A100-80GB-SXM" in page.text


# --- the flag ---


def run(words: str) -> tuple[int, str, str]:
    return weft(*words.split())


def test_html_writes_a_file_beside_the_picture(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    status, out, err = run(f"{EVEN} --html {file}")
    assert status == 0
    assert told(EVEN)["best"]["name"] in out and err.split()[-1] == str(file)
    assert file.read_text().startswith("<!doctype html>")
    status, out, _ = run(f"{UNFIT} --html {file} --json")
    assert status == 3
    found = json.loads(out)
    assert found["best"] is None
    assert found["summary"] in html.unescape(re.sub(r"<[^>]*>", "", file.read_text()))


def test_html_goes_to_standard_output_for_a_dash() -> None:
    status, out, err = run(f"{EVEN} --html -")
    assert status == 0
    assert out.startswith("<!doctype html>") and out.endswith("</html>\n") and err == ""


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_best_layouts_are_readable_at_any_width(width: int) -> None:
    """Names are not broken into letters, and no figure is cut."""
    from rich.console import Console

    plan = told("plan Qwen3-30B-A3B --gpus 2xRTX4090+1xRTX3090 --price 0.4")
    out = io.StringIO()
    Console(file=out, width=width).print(view.comparison(plan, width))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= width
    best = plan["candidates"][0]
    for figure in (f"{best['kv_tokens']:,}", f"{best['dollars_per_million_tokens']:.2f}", "bf16"):
        assert figure in out.getvalue()
