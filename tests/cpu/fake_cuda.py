"""A stand-in for a GPU: the worker's whole path for CUDA on a CPU, with Triton's kernels in its interpreter.

Tensors on the card are a subclass that says so and holds a tensor of the CPU. What CUDA does and tests on a CPU would
not see, it does too:

- a graph is the sequence of operations on fixed tensors, with host values as they were; nothing of it happens while it
  is captured. What it allocates lies in its pool, and may be anything when a graph of that pool is replayed;
- copies from and to pinned memory happen as late as they may: memory that is filled again too early, or read too early,
  is found out. Fresh memory of the card is full of NaN;
- what CUDA does on a thread's current device is refused in threads that have not made the card theirs: launches of
  Triton, events, captures, and all that names no device. The card stands for any GPU of several, not just the first;
- cuBLAS has a workspace for each stream of a thread, which stays until it is asked back. Graphs hold its address;
- operations that wait for the card, or copy from memory that is not pinned, are counted, and refused during a capture,
  as are tensors of both kinds in one operation. While one thread captures, others neither capture, nor wait for the
  whole card, nor give its memory back.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from weft.engine.executors import inline
from weft.machine.hardware import host as hosts
from weft.machine.hardware.topology import Gpu

CUDA = torch.device("cuda", 0)
PROCESSORS = 1  # so that a decode step of one row is split and one of two is not
TOTAL_BYTES = 8 << 30
GARBAGE = 255  # of each byte: NaN, or -1
# Operations whose result the host waits for.
WAITING = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")  # by cuBLAS
WORKSPACE_BYTES = 4096
FRESH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
COPIES = ("copy_", "to", "_to_copy")
PINNING = ("is_pinned", "pin_memory")
_metadata = torch.device("meta")  # what C++ takes the tensors to be on: the one kind that every torch has


class CardError(RuntimeError):
    """An operation that CUDA would refuse, or compute wrongly."""


class OnCard(torch.Tensor):
    """A tensor on the card, whose numbers are in `held`, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnCard:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_metadata,
        )
        made.held = held
        card.hold(made)
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return CardStorage(self.held.untyped_storage())

    def tolist(self) -> Any:
        card.wait("tolist")
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCard({self.held})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operation, args, kwargs or {})


@dataclass
class CardStorage:
    """The memory behind tensors on the card."""

    held: torch.UntypedStorage

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def nbytes(self) -> int:
        return self.held.nbytes()

    def resize_(self, size: int) -> None:
        card.resize(self.held, size)


