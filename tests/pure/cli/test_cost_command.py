"""weft cost: dollars per million tokens, break-even, and how much of a load to own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.commands import refused_line, weft, weft_json
from weft.cli import main
from weft.planner.prices.api_prices import TokenUsage, find_quote, find_quotes, stated_quote
from weft.planner.prices.economics import RentedReplicas, cheapest_mix, rent_and_api_mix, replicas_for_peak

LLAMA = ["cost", "Llama-3.1-8B-Instruct", "--gpus", "2xL40S", "--price", "0.9"]
REPLICA = RentedReplicas(dollars_per_hour=2.0, requests_per_s=5.0, tokens_per_s=1000.0, replicas=1)


def said(*words: str) -> tuple[int, str, str]:
    return weft(*LLAMA, *words)


def told(*words: str) -> dict:
    status, found = weft_json(*LLAMA, *words)
    assert status == 0
    return found


def test_dollars_per_million_by_hand():
    # 2 dollars an hour, 1,000 tok/s: 3.6 M tokens an hour at full load.
    assert REPLICA.dollars_per_million(1.0) == pytest.approx(2.0 / 3.6)
    assert REPLICA.dollars_per_million(0.25) == pytest.approx(4 * 2.0 / 3.6)


def test_break_even_by_hand():
    # 18,000 requests an hour at a tenth of a cent are 18 dollars: a ninth of that pays the rent.
    assert REPLICA.break_even(0.001) == pytest.approx(1 / 9)
    # At break-even both cost the same.
    share = REPLICA.break_even(0.0002)
    own = REPLICA.dollars_per_million(share)
    api = 0.0002 * 1e6 * REPLICA.requests_per_s / REPLICA.tokens_per_s
    assert own == pytest.approx(api)


def test_a_mix_by_hand():
    found = rent_and_api_mix(REPLICA, 0.001, [1.0, 9.0], 1, 0.8)
    assert found.owned == pytest.approx((1 + 4) / 10)
    assert found.utilization == pytest.approx(2.5 / 5)
    assert found.rent_dollars == 2.0
    assert found.api_dollars == pytest.approx(2.5 * 3600 * 0.001)


rates = st.lists(st.floats(0.0, 200.0), min_size=1, max_size=30).filter(any)


@given(rates, st.floats(1e-6, 0.1), st.floats(0.05, 1.0))
def test_the_cheapest_mix_is_the_cheapest_of_all(demand, dollars, max_load):
    most = replicas_for_peak(REPLICA, demand, max_load)
    every = [rent_and_api_mix(REPLICA, dollars, demand, count, max_load).dollars for count in range(most + 1)]
    assert cheapest_mix(REPLICA, dollars, demand, max_load).dollars == pytest.approx(min(every))
    assert rent_and_api_mix(REPLICA, dollars, demand, most, max_load).api_dollars == pytest.approx(0, abs=1e-9)


def test_stated_prices():
    found = stated_quote((1.0, 4.0, 0.25), TokenUsage(1000, 400, 500))
    assert (found.input_dollars, found.cached_dollars, found.output_dollars) == pytest.approx((6e-4, 1e-4, 2e-3))
    assert stated_quote((1.0, 4.0), TokenUsage(1000, 400, 500)).dollars == pytest.approx(3e-3)


def test_quotes_agree_with_the_library():
    from genai_prices import Usage as Tokens
    from genai_prices import calc_price

    for ref, provider in (("gpt-4o-mini", "openai"), ("gemini-2.5-pro", "google")):
        found = find_quote(f"{provider}/{ref}", TokenUsage(300_000, 100_000, 500))  # beyond a tier's limit
        tokens = Tokens(input_tokens=300_000, cache_read_tokens=100_000, output_tokens=500)
        assert found.dollars == pytest.approx(float(calc_price(tokens, ref, provider_id=provider).total_price))
        assert 0 < found.cached_dollars < found.input_dollars


def test_whoever_sells_the_model():
    found = find_quotes("meta-llama/Llama-3.3-70B-Instruct", TokenUsage(1000, 0, 1000))
    assert len({it.provider for it in found}) == len(found) > 3
    assert [it.dollars for it in found] == sorted(it.dollars for it in found)
    assert all("llama-3.3-70b-instruct" in it.name.lower() for it in found)
    assert find_quotes("nobody/knows-this-model", TokenUsage(1000, 0, 1000)) == []


def test_json_hangs_together():
    found = told("--against", "gpt-4o-mini", "--api-price", "0.1/0.2", "--demand", "1,5,20", "--utilization", "0.25")
    assert found["dollars_per_hour"] == pytest.approx(1.8)
    assert found["dollars_per_million_tokens"] == pytest.approx(1.8e6 / 3600 / found["tokens_per_s"] / 0.25)
    named, own = found["apis"]
    assert named["dollars_per_request"] == pytest.approx((1024 * 0.15 + 1024 * 0.6) / 1e6)
    assert own["dollars_per_request"] == pytest.approx(1024 * 0.3 / 1e6)
    for api in found["apis"]:
        hourly = api["dollars_per_request"] * found["requests_per_s"] * 3600
        assert api["break_even_utilization"] == pytest.approx(1.8 / hourly)
        assert api["mixes"][0]["owned"] == 0 and api["mixes"][-1]["owned"] == pytest.approx(1)


def test_a_table_for_people():
    status, out, _ = said("--against", "gpt-4o-mini", "--demand", "3")
    assert status == 0
    assert "openai/gpt-4o-mini" in out and out.count("<- ") == 1


def test_demand_from_a_file(tmp_path: Path):
    path = tmp_path / "day.csv"
    path.write_text("hour,requests_per_s\n0,1\n1,2.5\n")
    found = told("--api-price", "1/1", "--demand", str(path))
    assert found["apis"][0]["mixes"][0]["api_dollars"] == pytest.approx(1.75 * 3600 * 2048 / 1e6)
    path.write_text("hour,requests_per_s\n0,1\n1,many\n")
    refused_line([*LLAMA, "--demand", str(path)], 2, "invalid-flag-value", f"{path} 3 'many'")


def test_a_model_that_does_not_fit():
    status, _, err = weft("cost", "Llama-3.3-70B-Instruct", "--gpus", "1xRTX4090", "--price", "1")
    assert status == 3 and "Llama-3.3-70B-Instruct" in err and err.count("\n") == 1


def test_replicas_that_share_their_experts_are_rented_together():
    """671 GB of DeepSeek on one of its sixteen GPUs is nothing to rent."""
    words = ["cost", "DeepSeek-V3", "--nodes", "2x8xH100", "--network", "400Gb", "--price", "2", "-ep", "-dp", "16"]
    words += ["--api-price", "5/10", "--demand", "1,2"]
    status, found = weft_json(*words)
    assert status == 0
    assert found["layout"] == "DP 16 x EP 16, fp8" and found["replicas"] == 1
    assert {it["rent_dollars"] for it in found["apis"][0]["mixes"]} <= {0.0, 32.0}
    status, out, _ = weft(*words)
    assert status == 0 and "1 replica (16 GPUs)" in out


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_cuts_no_figures(width, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main.main([*LLAMA, "--demand", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and "$/month" in shown and "break-even" in shown


def test_an_api_is_found_by_the_name_that_is_printed():
    usage = TokenUsage(1000, 0, 1000)
    for found in find_quotes("Llama-3.1-8B-Instruct", usage):
        printed = f"{found.provider}/{found.name.rpartition('/')[2]}"
        assert find_quote(printed, usage).provider == found.provider
