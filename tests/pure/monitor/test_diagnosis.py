"""Diagnosis rules: each on the fault that it is for, with its figure and remedy, and silent where there is none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.pure.fake_nvml import Card, FakeNvml
from tests.pure.machines import MEASURED, host
from tests.pure.shapes import SMOLLM2
from tests.pure.worlds import PLAN
from tests.refusals import has_values
from weft.api.observe.monitoring import PrefixCount
from weft.engine.core.commands import TIMES
from weft.engine.core.identity import RequestIdentity
from weft.engine.core.params import SamplingParams
from weft.engine.core.request import Request, Stats
from weft.engine.core.token_ids import TokenIds
from weft.machine.hardware import nvml
from weft.machine.hardware.gpu_figures import GpuFigures, GpuSampler
from weft.machine.hardware.topology import Holder
from weft.monitor import gpus
from weft.monitor.finding import LIMITS, Change, Code, Finding
from weft.monitor.history import GpuMoment, Histogram, History, RankCounters, Snapshot, growing, weights_of
from weft.monitor.price import Figure, add_prices, freed_tokens, with_figure
from weft.monitor.restart import small_ratio
from weft.monitor.rules import CODES, diagnose
from weft.monitor.stage_rules import balanced_layers, describe_stages
from weft.plan.parallelism import Parallelism
from weft.plan.places import cut_places
from weft.plan.plan import Plan
from weft.planner.execution.forecast import forecast_plan

EVEN = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1, 1], [30])))
STAGES = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1], [20, 10])))
STEPS = 1000


def counters(rank: int, compute_s: float, communication_s: float | None = 0.5, waiting_s: float = 0.0) -> RankCounters:
    """A rank after STEPS steps, without pauses between them."""
    return RankCounters(
        rank=rank,
        replica=0,
        local_rank=rank,
        node="here",
        steps=STEPS,
        compute_s=compute_s,
        communication_s=communication_s,
        waiting_s=waiting_s + 10.0,
        idle_s=10.0,
    )


def history(plan: Plan, *moments: Snapshot, **fields: Any) -> History:
    """Moments ten seconds apart, the first before any work."""
    snapshots = (Snapshot(time_s=0.0, ranks=tuple(map(unused, moments[-1].ranks)), stats=(Stats(),)), *moments)
    return History(plans=(plan,), weights=weights_of((plan,)), snapshots=snapshots, **fields)


def unused(rank: RankCounters) -> RankCounters:
    return replace(rank, steps=0, **dict.fromkeys(TIMES, 0.0))


def ranks_of(plan: Plan, *ranks: RankCounters) -> list[Finding]:
    return diagnose(history(plan, Snapshot(time_s=10.0, ranks=ranks, stats=(Stats(steps=STEPS),))))


def loads(plan: Plan, *stats: Stats, **fields: Any) -> list[Finding]:
    """Stats at several moments, ten seconds apart."""
    caching = fields.pop("caching", True)
    moments = [Snapshot(time_s=10.0 * (1 + at), stats=(one,), **fields) for at, one in enumerate(stats)]
    return diagnose(history(plan, *moments, caching=caching))


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


# --- ranks ---


def test_ranks_that_wait_for_each_other_a_little_are_healthy() -> None:
    assert ranks_of(EVEN, counters(0, 5.0, 0.5, 0.5), counters(1, 4.6, 0.5, 0.9)) == []
    assert ranks_of(STAGES, counters(0, 5.0), counters(1, 4.8, waiting_s=0.2)) == [], "the second stage has the head"


def test_a_rank_that_is_slowed() -> None:
    (finding,) = ranks_of(EVEN, counters(0, 3.0, 0.5, 6.0), counters(1, 9.0, 0.5, 0.0))
    assert finding.code == "straggler" and finding.value == pytest.approx(9.5 / 3.5) and finding.ranks == (1,)
    # SmolLM2 has three KV heads: a stage is cut in these.
    assert re.search(r"\brank 1 on here\b.*, or restart with --tensor-split 2,1$", finding.remedy)


def test_a_rank_whose_core_others_use() -> None:
    """It computes as fast as the other one whenever it has the core, and then waits for it as long."""
    well, slow = counters(0, 3.5, 2.0, 4.5), replace(counters(1, 3.1, 2.8, 4.1), delayed_s=4.0)
    (finding,) = ranks_of(EVEN, well, slow)
    assert finding.code == "straggler" and finding.value == pytest.approx(0.4) and finding.ranks == (1,)
    assert "rank 1" in finding.text and re.search(r"\bcore 1 of here, where rank 1 runs$", finding.remedy)
    both = ranks_of(EVEN, replace(well, delayed_s=3.5), slow)
    assert codes(both) == ["allreduce_wait"], "the cores of both are in use by others"
    assert "straggler" not in codes(ranks_of(EVEN, well, replace(slow, delayed_s=2.0)))


def test_an_uneven_split_of_equal_ranks() -> None:
    uneven = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1, 2], [30])))
    weights = weights_of((uneven,))[0]
    slow, fast = (one / 1e7 for one in (max(weights), min(weights)))
    (finding,) = ranks_of(uneven, counters(0, fast, 0.1, slow - fast), counters(1, slow, 0.1, 0.0))
    assert finding.code == "straggler" and finding.change is not None
    assert finding.change.parallelism.tensor_split == (1, 1) and "rank 1" not in finding.remedy, "the device is well"


def test_a_split_for_unequal_devices_is_healthy() -> None:
    assert ranks_of(PLAN, counters(0, 5.0, 0.5, 0.0), counters(1, 4.8, 0.5, 0.2)) == []


def test_steps_that_are_sums() -> None:
    (finding,) = ranks_of(EVEN, counters(0, 2.0, 3.0, 1.0), counters(1, 2.2, 3.0, 0.8))
    assert finding.code == "allreduce_wait" and finding.value == pytest.approx(3.8 / 6)
    assert finding.remedy == "restart with --tensor-parallel-size 1 --pipeline-parallel-size 2"
    assert finding.ranks == (0, 1)


def test_a_fault_of_one_rank_is_no_fault_of_the_sums() -> None:
    found = ranks_of(EVEN, counters(0, 2.0, 0.2, 18.0), counters(1, 20.0, 0.2, 0.0))
    assert codes(found) == ["straggler"]


def test_stages_of_unequal_time() -> None:
    (finding,) = ranks_of(STAGES, counters(0, 8.0), counters(1, 4.0, waiting_s=4.0))
    # SmolLM2's head is as much work as 8 layers: the second stage does 18 units of work in 4 s.
    assert finding.code == "stage_imbalance" and finding.remedy == "restart with --pipeline-split 13,17"
    assert finding.stage == 0 and finding.ranks == (0,)
    assert finding.value == pytest.approx(1 - (17 + 8) * 4 / 18 / 8, abs=0.01)


def test_a_last_stage_that_is_busy_with_the_head() -> None:
    """26 layers and 4, at the same speed: by the time per layer of each stage, nothing could be gained."""
    short = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1], [26, 4])))
    (finding,) = ranks_of(short, counters(0, 2.6), counters(1, 1.2))
    assert finding.code == "stage_imbalance" and finding.remedy == "restart with --pipeline-split 19,11"


def test_ranks_with_little_work_tell_nothing() -> None:
    slow = counters(0, 9.0), counters(1, 3.0)
    assert codes(ranks_of(EVEN, *slow)) == ["straggler"]
    assert ranks_of(EVEN, *(replace(rank, steps=LIMITS.steps - 1) for rank in slow)) == []
    assert ranks_of(EVEN, *(replace(rank, compute_s=rank.compute_s / 1000) for rank in slow)) == []
    assert diagnose(History(plans=(EVEN,), weights=weights_of((EVEN,)), snapshots=(Snapshot(time_s=0.0),))) == []


def test_ranks_whose_exchanges_are_not_told_apart() -> None:
    assert ranks_of(EVEN, *(counters(rank, 5.0, None, 4.0) for rank in range(2))) == []


@pytest.mark.parametrize(
    ("weights", "units", "split"),
    [
        ([1, 1], 8, (1, 1)),
        ([1.02, 1], 8, (1, 1)),
        ([5, 4], 64, (5, 4)),
        ([2.1, 1], 3, (2, 1)),
        ([1, 1], 1, ()),
        ([3, 1, 1], 8, (3, 1, 1)),
    ],
)
def test_small_ratios(weights: list[float], units: int, split: tuple[int, ...]) -> None:
    assert small_ratio(weights, units=units) == split


def test_layers_of_stages() -> None:
    assert balanced_layers(30, [1.0, 1.0], head=0.0) == (15, 15)
    assert balanced_layers(30, [2.0, 1.0], head=0.0) == (10, 20)
    assert balanced_layers(30, [1.0, 1.0], head=4.0) == (17, 13)
    assert sorted(balanced_layers(4, [1.0, 1.0, 1.0], head=0.0)) == [1, 1, 2]


def test_the_head_may_explain_the_time_of_the_last_stage() -> None:
    even = describe_stages((19, 11), (19.0, 19.0), (0.0, 8.0))
    assert even.head == pytest.approx(8.0) and even.units == pytest.approx((1.0, 1.0))
    prompts = describe_stages((19, 11), (19.0, 11.0), (0.0, 8.0))
    assert prompts.head == 0.0 and prompts.units == pytest.approx((1.0, 1.0))
    assert prompts.gain((15, 15), 8.0) < 0 < prompts.gain((15, 15), 0.0) and prompts.best_split() == (19, 11)
    slow = describe_stages((19, 11), (19.0, 38.0), (0.0, 8.0))
    assert slow.head == 8.0 and slow.units == pytest.approx((1.0, 2.0)), "no head is that much work"
    uneven = describe_stages((26, 4), (26.0, 9.0), (0.0, 8.0))
    assert uneven.head == pytest.approx(5.0)
    assert sum(uneven.best_split()) == 30 and uneven.best_split() in ((18, 12), (17, 13))
    # A head that is more work than the stages' times say leaves enough to gain.
    heavy = describe_stages((26, 4), (98.0, 54.0), (0.0, 13.0))
    assert heavy.best_split() == (20, 10) and heavy.gain((20, 10), heavy.head) > 1.4 * LIMITS.imbalance


def prompted(plan: Plan, prompt_tokens: int, *ranks: RankCounters) -> list[Finding]:
    """Findings after STEPS steps with so many tokens of prompts."""
    stats = Stats(steps=STEPS, prompt_tokens=prompt_tokens)
    return diagnose(history(plan, Snapshot(time_s=10.0, ranks=ranks, stats=(stats,))))


def test_long_prompts_do_not_make_a_good_split_a_bad_one() -> None:
    """The last stage has fewer layers because of the head, and nothing to do for it in a long prompt."""
    good = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1], [19, 11])))
    assert prompted(good, 100 * STEPS, counters(0, 1.9), counters(1, 1.1)) == []
    assert prompted(good, 0, counters(0, 1.9), counters(1, 1.9)) == []
    uneven = replace(PLAN, places=tuple(cut_places(SMOLLM2, [1], [26, 4])))
    for last_s, split in ((0.5, "16,14"), (0.9, "18,12"), (1.2, "19,11")):
        (finding,) = prompted(uneven, 100 * STEPS, counters(0, 2.6), counters(1, last_s))
        assert finding.code == "stage_imbalance" and finding.remedy == f"restart with --pipeline-split {split}"
    (slow,) = prompted(good, 100 * STEPS, counters(0, 1.9), counters(1, 6.0))
    assert slow.code == "stage_imbalance", "a device that is slow whatever the head is"


# --- requests ---

FULL = Stats(running=3, waiting=5, blocks_used=98, blocks_total=100)


def grown(stats: Stats, starved: float = 0.0, **fields: Any) -> list[Stats]:
    """Three moments, of which the counters grow; in a share of the steps the cache had no room for the next request."""
    return [
        replace(stats, steps=STEPS * number, starved_steps=int(starved * STEPS) * number, **fields)
        for number in (1, 2, 3)
    ]


def test_a_cache_without_room() -> None:
    (finding,) = loads(EVEN, *grown(FULL, starved=0.9))
    assert finding.code == "kv_starved" and finding.value == pytest.approx(0.9)
    block = max(EVEN.block_bytes(rank) for rank in range(2))
    assert finding.change == Change(requests=(3, 8))
    (size,) = [int(word) for word in finding.remedy.split() if word.isdigit() and int(word) > block]
    assert size == 33 * 8 * block, "33 blocks for each of eight requests"


def test_room_that_is_kept_for_requests_that_run() -> None:
    (finding,) = loads(EVEN, *grown(replace(FULL, blocks_used=70), starved=0.9))
    assert finding.code == "kv_starved" and re.search(r"\b5\b", finding.text)


@pytest.mark.parametrize(
    "changed",
    [{"waiting": 0}, {"starved_steps": 10}, {"steps": 0}],
    ids=["nobody waits", "there is room", "no steps"],
)
def test_a_cache_that_is_well_used(changed: dict[str, Any]) -> None:
    assert loads(EVEN, *(replace(one, **changed) for one in grown(FULL, starved=0.9))) == []


def test_a_moment_is_no_fault() -> None:
    first, second, third = grown(FULL, starved=0.9)
    assert loads(EVEN, first, replace(second, waiting=0), third) == []
    assert loads(EVEN, FULL) == [], "of the time before nothing is known"


def test_requests_that_lose_their_cache_again_and_again() -> None:
    stats = [replace(one, preemptions=10 * number) for number, one in enumerate(grown(FULL), 1)]
    found = {finding.code: finding for finding in loads(EVEN, *stats)}
    assert found["preemption_storm"].value == pytest.approx(10.0)
    assert found["preemption_storm"].remedy.startswith("restart with --max-num-seqs 2,")
    few = [replace(one, preemptions=number) for number, one in enumerate(grown(FULL), 1)]
    assert "preemption_storm" not in codes(loads(EVEN, *few))


def test_few_requests_at_once_beside_a_free_cache() -> None:
    narrow = Stats(running=8, waiting=9, blocks_used=20, blocks_total=100)
    (finding,) = loads(EVEN, *grown(narrow))
    assert finding.code == "batch_small" and finding.remedy == "restart with --max-num-seqs 17"
    assert finding.value == pytest.approx(0.8)
    assert loads(EVEN, *grown(replace(narrow, running=7))) == [], "other limits than --max-num-seqs"
    assert loads(EVEN, *grown(replace(narrow, blocks_used=60))) == []


def test_common_prefixes_without_hits() -> None:
    fields = {"prompts": 100, "repeated_prompts": 90, "repeated_tokens": 90 * 64}
    (finding,) = loads(EVEN, *grown(Stats()), caching=False, **fields)
    assert finding.code == "prefix_unused" and "--enable-prefix-caching" in finding.remedy
    hits = grown(Stats(prefix_queries=10_000, prefix_hits=80 * 64))
    assert loads(EVEN, *hits, **fields) == []
    assert loads(EVEN, *grown(Stats()), **fields | {"repeated_prompts": 10, "repeated_tokens": 640}) == []


def test_only_prompts_that_could_share_blocks_count_as_repeated() -> None:
    count = PrefixCount(4)

    def add(**fields: Any) -> tuple[int, int]:
        params = SamplingParams(prompt_logprobs=fields.pop("prompt_logprobs", None))
        count.add(Request(id="a", prompt=TokenIds.pack([*range(8)]), params=params, **fields))
        return count.prompts, count.repeated

    assert add() == (1, 0)
    assert add(prompt_logprobs=0) == (1, 0), "it is computed from its first token on"
    assert add(identity=RequestIdentity(cache_salt="a")) == (2, 0)
    assert add(identity=RequestIdentity(cache_salt="b")) == (3, 0)
    assert add(identity=RequestIdentity(cache_salt="b")) == (4, 1)
    assert add() == (5, 2)


# --- GPUs and clients ---


def gpu_history(moment: GpuMoment) -> History:
    moments = [Snapshot(time_s=10.0 * at, stats=(Stats(),), gpus=(moment,)) for at in (1, 2, 3)]
    return history(EVEN, *moments)


def figures(**fields: Any) -> GpuFigures:
    return GpuFigures(index=0, name="card", memory_total_bytes=80 << 30, **fields)


def test_a_gpu_whose_clock_is_low() -> None:
    slow = GpuMoment(figures=figures(throttle=("temperature",), sm_clock_mhz=900), most_clock_mhz=1980)
    (finding,) = diagnose(gpu_history(slow))
    assert finding.code == "throttled" and finding.value == pytest.approx(900 / 1980) and "airflow" in finding.remedy
    capped = replace(slow, figures=figures(throttle=("power cap",), sm_clock_mhz=900, power_limit_w=350.0))
    has_values(diagnose(gpu_history(capped))[0].remedy, "--power-limit", "350 W")
    assert diagnose(gpu_history(replace(capped, most_clock_mhz=1000))) == [], "a cap that takes a tenth"
    assert diagnose(gpu_history(replace(slow, figures=figures(sm_clock_mhz=210)))) == [], "an idle card"


def test_memory_of_other_processes() -> None:
    held = GpuMoment(figures=figures(), holders=(Holder(7, "game", 8 << 30), Holder(8, "us", 60 << 30)))
    own = replace(held, own=frozenset({8}))
    (finding,) = diagnose(gpu_history(own))
    assert finding.code == "foreign_memory" and finding.value == pytest.approx(0.1)
    assert "game (7)" in finding.text and "us (8)" not in finding.text and finding.change is not None
    tokens = freed_tokens(finding.change, EVEN)
    assert tokens == (8 << 30) // max(EVEN.block_bytes(rank) for rank in range(2)) * EVEN.block_size
    cached = Stats(blocks_total=tokens // EVEN.block_size // 2)  # half as much as the others' memory would hold
    past = history(EVEN, Snapshot(time_s=10.0, stats=(cached,)))
    (priced,) = add_prices([finding], past, lambda replica: None)
    assert priced.remedy == f"{finding.remedy} (+200% KV cache at most, by the planner)"
    (unpriced,) = add_prices([finding], gpu_history(own), lambda replica: None)
    assert unpriced.remedy == finding.remedy, "there is no cache yet"
    assert diagnose(gpu_history(replace(held, own=frozenset({7, 8})))) == []


def test_processes_of_another_namespace_are_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("NVIDIA L4", "0000:01:00.0", computing=[(77, 1 << 30), (78, 2 << 30)])
    FakeNvml([card]).install(monkeypatch)
    driver = nvml.probe_driver(None)
    with nvml.open_nvml() as session:
        sampler = GpuSampler(session, driver.gpus)
        for family, foreign in (({77}, [78]), ({5}, [])):
            monkeypatch.setattr(gpus, "own_pids", lambda family=family: frozenset(family))
            (moment,) = gpus.sample_moments(sampler, sampler.sample())
            assert [holder.pid for holder in moment.foreign] == foreign
            assert moment.most_clock_mhz == card.cores_mhz


def test_a_card_that_is_hot_and_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's figures of such a card, and of one that is well."""
    card = Card("NVIDIA L4", "0000:01:00.0", cores_mhz=2000, computing=[(77, 4 << 30), (78, 2 << 30)])
    hot = dataclasses.replace(card, cores_now_mhz=900, throttle=0x40, temperature_c=91)
    monkeypatch.setattr(gpus, "own_pids", lambda: frozenset({77}))

    def diagnosed(card: Card) -> list[Finding]:
        FakeNvml([card]).install(monkeypatch)
        with nvml.open_nvml() as session:
            sampler = GpuSampler(session, nvml.probe_driver(None).gpus)
            moments = [tuple(gpus.sample_moments(sampler, sampler.sample())) for _ in range(3)]
        snapshots = [Snapshot(time_s=10.0 * at, stats=(Stats(),), gpus=gpu) for at, gpu in enumerate(moments, 1)]
        return diagnose(history(EVEN, *snapshots))

    slow, foreign = diagnosed(hot)
    assert (slow.code, foreign.code) == ("throttled", "foreign_memory")
    assert slow.value == pytest.approx(900 / 2000) and "airflow" in slow.remedy
    assert foreign.value == pytest.approx(2 / 24) and "78" in foreign.text and "77" not in foreign.text
    assert diagnosed(dataclasses.replace(card, cores_now_mhz=1900, computing=[(77, 4 << 30)])) == []