class OnThisThread(TorchDispatchMode):
    """Sees to what makes tensors on the card of none."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operation, args, kwargs or {})


@dataclass
class Graph:
    """A captured graph: operations on `held` tensors, with the results that they had."""

    done: list[Callable[[], None]] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)
    place: object = None
    workspaces: dict[tuple[int, object], object] = field(default_factory=dict)

    def pool(self) -> object:
        return self.place

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        card.check_current_device()
        self.place = object() if pool is None else pool
        card.begin(self)

    def capture_end(self) -> None:
        card.end(self)

    def replay(self) -> None:
        if card.captures():
            raise CardError("a graph is replayed inside of a capture")
        if any(card.workspaces.get(key) is not workspace for key, workspace in self.workspaces.items()):
            raise CardError("a graph is replayed whose workspace has been given back")
        card.replays += 1
        for tensor in card.pools[self.place]:
            spoil(tensor)
        with plainly():
            for again in self.done:
                again()


# A copy that is under way: called, it happens, or sees that it still can.
Late = Callable[[], None]


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._before: list[Late] = []

    def record(self, stream: object = None) -> None:
        card.check_current_device()
        if card.captures():
            raise CardError("an event is recorded inside of a capture")
        self._before = list(card.late)

    def synchronize(self) -> None:
        card.check_current_device()
        card.wait("event", count=False)
        card.settle(self._before)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Card:
    """The one card: its memory, what is under way, and what was seen."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.late: list[Late] = []
        self.pools: dict[object, list[torch.Tensor]] = {}
        self.pinned: dict[int, torch.Tensor] = {}
        self.replays = self.launches = 0  # of graphs, and of all else
        self.launched: list[str] = []  # names of all launches
        self.waits: Counter[str] = Counter()  # what the host waited for, by operation
        self.bytes = self.peak = self.reserved = 0  # held, held at most, and with what the allocator keeps for later
        self.workspaces: dict[tuple[int, object], object] = {}  # of cuBLAS, by thread and stream
        self.captured = 0  # graphs
        self._held: dict[int, list[int]] = {}  # by storage the number of tensors, and bytes
        self._local = threading.local()
        self._capturing = threading.Lock()

    # Memory

    def hold(self, tensor: OnCard) -> None:
        storage = tensor.held.untyped_storage()
        with self.lock:
            kept = self._held.setdefault(storage._cdata, [0, 0])
            kept[0] += 1
            if kept[0] == 1:
                self.resize(storage, storage.nbytes())
        weakref.finalize(tensor, self._free, self._held, storage._cdata).atexit = False

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give the memory behind tensors another size; new memory is full of garbage."""
        with self.lock:
            kept = self._held[storage._cdata]
            self._take(size - kept[1])
            kept[1] = size
            if size != storage.nbytes():
                storage.resize_(size)
                storage.fill_(GARBAGE)

    def _take(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        self.reserved = max(self.reserved, self.bytes)

    def _free(self, held: dict[int, list[int]], storage: int) -> None:
        with self.lock:
            held[storage][0] -= 1
            if not held[storage][0]:
                _, size = held.pop(storage)
                # Nothing of the card of an earlier test.
                self.bytes -= size if held is self._held else 0

    # cuBLAS

    @property
    def stream(self) -> object:
        """The current stream of this thread; None is the device's default."""
        return getattr(self._local, "stream", None)

    @contextmanager
    def on_stream(self, stream: object) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def multiply(self) -> None:
        """A product by cuBLAS, which takes a workspace for this thread and stream."""
        key = threading.get_ident(), self.stream
        with self.lock:
            if key not in self.workspaces:
                self.workspaces[key] = object()
                self._take(WORKSPACE_BYTES)
            if graph := self.captures():
                graph.workspaces[key] = self.workspaces[key]

    def clear_workspaces(self) -> None:
        with self.lock:
            self.bytes -= WORKSPACE_BYTES * len(self.workspaces)
            self.workspaces.clear()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    # The current device of each thread

    def set_device(self, device: torch.device | int) -> None:
        self._local.device = torch.device("cuda", device) if isinstance(device, int) else device

    def check_current_device(self, device: torch.device | int | str | None = None) -> None:
        """Raises CardError in a thread that has not made the card current, unless a device is named: with several GPUs
        CUDA would take the first."""
        named = device is not None and (isinstance(device, int) or torch.device(device).index is not None)
        current = getattr(self._local, "device", None)
        if not named and current != CUDA:
            raise CardError(f"the current device of this thread is {current or 'the first there is'}, not {CUDA}")

    def note_launch(self, name: str) -> None:
        self.launches += 1
        self.launched.append(name)

    # What is under way

    def settle(self, some: list[Late]) -> None:
        with self.lock, torch.inference_mode():
            for copy in some:
                if copy in self.late:
                    self.late.remove(copy)
                    copy()

    def from_host(self, source: torch.Tensor) -> None:
        """`source` is being copied to the card: until that has ended nobody writes there."""
        before = source.clone()

        def end() -> None:
            if not torch.equal(raw(source), raw(before)):
                raise CardError("pinned memory was filled again before it was copied to the card")

        self.late.append(end)

    def to_host(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """`target` will have the values, and has them no sooner than somebody has waited."""
        target.view(torch.uint8).fill_(GARBAGE) if target.dim() else spoil(target)
        self.late.append(lambda: target.copy_(value))

    def wait(self, what: str, *, count: bool = True) -> None:
        if self.captures():
            raise CardError(f"{what} waits for the card inside of a capture")
        if count:
            self.waits[what] += 1

    def synchronize(self, device: torch.device | None = None) -> None:
        self.check_current_device(device)
        self._refuse_in_captures("synchronize")
        self.settle(list(self.late))

    # Graphs

    def captures(self) -> Graph | None:
        return getattr(self._local, "graph", None)

    def begin(self, graph: Graph) -> None:
        if not self._capturing.acquire(blocking=False):
            raise CardError("torch captures one graph at a time in a process")
        self._local.graph = graph

    def end(self, graph: Graph) -> None:
        self._local.graph = None
        self.captured += 1
        self.pools.setdefault(graph.place, []).extend(graph.fresh)
        self._capturing.release()

    def empty_cache(self) -> None:
        self._refuse_in_captures("empty_cache")
        self.reserved = self.bytes

    def _refuse_in_captures(self, what: str) -> None:
        """Raises CardError in any thread: what concerns the whole device ends a capture."""
        if self._capturing.locked():
            raise CardError(f"{what} while a graph is captured")

    def record(self, again: Callable[[], None], fresh: list[torch.Tensor]) -> None:
        graph = self.captures()
        assert graph is not None
        graph.done.append(again)
        graph.fresh += fresh


card = Card()


def plainly() -> AbstractContextManager[None]:
    """Have operations of this thread see tensors of the CPU alone, which those of the card hold: many times faster."""
    return _disable_current_modes()


def flatten(values: Iterable[Any]) -> list[Any]:
    """Return the arguments or results of an operation, and what lists of them hold."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += value
        else:
            found.append(value)
    return found


def map_values(function: Callable[[Any], Any], values: Any) -> Any:
    """Return arguments or results of an operation with each value replaced, also in lists of them."""
    if isinstance(values, list | tuple):
        return type(values)(map_values(function, value) for value in values) if values else values
    return function(values)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def spoil(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().fill_(GARBAGE)


def dispatch(operation: Any, args: Any, kwargs: Any) -> Any:
    """One operation of torch's, on the card or beside it."""
    name = operation.overloadpacket.__name__
    flat = flatten((*args, *kwargs.values()))
    theirs = [x for x in flat if isinstance(x, OnCard)]
    ours = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnCard)]
    devices = [x for x in flat if isinstance(x, torch.device)]
    if not (theirs or devices or name in PINNING or "pin_memory" in kwargs):
        return operation(*args, **kwargs)
    if name == "is_pinned":
        return bool(ours) and card.is_pinned(ours[0])
    if name == "pin_memory":
        return card.pin(ours[0].clone())
    pins = kwargs.get("pin_memory")
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    there = devices[-1].type == "cuda" if devices else bool(theirs)
    if devices and there:
        card.check_current_device(devices[-1])
    wrappers = {id(x.held): x for x in theirs}

    def held(x: Any) -> Any:
        if isinstance(x, OnCard):
            return x.held
        return torch.device("cpu") if isinstance(x, torch.device) else x

    given, named = map_values(held, tuple(args)), {key: map_values(held, value) for key, value in kwargs.items()}
    if name in COPIES and (len(theirs) == len(ours) == 1 if name == "copy_" else bool(theirs) != there):
        return _between(name, operation, args, given, named)
    if not there:
        result = operation(*given, **named)
        return card.pin(result) if pins else result
    if theirs and any(x.dim() for x in ours):
        raise CardError(f"{operation}: tensors of the card and of the host in one operation")
    if name in PRODUCTS:
        card.multiply()
    waits = name in WAITING or (name == "index" and any(x.dtype in (torch.bool, torch.uint8) for x in theirs[1:]))
    if waits:
        card.wait(name)
    result = _captured(operation, name, given, named) if card.captures() else operation(*given, **named)
    if name not in FRESH and not (operation.is_view and _shares_memory(result, theirs[0])):
        card.note_launch(name)
    if name in FRESH and not card.captures():
        spoil(result)

    def wrapped(x: Any) -> Any:
        return (wrappers[id(x)] if id(x) in wrappers else OnCard(x)) if isinstance(x, torch.Tensor) else x

    return map_values(wrapped, result)


