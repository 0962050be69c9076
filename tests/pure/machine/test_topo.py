"""weft topo: links, verdicts and advice, on machines with fake GPUs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.pure.fake_nvml import FakeNvml, bridged, eight_h100, old_driver, sliced, two_consumer_cards
from tests.pure.machines_with_gpus import Run
from weft.machine.hardware.gpus import find_gpu
from weft.machine.hardware.links import all_reduce_cost, send_cost

MACHINES = [None, two_consumer_cards, eight_h100, lambda: bridged((0, 2), (1, 3), count=4), sliced, old_driver]


def topo(run: Run) -> dict[str, Any]:
    status, out, _ = run("topo", "--json")
    assert status == 0 and out.count("\n") == 1
    report: dict[str, Any] = json.loads(out)
    assert report.keys() == {"devices", "links", "advice"}
    return report


def advice(report: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [entry["values"] for entry in report["advice"] if entry["code"] == code]


@pytest.mark.parametrize("machine", MACHINES)
def test_every_pair_is_listed_once(on: Callable[..., Run], machine: Callable[[], FakeNvml] | None) -> None:
    report = topo(on(machine and machine()))
    names = [device["name"] for device in report["devices"]]
    pairs = [(link["a"], link["b"]) for link in report["links"]]
    assert pairs == [(a, b) for number, a in enumerate(names) for b in names[number + 1 :]]
    assert all(entry["text"] and "{" not in entry["text"] for entry in report["advice"])


def test_the_advice_has_the_figures_of_the_planner(on: Callable[..., Run]) -> None:
    report = topo(on(eight_h100()))
    (tensor,), (pipeline,) = advice(report, "topo_tensor_parallel"), advice(report, "topo_pipeline")
    gpu = find_gpu("H100-SXM")
    one = all_reduce_cost(gpu, "nvlink", 8, 0.0, graphs=True).seconds(8192 * 2)
    assert tensor["sum_us"] == pytest.approx(one * 1e6, rel=0.05) and tensor["ranks"] == 8
    assert tensor["token_ms"] == pytest.approx(tensor["sum_us"] * 160 / 1e3)
    assert pipeline["send_us"] == pytest.approx(send_cost(gpu, "nvlink", 0.0).seconds(8192 * 2) * 1e6, rel=0.05)
    assert {link["kind"] for link in report["links"]} == {"NV18"}
    assert {link["bandwidth_Bps"] for link in report["links"]} == {1.234e10}


def test_groups_that_nvlink_joins(on: Callable[..., Run]) -> None:
    report = topo(on(bridged((0, 2), (1, 3), count=4)))
    assert [values["gpus"] for values in advice(report, "topo_domain")] == [[0, 2], [1, 3]]
    assert {link["peer_to_peer"] for link in report["links"]} == {"works", "through the host"}
    (tensor,) = advice(report, "topo_tensor_parallel")
    assert all(values["token_ms"] < tensor["token_ms"] for values in advice(report, "topo_domain"))


def test_faults_are_named(on: Callable[..., Run]) -> None:
    machine = bridged((0, 1), down=1)
    machine.cards = [dataclasses.replace(machine.cards[0], link_errors=(3, 0, 4, 0)), machine.cards[1]]
    report = topo(on(machine, pair01="nothing happened"))
    assert advice(report, "topo_faulty_pair") == [{"a": "cuda:0", "b": "cuda:1", "verdict": "hung"}]
    assert advice(report, "topo_links_down") == [{"gpu": gpu, "down": [0], "count": 4} for gpu in (0, 1)]
    # Every link of the first card has counted errors.
    assert advice(report, "topo_link_errors") == [{"gpu": 0, "link": link, "errors": 7} for link in range(4)]
    (narrow,) = advice(topo(on(two_consumer_cards())), "topo_narrow_slot")
    assert (narrow["lanes"], narrow["most"]) == (4, 16)


def test_links_that_were_not_measured(on: Callable[..., Run]) -> None:
    _, out, _ = on(two_consumer_cards())("topo", "--json", "--no-measure")
    (link,) = json.loads(out)["links"]
    assert link["bandwidth_Bps"] is None and link["peer_to_peer"] == "unsupported"


def test_the_words_of_weft_topo(on: Callable[..., Run], golden: Callable[[str, str], None]) -> None:
    pages = [on(machine and machine())("topo")[1] for machine in MACHINES]
    golden("topo.txt", "\n".join(line.rstrip() for page in pages for line in page.split("\n")))
