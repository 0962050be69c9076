"""Pool: the sandboxed workers of one event loop, and the jobs that they have or wait for."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from weft.engine.processes.framing import FrameDecoder, FrameError, encode_frame
from weft.engine.processes.liveness import read_times
from weft.engine.sandbox.limits import Limits
from weft.engine.sandbox.messages import Broken, FromWorker, Registration, SandboxJob, WorkerReady
from weft.engine.sandbox.zygote import WorkerEnds, current_zygote, spawn_worker
from weft.errors import RequestError

Outcome = bytes | RequestError  # of a job

PLACES = 6  # workers at a time
LARGE_PLACES = 2  # of which may have large jobs
LARGE = 64 * 1024  # bytes of a job
DEPTH = 32  # small jobs that a worker may have at once: their answers come together when the loop is busy
IDLE = 1  # workers without a job that stay
LOOK_S = 0.05  # between looks at jobs that have not ended
SLOW_S = 0.03  # CPU time of a job between two looks with which it is not quick: others do not wait behind it
START_S = 60.0  # for a worker to start; its zygote may be preparing what takes seconds
WAIT_S = 30.0  # for a worker that takes a job
RECEIVE_BYTES = 256 << 10


class SandboxBusyError(Exception):
    """A job that no worker takes in time."""


class PooledFunction(Protocol):
    """The function whose jobs a pool runs: `Isolated`."""

    limits: Limits
    lasting: bool

    @property
    def registration(self) -> Registration: ...

    def outcome(self, reply: FromWorker | None) -> Outcome: ...

    def broken(self, reason: str) -> RequestError: ...


class Pending:
    """One job and the future of its outcome."""

    __slots__ = ("frame", "future", "large", "missed", "since_s")

    def __init__(self, data: bytes, future: asyncio.Future[Outcome], now_s: float) -> None:
        self.since_s = now_s
        self.frame = encode_frame(SandboxJob(data))
        self.future = future
        self.large = len(data) > LARGE
        self.missed = False  # its worker ended before it began


class PoolWorker:
    """A worker as the loop sees it. Its jobs are answered in order."""

    def __init__(self, pool: Pool, ends: WorkerEnds, now_s: float) -> None:
        self._pool = pool
        self._ends = ends
        self._unsent = bytearray()
        self._writing = False  # the loop waits until the socket takes more
        self._decoder: FrameDecoder[FromWorker] = FrameDecoder(FromWorker)
        self.jobs: deque[Pending] = deque()
        self.pid = 0  # until it is ready
        self.slow = False
        self._seen_job: Pending | None = None
        self._seen_s = 0.0  # of CPU time, when it was seen first
        self.since_s = now_s  # its first job began, or it was started
        self.closed = False
        self.taken_over = False  # others do the jobs behind the first one: the worker ends with that
        ends.work.setblocking(False)
        pool.loop.add_reader(ends.work.fileno(), self._receive)

    @property
    def is_open(self) -> bool:
        """True if it may get further small jobs: it has few, and answers quickly."""
        return not self.slow and len(self.jobs) < DEPTH and not (self.jobs and self.jobs[0].large)

    def look(self) -> None:
        """Note if the first job is slow. One that does not get the CPU is not: no other worker would get it."""
        if not self.pid:
            return
        times, job = read_times(self.pid), self.jobs[0]
        used_s = times.cpu_s if times else self._pool.loop.time()
        self.slow = job is self._seen_job and used_s - self._seen_s >= SLOW_S
        if job is not self._seen_job:
            self._seen_job, self._seen_s = job, used_s

    def forget_seen(self) -> None:
        """Forget the job that has been looked at: it is answered, and may hold megabytes."""
        self._seen_job, self.slow = None, False

    def add(self, job: Pending) -> None:
        """Give the worker a job; `flush` sends it."""
        if not self.jobs:
            self.since_s = self._pool.loop.time()
        self.jobs.append(job)
        self._unsent += job.frame

    def flush(self) -> None:
        """Send the jobs that are not sent yet, as far as the socket takes them, and the rest later."""
        if self._unsent and not self._writing:
            self._send()
            if self._unsent:
                self._writing = True
                self._pool.loop.add_writer(self._ends.work.fileno(), self._send)

    def close(self) -> None:
        """Kill the worker. Its jobs are the caller's."""
        if self.closed:
            return
        self.closed = True
        if not self._pool.loop.is_closed():
            self._pool.loop.remove_reader(self._ends.work.fileno())
            self._pool.loop.remove_writer(self._ends.work.fileno())
        self._ends.close()

    def _send(self) -> None:
        try:
            sent = self._ends.work.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the other end is gone, which `_receive` sees
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent and self._writing:
            self._writing = False
            self._pool.loop.remove_writer(self._ends.work.fileno())

    def _receive(self) -> None:
        try:
            data = self._ends.work.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for message in self._decoder.feed(data):
                if self.closed:
                    return
                self._pool.on_message(self, message)
        except FrameError:
            data = b""
        if not data and not self.closed:
            self._pool.on_end(self)