def _shares_memory(result: Any, source: OnCard) -> bool:
    """True if what may be a view is one: conversions and changes of shape copy where they must."""
    place = source.held.untyped_storage().data_ptr()
    return all(made.untyped_storage().data_ptr() == place for made in flatten([result]))


def _between(name: str, operation: Any, args: Any, given: Any, named: Any) -> Any:
    """A copy from the host to the card, or back."""
    card.note_launch(name)
    target, source = (given[0], given[1]) if name == "copy_" else (None, given[0])
    goes_up = isinstance(args[0], OnCard) if name == "copy_" else not isinstance(args[0], OnCard)
    near = source if goes_up else target
    wanted = named.get("non_blocking", False) or any(x is True for x in given[2:])
    asynchronous = wanted and (near is None or card.is_pinned(near))
    if card.captures() and (not asynchronous or near is None):
        raise CardError("memory that is not pinned is copied inside of a capture")
    if not asynchronous:
        card.wait("copy")
        card.settle(list(card.late))
    if name == "copy_":
        value = source.to(target.dtype)
        if card.captures():
            card.record(lambda: target.copy_(source), [])
        elif goes_up:
            if asynchronous:
                card.from_host(source)
            target.copy_(value)
        elif asynchronous:
            card.to_host(target, value.clone())
        else:
            target.copy_(value)
        return args[0]
    result = operation(*given, **named)
    result = result.clone() if result is source else result
    if not goes_up:
        if asynchronous:
            card.to_host(card.pin(result), result.clone())
        return result
    if asynchronous:
        card.from_host(source)
    if card.captures():
        card.record(lambda: result.copy_(source), [result])
    return OnCard(result)


