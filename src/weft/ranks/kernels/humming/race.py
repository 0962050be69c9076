"""Race of two products for each shape of a weight, on the card that runs them. Winners are kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from weft._version import __version__
from weft.cache import cache_path, write_cache_file
from weft.errors import WeftError
from weft.logs import event_fields
from weft.plan.products import VERSION
from weft.ranks.kernels.contest import Clock, graph_seconds

logger = logging.getLogger("weft")

ROWS = (1, 32, 256)  # of a decode step, each of which counts alike
RACE_S = 30.0  # of a rank's start, in all; shapes that are left over take Weft's kernels, and race at the next start
OWN, HUMMING = "own", "humming"

# A product with a number of rows, to be called many times.
Contestant = Callable[[int], Callable[[], object]]


def cold_seconds(run: Callable[[], object], device: torch.device, clock: Clock = graph_seconds) -> float:
    """Seconds of one call whose weights are not in the GPU's second cache, as in a step that reads all weights."""
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 128 << 20)
    flushed = torch.empty(2 * cache, dtype=torch.uint8, device=device)

    def flush_and_run() -> None:
        flushed.zero_()
        run()

    return max(1e-9, clock(flush_and_run) - clock(flushed.zero_))


class ProductRaces:
    """The races of a rank: no more than `budget_s` seconds of them.

    `seconds` measures one call. `driver` is the version of the card's driver.
    """

    def __init__(
        self,
        device: torch.device,
        driver: str,
        *,
        seconds: Callable[[Callable[[], object]], float] | None = None,
        budget_s: float = RACE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._driver, self._now = device, driver, now
        self._seconds = seconds or partial(cold_seconds, device=device)
        self._left = budget_s

    def winner(self, kind: Hashable, contestants: Callable[[], Mapping[str, Contestant]]) -> str:
        """OWN or HUMMING, the faster one: as it was recorded, or measured now."""
        path = self._path(kind)
        if known := load_winner(path):
            return known
        if self._left <= 0:
            logger.info("No time is left to race products of %s: Weft's kernels are used", kind)
            return OWN
        began = self._now()
        times = {name: self._times(contestant) for name, contestant in contestants().items()}
        self._left -= self._now() - began
        # The mean of ratios: no number of rows counts more than another.
        ratio = sum(math.log(humming / own) for humming, own in zip(times[HUMMING], times[OWN], strict=True))
        best = HUMMING if ratio < 0 else OWN
        log_race(kind, times, best)
        save_winner(path, best)
        return best

    def _times(self, contestant: Contestant) -> list[float]:
        return [self._seconds(contestant(rows)) for rows in ROWS]

    def _path(self, kind: Hashable) -> Path | None:
        """File that holds the winner of a shape: for this card and driver, and these versions of both. None if there is
        no home directory for a cache."""
        card = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        key = repr((VERSION, self._driver, card, kind, torch.__version__, __version__))
        try:
            return cache_path() / f"product-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        except RuntimeError:
            return None


def load_winner(path: Path | None) -> str | None:
    """The recorded winner of a shape, if there is one."""
    try:
        name = path.read_text().strip() if path else ""
    except (OSError, ValueError):
        return None
    return name if name in (OWN, HUMMING) else None


def save_winner(path: Path | None, name: str) -> None:
    """Record a winner for the next start, which measures again if the file cannot be written."""
    if path is None:
        return
    try:
        write_cache_file(path, name.encode())
    except (OSError, WeftError) as error:
        logger.debug("the faster product cannot be recorded: %s", error)


def log_race(kind: Hashable, times: Mapping[str, Sequence[float]], best: str) -> None:
    figures = ", ".join(f"{name} {' / '.join(f'{took * 1e6:.0f}' for took in each)} us" for name, each in times.items())
    logger.info(
        "Products of %s with %s rows: %s: %s is used",
        kind,
        " / ".join(map(str, ROWS)),
        figures,
        best,
        extra=event_fields("products-compared", kind=repr(kind), rows=ROWS, seconds=times, fastest=best),
    )
