"""Suspects: requests with which engines have died, and the refusal of requests that kill engines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# Engines that one request may lose, in a server, a batch and a gateway: the first, and one other. A death may be no
# request's fault, so a second engine is tried. A third one would tell nothing more, and cost all its other requests.
LOST = 2
REFUSED_S = 600.0  # after its last death: clients' own retries have ended by then, and a mended server gets it again
REMEMBERED = 4096  # digests: each has cost an engine, so that more in REFUSED_S means that another thing is wrong
# After this time with an engine a suspect may be joined by the next one. A request that kills an engine mostly does so
# soon, in the check of a grammar or in the first step, which on a busy machine took five seconds.
ALONE_S = 10.0
# After this many deaths in a row, other suspects no longer count: they would all have to be as unlucky.
LOST_IN_COMPANY = 2 * LOST
# Longest wait for an engine without other suspects, after which the request joins them: it is most likely innocent.
PATIENCE_S = 30.0


class Trial:
    """A request at an engine, from `Suspects.begin` to `Suspects.end`.

    `suspected`: an engine has died with the same request before. `alone`: no other suspect was with the engine.
    """

    __slots__ = ("alone", "began_s", "digest", "engine", "suspected")

    def __init__(self, digest: bytes, engine: Hashable, now: float, *, suspected: bool) -> None:
        self.digest, self.engine, self.began_s = digest, engine, now
        self.suspected = self.alone = suspected


class _Deaths:
    """Engines that died with a request since it was last answered; `engine` is the last of them, at `at_s`."""

    __slots__ = ("at_s", "count", "engine", "refused")

    def __init__(self) -> None:
        self.count, self.at_s, self.refused = 0, 0.0, False
        self.engine: Hashable = None


class Suspects:
    """Deaths of engines, by a digest of the request. All times are seconds of one clock, which the caller reads.

    An engine that dies has many requests, of which one may be what killed it. All of them are suspects then, until an
    answer of theirs is complete. Suspects are tried one after the other (`may_begin`). If an engine dies with a single
    suspect, and this was that request's death number LOST in a row, the request is refused for REFUSED_S seconds, else
    after LOST_IN_COMPANY deaths in a row. So a second death that no request caused refuses at most one innocent
    request, never all that were in flight.
    """

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()  # the oldest death first
        self._trials: list[Trial] = []  # digests of suspects

    def __bool__(self) -> bool:
        """Return True if there is any suspect: otherwise no digest is needed."""
        return bool(self._deaths)

    def refused_s(self, digest: bytes, now: float) -> float:
        """Seconds for which a request is still refused; 0 if it may be asked."""
        self._forget(now)
        deaths = self._deaths.get(digest)
        return deaths.at_s + REFUSED_S - now if deaths is not None and deaths.refused else 0.0

    def may_begin(self, digest: bytes, engine: Hashable, now: float) -> bool:
        """Return True unless the request is a suspect and another one is with the engine, or the same one anywhere."""
        if digest not in self._deaths:
            return True
        return not any(
            now < trial.began_s + ALONE_S for trial in self._trials if trial.engine == engine or trial.digest == digest
        )

    def begin(self, digest: bytes, engine: Hashable, now: float) -> Trial:
        """Note that a request is sent to an engine."""
        trial = Trial(digest, engine, now, suspected=digest in self._deaths)
        if trial.suspected:
            for other in self._trials:
                if other.engine == engine and other.digest != digest:
                    other.alone = trial.alone = False
            self._trials.append(trial)
        return trial

    def end(self, trial: Trial) -> None:
        """Make room for the next suspect: the request has left the engine, or its answer has begun."""
        if trial in self._trials:
            self._trials.remove(trial)

    def note_death(self, trial: Trial, now: float) -> bool:
        """Count the death of an engine before it answered the request. Return True if the request is refused now.

        Several requests of one digest that an engine had when it died count once.
        """
        self.end(trial)
        self._forget(now)
        deaths = self._deaths.setdefault(trial.digest, _Deaths())
        if deaths.count and deaths.engine == trial.engine and trial.began_s <= deaths.at_s:
            return False
        deaths.count += 1
        deaths.engine, deaths.at_s = trial.engine, now
        self._deaths.move_to_end(trial.digest)
        if len(self._deaths) > REMEMBERED:
            self._deaths.popitem(last=False)
        was_refused = deaths.refused
        deaths.refused |= deaths.count >= (LOST if trial.alone else LOST_IN_COMPANY)
        return deaths.refused and not was_refused

    def note_answer(self, digest: bytes) -> None:
        """Forget the deaths of a request whose answer is complete."""
        self._deaths.pop(digest, None)

    def _forget(self, now: float) -> None:
        """Forget the deaths of long ago."""
        while self._deaths and next(iter(self._deaths.values())).at_s + REFUSED_S <= now:
            self._deaths.popitem(last=False)