class Pool:
    """Runs the jobs of a function in several workers, so that a slow one keeps no other waiting.

    Small jobs go to one worker as long as it is quick. If its first job is slow, other workers take over those behind
    it. For one event loop.
    """

    def __init__(self, function: PooledFunction) -> None:
        self.loop = asyncio.get_running_loop()
        self._function: PooledFunction = weakref.proxy(function)
        self._workers: list[PoolWorker] = []
        self._waiting: dict[bool, deque[Pending]] = {False: deque(), True: deque()}  # by large
        self._dealing = False
        self._watch: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        weakref.finalize(function, self.close)

    async def call(self, data: bytes) -> Outcome:
        """Return the outcome of one job. If it is cancelled, a job that is not quick is given up.

        Raises SandboxBusyError if no worker takes it within WAIT_S.
        """
        job = Pending(data, self.loop.create_future(), self.loop.time())
        if not self._workers:
            await self.open()
        self._waiting[job.large].append(job)
        self._deal_out_soon()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    async def open(self) -> None:
        """Start the zygote and what the workers need, unless they are there; in a thread, since it takes its time."""
        if self._opening is None or (self._opening.done() and not self._workers):
            self._opening = self.loop.create_task(asyncio.to_thread(_open, self._function))
        await asyncio.shield(self._opening)

    async def warm(self) -> None:
        """Start a worker, so that the first job need not wait for it."""
        await self.open()
        if not self._workers:
            self._spawn()

    def close(self) -> None:
        """Kill all workers."""
        jobs = [job for worker in self._workers for job in worker.jobs]
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        for waiting in self._waiting.values():
            jobs += waiting
            waiting.clear()
        for job in jobs:
            if not (self.loop.is_closed() or job.future.done()):
                job.future.set_exception(SandboxBusyError("the processes have been closed"))
        if self._watch is not None:
            self._watch.cancel()

    def on_message(self, worker: PoolWorker, message: FromWorker) -> None:
        """Pass a worker's answer on, and give it, or the next one, more to do."""
        if isinstance(message, WorkerReady):
            worker.pid, worker.since_s = message.pid, self.loop.time()
            return
        job = worker.jobs.popleft()
        self._settle(job, self._function.outcome(message))
        worker.since_s = self.loop.time()
        worker.forget_seen()
        spare = not worker.jobs and sum(not other.jobs for other in self._workers) > IDLE
        if worker.taken_over or isinstance(message, Broken) or not self._function.lasting or spare:
            self._end(worker)
        if any(self._waiting.values()):
            self._deal_out_soon()

    def on_end(self, worker: PoolWorker) -> None:
        """End the job that a worker died of; others do the rest. Once a worker may end, with its zygote, unstarted."""
        if worker.jobs and (worker.pid or worker.jobs[0].missed):
            self._settle(worker.jobs.popleft(), self._function.outcome(None))
        elif worker.jobs:
            worker.jobs[0].missed = True
        self._end(worker)

    def _end(self, worker: PoolWorker) -> None:
        worker.close()
        self._workers.remove(worker)
        self._put_back(worker.jobs)
        worker.jobs.clear()
        self._deal_out_soon()

    def _put_back(self, jobs: Iterable[Pending]) -> None:
        """Let jobs wait again, before jobs that came later."""
        for job in reversed([*jobs]):
            self._waiting[job.large].appendleft(job)

    def _give_up(self, job: Pending) -> None:
        for worker in self._workers:
            quick = self._function.lasting and not worker.slow
            if worker.jobs and worker.jobs[0] is job and not quick:
                worker.jobs.popleft()
                self._end(worker)
                self._deal_out()
                return

    def _settle(self, job: Pending, outcome: Outcome) -> None:
        if not job.future.done():
            job.future.set_result(outcome)

    def _deal_out_soon(self) -> None:
        """Deal out once for all jobs of this turn of the loop: a call of the system costs more than a small job."""
        if not self._dealing:
            self._dealing = True
            self.loop.call_soon(self._deal_out)

    def _deal_out(self) -> None:
        self._dealing = False
        for waiting in self._waiting.values():
            while waiting:
                if not waiting[0].future.done():
                    try:
                        worker = self._find_worker(waiting[0])
                    except OSError as error:  # no descriptor or process is left
                        if any(worker.jobs for worker in self._workers):
                            break  # it is asked again when one of these ends
                        waiting[0].future.set_exception(SandboxBusyError(f"no process could be started: {error}"))
                        continue
                    if worker is None:
                        break
                    worker.add(waiting[0])
                waiting.popleft()
        for worker in self._workers:
            worker.flush()
        if self._watch is None and any(worker.jobs for worker in self._workers):
            self._watch = self.loop.call_later(LOOK_S, self._look)

    def _find_worker(self, job: Pending) -> PoolWorker | None:
        """Return the worker that gets a job, a new one if need be; None if it has to wait."""
        busy = [worker for worker in self._workers if worker.jobs]
        if job.large and sum(worker.jobs[0].large for worker in busy) >= LARGE_PLACES:
            return None
        if len(busy) < len(self._workers):
            return next(worker for worker in self._workers if not worker.jobs)
        if self._function.lasting and not job.large:
            quick = [worker for worker in busy if worker.is_open]
            if quick:
                return min(quick, key=lambda worker: len(worker.jobs))
        if len(self._workers) >= PLACES:
            return None
        return self._spawn()

    def _spawn(self) -> PoolWorker:
        worker = PoolWorker(self, spawn_worker(self._function.registration), self.loop.time())
        self._workers.append(worker)
        return worker

    def _look(self) -> None:
        """Take jobs from workers whose first job is slow, and kill workers whose job has had its time."""
        self._watch = None
        now = self.loop.time()
        for worker in [worker for worker in self._workers if worker.jobs]:
            age = now - worker.since_s
            if age > (self._function.limits.wall_s if worker.pid else START_S):
                self._settle(worker.jobs.popleft(), self._function.broken(f"it has taken {age:.0f} s"))
                self._end(worker)
                continue
            worker.look()
            if worker.slow and worker.jobs[0].future.done():  # given up
                worker.jobs.popleft()
                self._end(worker)
            elif worker.slow and len(worker.jobs) > 1:
                first, *others = worker.jobs
                worker.jobs = deque([first])
                worker.taken_over = True
                self._put_back(others)
        for waiting in self._waiting.values():
            while waiting and now - waiting[0].since_s > WAIT_S:
                job = waiting.popleft()
                if not job.future.done():
                    job.future.set_exception(SandboxBusyError(f"no worker has been free for {WAIT_S:g} s"))
        self._deal_out()


def _open(function: PooledFunction) -> None:
    function.registration  # noqa: B018  # cached
    current_zygote()
