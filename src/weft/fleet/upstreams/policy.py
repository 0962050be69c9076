"""Routing policies: choose the replica for the next request.

Policies are deterministic: no sockets, no clock, and seeded random numbers. Equal sequences of calls give equal
choices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import log
from random import Random
from typing import NamedTuple, Protocol

PIECE_TOKENS = 64  # tokens of a prompt that one digest of its `Fingerprint.prefix` covers
LONGEST_MEMORY = 4096  # replicas for which round robin keeps a position; it forgets older positions
CAPACITY = 2**16  # beginnings that a PrefixMap remembers, of about 200 bytes each
MAX_REPLICAS = 2**14  # names of replicas that it remembers; beyond it, it is cleared


class Fingerprint(NamedTuple):
    """The part of a request that a policy reads.

    `prefix`: digests of the prompt's beginnings, each PIECE_TOKENS tokens longer than the digest before. `length`:
    tokens of the prompt. `session`: name of the conversation or user, equal for all requests of a session.
    """

    prefix: Sequence[int] = ()
    length: int = 0
    session: str = ""


class ReplicaViews(NamedTuple):
    """The part of the replicas that a policy reads, as columns: index i is the same replica in all columns.

    `connections`: number of unfinished requests. `weights`: positive shares of the load; empty if all are equal.
    `names`: unique names that stay when other replicas come and go; empty for the index.
    """

    connections: Sequence[int]
    weights: Sequence[float] = ()
    names: Sequence[str] = ()

    def weight(self, index: int) -> float:
        return self.weights[index] if self.weights else 1.0

    def name(self, index: int) -> str:
        return self.names[index] if self.names else str(index)

    def load(self, index: int) -> float:
        """Unfinished requests per weight, the next request included."""
        return (self.connections[index] + 1) / self.weight(index)


class Policy(Protocol):
    """Distributes requests over replicas.

    `reads_prefix`: it uses `Fingerprint.prefix` and `.length`. `reads_session`: it uses `Fingerprint.session`.
    """

    reads_prefix: bool
    reads_session: bool

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        """Index of the replica for `request`. There is at least one replica."""
        ...


class LeastConnections:
    """The replica with the fewest unfinished requests per weight; replicas with equal numbers take turns."""

    reads_prefix = reads_session = False

    def __init__(self) -> None:
        self._next = 0

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        loads: Sequence[float] = replicas.connections
        if replicas.weights:
            loads = [replicas.load(index) for index in range(len(loads))]
        fewest = min(loads)
        try:
            chosen = loads.index(fewest, self._next)
        except ValueError:
            chosen = loads.index(fewest)
        self._next = chosen + 1
        return chosen


class RoundRobin:
    """All replicas in turn, regardless of their load; each as often as its weight says, spread evenly (as in nginx)."""

    reads_prefix = reads_session = False

    def __init__(self) -> None:
        self._next = 0
        self._credits: dict[str, float] = {}

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        if not replicas.weights:
            chosen = self._next % len(replicas.connections)
            self._next = chosen + 1
            return chosen
        if len(self._credits) > LONGEST_MEMORY:
            self._credits.clear()
        credits, names = self._credits, [replicas.name(index) for index in range(len(replicas.weights))]
        for name, weight in zip(names, replicas.weights, strict=True):
            credits[name] = credits.get(name, 0.0) + weight
        chosen = max(range(len(names)), key=lambda index: credits[names[index]])
        credits[names[chosen]] -= sum(replicas.weights)
        return chosen


class RandomChoice:
    """Any replica, each with the probability of its weight."""

    reads_prefix = reads_session = False

    def __init__(self) -> None:
        self._random = Random("weft random")

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        return _draw(self._random, replicas)


class PowerOfTwo:
    """The less loaded of two replicas that are drawn at random."""

    reads_prefix = reads_session = False

    def __init__(self) -> None:
        self._random = Random("weft power of two")

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        first = _draw(self._random, replicas)
        second = _draw(self._random, replicas)
        return second if replicas.load(second) < replicas.load(first) else first


class SessionAffinity:
    """The same replica for all requests of a session while it exists; without a session, the least loaded replica.

    Rendezvous hashing: if a replica comes or goes, only the sessions that it gains or had change their replica.
    """

    reads_prefix, reads_session = False, True

    def __init__(self) -> None:
        self._sessionless = LeastConnections()

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        if not request.session:
            return self._sessionless.choose_replica(request, replicas)

        def score(index: int) -> float:
            text = f"{replicas.name(index)}\0{request.session}".encode(errors="surrogatepass")
            number = int.from_bytes(blake2b(text, digest_size=7).digest())
            return -replicas.weight(index) / log((number + 1) / (2**56 + 1))

        return max(range(len(replicas.connections)), key=score)


class PrefixMap:
    """For each beginning of a prompt, the replicas that got a prompt with it.

    A beginning is a digest, and a prompt is the digests of its beginnings, shortest first. The least recently used
    beginnings are forgotten, the longest of a prompt first: long beginnings are useless without the short ones.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[int, int] = OrderedDict()  # digest → replicas, as bits
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, prefix: Sequence[int], names: Sequence[str]) -> list[int]:
        """For each replica, the number of leading digests of `prefix` that it has."""
        wanted = {self._bits.get(name, 0) for name in names}
        matched = dict.fromkeys(wanted, 0)
        left = sum(wanted)
        for count, digest in enumerate(prefix, 1):
            left &= self._holders.get(digest, 0)
            if not left:
                break
            for bit in wanted:
                if bit & left:
                    matched[bit] = count
        return [matched[self._bits.get(name, 0)] for name in names]

    def insert(self, prefix: Sequence[int], name: str) -> None:
        """Remember that the replica got a prompt with these digests; only the beginning of a very long prompt."""
        if name not in self._bits:
            if len(self._bits) >= MAX_REPLICAS:
                self._bits.clear()
                self._holders.clear()
            self._bits[name] = 1 << len(self._bits)
        bit, holders = self._bits[name], self._holders
        for digest in reversed(prefix[: self._capacity]):
            holders[digest] = holders.get(digest, 0) | bit
            holders.move_to_end(digest)
        while len(holders) > self._capacity:
            holders.popitem(last=False)