def _captured(operation: Any, name: str, given: Any, named: Any) -> Any:
    """Result of an operation during a capture: an empty tensor for it, and no change to anything else."""
    inputs = [x for x in flatten((*given, *named.values())) if isinstance(x, torch.Tensor)]
    known = {x.untyped_storage().data_ptr() for x in inputs}
    changed = [x for x, argument in zip(given, operation._schema.arguments, strict=False) if _written(argument)]
    changed += [
        x for key, x in named.items() if any(a.name == key and _written(a) for a in operation._schema.arguments)
    ]
    before = [x.clone() for x in changed]
    result = operation(*given, **named)
    for x, was in zip(changed, before, strict=True):
        x.copy_(was)
    made = [x for x in flatten([result]) if isinstance(x, torch.Tensor)]
    fresh = [x for x in made if x.untyped_storage().data_ptr() not in known]
    if name in FRESH:
        result.zero_()  # what is made of it has a place, if no meaning

    def again() -> None:
        for target, x in zip(made, flatten([operation(*given, **named)]), strict=True):
            if x is not target:
                target.copy_(x)

    if changed or (fresh and name not in FRESH):
        card.record(again, fresh)
    elif fresh:
        card.record(lambda: None, fresh)
    return result


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


class Readers(ThreadPoolExecutor):
    """The threads that read weights see the card too."""

    def __init__(self, threads: int, name: str, initializer: Callable[..., None], initargs: tuple[Any, ...]) -> None:
        def begin() -> None:
            OnThisThread().__enter__()  # for as long as the thread lives
            initializer(*initargs)

        super().__init__(threads, name, begin)


class Stream:
    def __init__(self, device: torch.device | None = None, **_: Any) -> None:
        card.check_current_device(device)

    def synchronize(self) -> None:
        card.wait("stream", count=False)
        card.settle(list(card.late))

    def wait_event(self, event: Event) -> None:
        pass


def of_device(answer: Callable[[], Any]) -> Callable[..., Any]:
    """A question of torch.cuda's about a device: the named one, or the current one."""

    def asked(device: torch.device | int | None = None) -> Any:
        card.check_current_device(device)
        return answer()

    return asked


def host_with_card() -> hosts.Host:
    """This host as `hosts.probe_host` would find it with the card."""
    gpu = Gpu(
        index=0, name="NVIDIA H200", uuid="GPU-0", total_bytes=TOTAL_BYTES, free_bytes=TOTAL_BYTES, capability=(9, 0)
    )
    return msgspec.structs.replace(hosts.probe_host(), gpus=(gpu,))


@pytest.fixture(name="card")
def the_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with installed(monkeypatch) as there:
        yield there


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card in this process, on this thread and on those of inline ranks."""
    from triton.runtime.interpreter import GridExecutor

    from tests.cpu.fake_launches import launch

    vars(card).update(vars(Card()))
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": card.set_device,
        "get_device_properties": of_device(
            lambda: SimpleNamespace(multi_processor_count=PROCESSORS, uuid="0", shared_memory_per_block_optin=227 << 10)
        ),
        "get_device_capability": of_device(lambda: (9, 0)),
        "get_device_name": of_device(lambda: "NVIDIA H200"),
        "mem_get_info": of_device(lambda: (TOTAL_BYTES - card.reserved, TOTAL_BYTES)),
        "memory_allocated": of_device(lambda: card.bytes),
        "memory_reserved": of_device(lambda: card.reserved),
        "max_memory_allocated": of_device(lambda: card.peak),
        "reset_peak_memory_stats": of_device(lambda: setattr(card, "peak", card.bytes)),
        "empty_cache": card.empty_cache,
        "synchronize": card.synchronize,
        "current_stream": Stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "stream": card.on_stream,
    }
    generator = torch.Generator

    class Near:
        def __new__(cls, device: object = None) -> Any:
            return generator("cpu")

    plainly = torch.tensor

    def tensor(data: Any, *, device: Any = None, **how: Any) -> torch.Tensor:
        made = plainly(data, **how)
        return made if device is None else made.to(device)

    monkeypatch.setattr(torch, "Generator", Near)
    monkeypatch.setattr(torch, "tensor", tensor)
    for name, replacement in cuda.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", card.clear_workspaces, raising=False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(GridExecutor, "__call__", launch(GridExecutor.__call__))
    monkeypatch.setattr("weft.engine.llm.probe_host", host_with_card)
    real = inline.run_rank

    def run(*given: Any) -> None:
        with OnThisThread():
            real(*given)

    monkeypatch.setattr(inline, "run_rank", run)
    monkeypatch.setattr("weft.ranks.weights.load.ThreadPoolExecutor", Readers)
    monkeypatch.setattr("weft.ranks.worker.graphs.CAPTURE_S", 3600.0)  # Triton's interpreter takes long
    card.set_device(CUDA)
    with OnThisThread():
        yield card
