"""A module that a process runs: `main(FD, DEED)` tells its circumstances through a pipe and then does a deed."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time


def main(descriptor: int, deed: int) -> None:
    from weft.engine.processes.forks import pool

    told = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": dict(os.environ),
        "input": os.readlink("/proc/self/fd/0"),
        "same output": os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "terminate": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "threads": len(os.listdir("/proc/self/task")),
        "collects": gc.isenabled(),
        "random": random.random(),
        "server": pool._server is None,
    }
    if deed == 4:
        import torch  # takes a direct start three seconds

        told["torch"] = torch.rand(1).item()
        told["cuda"] = torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()
        told["threads"] = len(os.listdir("/proc/self/task"))
    os.write(descriptor, json.dumps(told).encode() + b"\n")
    os.close(descriptor)
    print("printed", flush=True)
    match deed:
        case 0 | 4:  # in the order of test_forks.DEEDS
            sys.exit(7)
        case 1:
            raise ValueError("it fails")
        case 2:
            os.kill(os.getpid(), signal.SIGABRT)
        case 3:
            time.sleep(600)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
