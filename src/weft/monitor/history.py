"""History: what a server counted at several moments, from which figures and diagnoses follow."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.engine.core.commands import TIMES, RankTimes
from weft.engine.core.request import Stats, sum_stats
from weft.machine.hardware.gpu_figures import GpuFigures
from weft.machine.hardware.topology import Holder
from weft.plan.plan import Plan


class RankCounters(RankTimes, frozen=True, kw_only=True):
    """Steps and times of one rank since its start.

    `rank` counts over all replicas, `local_rank` within the plan of `replica`.
    """

    rank: int
    replica: int
    local_rank: int
    node: str


class RankShares(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one rank between two moments, and the parts of a step, from 0 to 1.

    The parts are of the time within steps. On a GPU they are of all time; `communication` is None if it is not told
    apart from `compute`. `delayed` is in addition to the others: the part in which the rank's core had other work. All
    are None without a step.
    """

    counters: RankCounters
    compute: float | None = None
    communication: float | None = None
    waiting: float | None = None
    delayed: float | None = None


class GpuMoment(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a GPU, the processes that hold memory of it, and Weft's ranks among them."""

    figures: GpuFigures
    holders: tuple[Holder, ...] = ()
    own: frozenset[int] = frozenset()
    most_clock_mhz: int | None = None

    @property
    def foreign(self) -> tuple[Holder, ...]:
        """The processes that are none of ours."""
        return tuple(holder for holder in self.holders if holder.pid not in self.own)


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values up to each bound, the last one infinite. Counts are cumulative, as Prometheus has them."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    def since(self, before: Histogram) -> Histogram:
        """The values that have come since an earlier moment."""
        if not before.counts:
            return self
        return Histogram(self.bounds, tuple(now - then for now, then in zip(self.counts, before.counts, strict=True)))

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all lie below, interpolated within its bucket; None without values.

        Values above the last finite bound count as that bound, as in Prometheus' histogram_quantile.
        """
        if not self.counts or self.counts[-1] <= 0:
            return None
        wanted, below, count_below = share * self.counts[-1], 0.0, 0.0
        for bound, count in zip(self.bounds[:-1], self.counts, strict=False):
            if count >= wanted:
                within = (wanted - count_below) / (count - count_below) if count > count_below else 1.0
                return below + (bound - below) * within
            below, count_below = bound, count
        return below


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one server up to a moment: `time_s` of the monotonic clock.

    - `ranks`: in order; empty if they did not answer. `stats`: of each replica.
    - `unread_s`: for each connection that takes no more bytes, the seconds since then.
    - `finished`: answers that have ended. `prompts`: prompts that came; `repeated_prompts` of them began like an
      earlier one, with `repeated_tokens` in all.
    """

    time_s: float
    ranks: tuple[RankCounters, ...] = ()
    stats: tuple[Stats, ...] = ()
    gpus: tuple[GpuMoment, ...] = ()
    unread_s: tuple[float, ...] = ()
    finished: int = 0
    prompts: int = 0
    repeated_prompts: int = 0
    repeated_tokens: int = 0
    ttft: Histogram = Histogram()
    itl: Histogram = Histogram()

    @property
    def total(self) -> Stats:
        """Stats of all replicas together."""
        return sum_stats(self.stats) if self.stats else Stats()


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots of one server in the order of time, with what does not change: the plans of its replicas.

    `weights` are the bytes of each rank's weights, by plan. `caching`: the prefix cache is on.
    """

    plans: tuple[Plan, ...]
    weights: tuple[tuple[int, ...], ...]
    snapshots: tuple[Snapshot, ...]
    caching: bool = True

    @property
    def first(self) -> Snapshot:
        return self.snapshots[0]

    @property
    def last(self) -> Snapshot:
        return self.snapshots[-1]

    @property
    def seconds(self) -> float:
        """Seconds from the first snapshot to the last."""
        return self.last.time_s - self.first.time_s

    def first_rank(self, replica: int) -> int:
        """Number of a replica's first rank, counted over all replicas."""
        return sum(len(plan.places) for plan in self.plans[:replica])

    def recent(self, seconds: float) -> History:
        """The end of the history: back to the last snapshot that is at least `seconds` older than the end."""
        old = [number for number, one in enumerate(self.snapshots) if self.last.time_s - one.time_s >= seconds]
        return msgspec.structs.replace(self, snapshots=self.snapshots[old[-1] if old else 0 :])

    def counted(self, name: str) -> float:
        """Growth of a counter of `Stats` over the history, of all replicas together.

        A replica that has started again counts from 0: then it is what it has counted since.
        """
        before, now = getattr(self.first.total, name), getattr(self.last.total, name)
        return float(now - before if now >= before else now)

    def grown(self, name: str) -> int:
        """Growth of a counter of `Snapshot`."""
        return int(getattr(self.last, name) - getattr(self.first, name))

    def shares(self) -> list[RankShares]:
        """Parts of each rank's time, of the ranks that both ends of the history have."""
        before = {rank.rank: rank for rank in self.first.ranks}
        return [rank_shares(before[now.rank], now) for now in self.last.ranks if now.rank in before]


def rank_shares(before: RankCounters, now: RankCounters) -> RankShares:
    """The parts of a rank's time between two moments. A rank that has started again counts from 0."""
    if now.steps < before.steps:
        before = msgspec.structs.replace(before, steps=0, **dict.fromkeys(TIMES, 0.0))
    times = {name: _difference(getattr(now, name), getattr(before, name)) for name in TIMES}
    passed = msgspec.structs.replace(now, steps=now.steps - before.steps, **times)
    waiting_s = max(0.0, passed.waiting_s - (passed.idle_s or 0.0))
    whole_s = passed.compute_s + (passed.communication_s or 0.0) + waiting_s
    if not passed.steps or whole_s <= 0:
        return RankShares(counters=passed)
    return RankShares(
        counters=passed,
        compute=passed.compute_s / whole_s,
        communication=None if passed.communication_s is None else passed.communication_s / whole_s,
        waiting=waiting_s / whole_s,
        delayed=min(1.0, passed.delayed_s / whole_s),
    )


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else max(0.0, now - before)


def weights_of(plans: Sequence[Plan]) -> tuple[tuple[int, ...], ...]:
    """Bytes of the weights of each rank of each plan: for a large model they take a while to add up."""
    return tuple(tuple(map(plan.weight_bytes, range(len(plan.places)))) for plan in plans)


def growing(history: Sequence[Snapshot], snapshot: Snapshot, seconds: float) -> tuple[Snapshot, ...]:
    """A history with one more snapshot, without snapshots that are more than `seconds` older.

    The newest of the older ones stays, so that the whole time is covered.
    """
    kept = [*history, snapshot]
    while len(kept) > 2 and snapshot.time_s - kept[1].time_s >= seconds:
        del kept[0]
    return tuple(kept)
