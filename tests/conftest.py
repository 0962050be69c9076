"""Settings and fixtures of all tests."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from httpx._transports import default as transports
from hypothesis import settings

from tests.pure.commands import logging_as_it_was

# Triton reads it when it is imported: kernels run in its interpreter where there is no GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads of torch that wait for each other sleep soon, as those of Weft's ranks do: beside other work on the cores,
# spinning makes a small product take several times as long. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# A shell's background jobs begin with it ignored, and would hand that on to the processes that tests end with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test judges by the clock: a slow machine is not a bug. Half as many examples as usual: each run draws others.
settings.register_profile("weft", deadline=None, print_blob=True, max_examples=50)
settings.load_profile("weft")


GOLDEN = Path(__file__).parent / "data" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts of tests/data/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden one of a name; with --update-golden, write it."""

    def compare(name: str, text: str) -> None:
        file = GOLDEN / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.read_text(encoding="utf-8") == text, f"{file.name} differs; if it should, pytest --update-golden"

    return compare


def pin_to_core() -> None:
    """Give each of several processes of pytest-xdist a core of its own, which what it starts inherits: engines whose
    threads share cores with another's take twice the time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


pin_to_core()


def share_certificates() -> None:
    """Have clients of httpx share what they trust: each would read the certificates of all authorities, which takes
    longer than many a request."""
    create = functools.cache(transports.create_ssl_context)

    def create_context(*, verify: object, cert: object, trust_env: bool) -> object:
        return create(verify=verify, cert=cert, trust_env=trust_env)

    transports.create_ssl_context = create_context


share_certificates()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` what a test marked `each_value` leaves out, before pytest chooses by marks."""
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        long = item.get_closest_marker("long")
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value") and not long:
            products[f"{item.path}::{item.originalname}"].append(item)
    for product in products.values():
        chosen = choose_each_value([parameter_values(item) for item in product])
        for number, item in enumerate(product):
            if number not in chosen:
                item.add_marker(pytest.mark.long)


def parameter_values(item: pytest.Function) -> frozenset[tuple[object, ...]]:
    """Return (names, identities of values) of each factor: what a `parametrize` sets, or the parameter of a fixture."""
    params = item.callspec.params
    factors = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [tuple(names.split(",")) if isinstance(names, str) else tuple(names) for names in factors]
    set_alone = params.keys() - {name for names in together for name in names}
    together += [(name,) for name in set_alone]
    return frozenset((names, *(id(params[name]) for name in names)) for names in together)


def choose_each_value(cases: list[frozenset[tuple[object, ...]]]) -> set[int]:
    """Return the numbers of few cases in which every value of every factor occurs, and none much more often than
    others."""
    missing = set().union(*cases)
    used: Counter[tuple[object, ...]] = Counter()
    chosen = set()
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(cases[n] & missing), -sum(used[value] for value in cases[n])))
        chosen.add(best)
        used.update(cases[best])
        missing -= cases[best]
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python looks for objects that only refer to each other among all: again and again among the 800,000 of torch, of
    Transformers and of the tests, which stay. It need not."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Libraries tell of what is left at the end. Not before: pytest looks for what tests have left.
        atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    """A command that runs in this process sets the level of what it starts; the next test starts as the user does."""
    with logging_as_it_was():
        yield