def test_a_client_that_does_not_read() -> None:
    (finding,) = diagnose(history(EVEN, Snapshot(time_s=10.0, stats=(Stats(),), unread_s=(30.0, 1.0))))
    assert finding.code == "slow_client" and finding.value == 30.0
    assert diagnose(history(EVEN, Snapshot(time_s=10.0, stats=(Stats(),), unread_s=(1.0,)))) == []


# --- the history ---


def test_a_history_forgets() -> None:
    kept: tuple[Snapshot, ...] = ()
    for second in range(0, 200, 5):
        kept = growing(kept, Snapshot(time_s=float(second)), 60.0)
    assert kept[0].time_s <= 195.0 - 60.0 and kept[-1].time_s == 195.0 and len(kept) <= 14
    whole = History(plans=(EVEN,), weights=((),), snapshots=kept)
    assert whole.recent(20.0).seconds == 20.0 and whole.recent(1e9).seconds == whole.seconds


def test_an_engine_that_started_again_counts_from_zero() -> None:
    before, after = counters(0, 50.0), replace(counters(0, 2.0), steps=10)
    pair = History(
        plans=(EVEN,),
        weights=weights_of((EVEN,)),
        snapshots=(
            Snapshot(time_s=0.0, ranks=(before,), stats=(Stats(generation_tokens=900),)),
            Snapshot(time_s=9.0, ranks=(after,), stats=(Stats(generation_tokens=30),)),
        ),
    )
    assert pair.counted("generation_tokens") == 30
    (shares,) = pair.shares()
    assert shares.counters.steps == 10 and shares.counters.compute_s == 2.0