class Prefix:
    """The replica with the least product of prefill work and load, by the prompts that it got before.

    A replica is assumed to have the KV of each prompt that it got recently: the map is approximate and bounded.
    """

    reads_prefix, reads_session = True, False

    def __init__(self) -> None:
        self._sent = PrefixMap()
        self._equal = LeastConnections()

    def choose_replica(self, request: Fingerprint, replicas: ReplicaViews) -> int:
        count = len(replicas.connections)
        names = [replicas.name(index) for index in range(count)]
        known = self._sent.match(request.prefix, names)
        # At least one piece: the last token is always computed, and a step has a fixed cost.
        work = [max(request.length - pieces * PIECE_TOKENS, PIECE_TOKENS) for pieces in known]
        scores = [work[index] * replicas.load(index) for index in range(count)]
        least = min(scores)
        best = [index for index in range(count) if scores[index] == least]
        among = ReplicaViews([replicas.connections[index] for index in best])
        chosen = best[self._equal.choose_replica(request, among)]
        self._sent.insert(request.prefix, names[chosen])
        return chosen


def _draw(random: Random, replicas: ReplicaViews) -> int:
    """A random index, with the replicas' weights as probabilities."""
    count = len(replicas.connections)
    return random.choices(range(count), replicas.weights)[0] if replicas.weights else random.randrange(count)


POLICIES: dict[str, Callable[[], Policy]] = {
    "least_conn": LeastConnections,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "prefix": Prefix,
    "session": SessionAffinity,
}
# Names of earlier versions.
OLD_NAMES = {"least-connections": "least_conn", "round-robin": "round_robin"}