def test_quantiles() -> None:
    counts = Histogram((1.0, 2.0, 4.0, float("inf")), (10.0, 20.0, 40.0, 40.0))
    assert (counts.quantile(0.25), counts.quantile(0.5), counts.quantile(0.75)) == (1.0, 2.0, 3.0)
    assert Histogram().quantile(0.5) is None and counts.since(counts).quantile(0.5) is None
    assert Histogram((1.0, float("inf")), (0.0, 5.0)).quantile(0.5) == 1.0, "the last finite bound"


def test_every_code_has_a_rule() -> None:
    assert len(CODES) == len(set(CODES)) == 10


# --- the planner's figures ---


@pytest.fixture(scope="module")
def forecast() -> Any:
    return forecast_plan(EVEN, host(), MEASURED)


def test_figures_of_changes(forecast: Any) -> None:
    slow = ranks_of(EVEN, counters(0, 3.0, 0.5, 6.0), counters(1, 9.0, 0.5, 0.0))
    past = history(EVEN, Snapshot(time_s=10.0, stats=(Stats(running=4),)))
    (priced,) = add_prices(slow, past, lambda replica: forecast)
    assert promised_percent(priced.remedy) > 0, "the slow rank gets less"
    for change in (Change(parallelism=Parallelism(1, 2)), Change(requests=(2, 8))):
        finding = replace(slow[0], change=change)
        (priced,) = add_prices([finding], past, lambda replica: forecast)
        assert promised_percent(priced.remedy) > -100
    (unpriced,) = add_prices(slow, past, lambda replica: None)
    assert unpriced.remedy == slow[0].remedy


def promised_percent(remedy: str) -> int:
    """The planner's gain in tokens per second, as every remedy says it."""
    (percent,) = re.findall(r"\(([+-]\d+)% tokens/s, by the planner\)$", remedy)
    return int(percent)


def test_gains_are_said_in_percent() -> None:
    finding = Finding(code=Code.ALLREDUCE_WAIT, text="", value=0.6, limit=0.5, remedy="restart", alternative="wait")
    assert with_figure(finding, Figure(0.184, "tokens/s")) == "restart (+18% tokens/s, by the planner)"
    assert with_figure(finding, Figure(-0.5, "tokens/s")) == "wait; do not restart (-50% tokens/s, by the planner)"
    as_pipeline = msgspec.structs.replace(finding, change=Change(parallelism=Parallelism(1, 2)))
    assert with_figure(as_pipeline, None).startswith("wait; restart ")  # no figure: a pipeline comes second
    assert with_figure(finding, None) == "restart" and Figure(-0.001, "tokens/s").text == "+0% tokens/s"
