"""weft support-bundle: one file about this machine and this user's servers, without secrets, to attach to a report."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec

from weft._version import __version__
from weft.api.service.run_files import RunningServer, running_servers
from weft.cache import cache_path
from weft.checkpoint.files.yaml_text import load_yaml
from weft.cli.flags.command_flags import SupportArguments
from weft.cli.machine.doctor import all_checks, security_checks
from weft.cli.machine.hardware import machine_json
from weft.errors import ConfigError, error_reason
from weft.machine.check import checks_json
from weft.machine.hardware import host
from weft.monitor.processes import SERVERS, Process, own_processes
from weft.monitor.secrets import REMOVED, Secrets, hub_token_files
from weft.monitor.security_checks import flag_values, process_variables
from weft.monitor.server_logs import file_tail, process_log, without_prompts
from weft.probes import stored_speeds
from weft.regular_files import SETTINGS_BYTES, read_regular_text
from weft.study.bench.http import HttpClient, HttpFailure, ServerAddress

ANSWER_S = 5.0  # seconds for one answer of a server
PACKAGES = (
    *("torch", "triton", "numpy", "flashinfer", "humming", "nvidia"),
    *("ray", "uvicorn", "starlette", "msgspec", "tokenizers"),
)
# Variables that change what Weft does. The values of some are shown; all other values may be secrets.
FAMILIES = ("WEFT_", "VLLM_", "CUDA_", "NCCL_", "GLOO_", "HF_", "RAY_", "OMP_", "TORCH_", "PYTORCH_", "TRITON_")
NAMES = """
WEFT_ENGINE_ARGS WEFT_KERNELS WEFT_LOG_FORMAT WEFT_SOURCE VLLM_ATTENTION_BACKEND VLLM_BATCH_INVARIANT
VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_V1_MULTIPROCESSING VLLM_HOST VLLM_HOST_IP
VLLM_LOGGING_LEVEL VLLM_MODEL VLLM_NO_USAGE_STATS VLLM_PORT VLLM_PP_LAYER_PARTITION CUDA_DEVICE_ORDER
CUDA_DEVICE_MAX_CONNECTIONS CUDA_HOME CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_PATH CUDA_VISIBLE_DEVICES
NVIDIA_DRIVER_CAPABILITIES NVIDIA_VISIBLE_DEVICES NCCL_ALGO NCCL_BUFFSIZE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE
NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_MAX_NCHANNELS
NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO
NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_TOPO_FILE GLOO_SOCKET_IFNAME MASTER_ADDR MASTER_PORT
HF_DATASETS_OFFLINE HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_HUB_DISABLE_XET HF_HUB_ENABLE_HF_TRANSFER HF_HUB_OFFLINE
HF_TOKEN_PATH RAY_ADDRESS RAY_AUTH_MODE RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES RAY_JOB_ID RAY_TMPDIR
OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_WAIT_POLICY TORCH_CUDA_ARCH_LIST TORCH_HOME TORCH_INDEX
TORCH_LOGS TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF TRITON_CACHE_DIR TRITON_DEFAULT_FP_FUSION TRITON_INTERPRET INFERNET_ENGINE_BACKEND
INFERNET_ENGINE_MODEL LD_LIBRARY_PATH OLLAMA_HOST OLLAMA_KEEP_ALIVE PATH XDG_CACHE_HOME
"""
SHOWN = frozenset(NAMES.split())
NOT_SHOWN = "[set; its value is not shown]"
ABOUT = """\
A support bundle of Weft {version}, {date}.

versions.json   Weft, Python, the system, packages, variables of the environment: of most only that they are set
doctor.json     the checks of weft doctor, and of weft doctor --security
hardware.json   what weft hardware --json prints; nothing was measured for it
servers/        for each server: its command and settings, what its ranks hold, its figures
logs/           the last lines of the servers' logs, where they go to a file or the journal

Keys, tokens and passwords are removed: of flags, of variables, of configuration files, of the hub's token file, and
what has the form of one. Names of models, paths and addresses are there; prompts and answers are not: lines with
prompts, which servers with --enable-log-requests write, are left out. A log given with --log is there as it is, with
its prompts. Look at it before you send it: tar -xzf.
"""


def main(arguments: SupportArguments) -> int:
    """Write the file; print its name and its parts."""
    path = Path(arguments.output or f"weft-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    secrets = Secrets()
    parts = collect_parts(secrets, [Path(name) for name in arguments.log])
    # Last, when all secrets are known.
    files = {name: secrets.clean(text) for name, text in parts.items()}
    write_bundle(path, files)
    if arguments.json:
        print(json.dumps({"file": str(path), "parts": sorted(files)}))
    else:
        print(f"wrote {path}, which only you can read: {', '.join(sorted(files))}")
    return 0


def collect_parts(secrets: Secrets, logs: list[Path]) -> dict[str, str]:
    """Text of each file of the bundle. Secrets that are met are noted in `secrets`."""
    for path in hub_token_files(os.environ):
        secrets.learn_file(path)
    processes = [process for process in own_processes() if process.role in SERVERS]
    parts = {
        "about.txt": ABOUT.format(version=__version__, date=time.strftime("%Y-%m-%d %H:%M %Z")),
        "versions.json": as_text(versions(secrets)),
        "doctor.json": as_text(
            {"machine": checks_json(all_checks(measure=False)), "security": checks_json(security_checks())}
        ),
    }
    here = host.probe_host()
    parts["hardware.json"] = as_text(machine_json(here, stored_speeds.load_speeds(here)))
    for process in processes:
        parts |= server_parts(process, secrets)
    for server in running_servers():
        # The keys of the process itself, sent to its own address.
        variables = process_variables(server.pid)
        parts[f"servers/{server.pid}-figures.json"] = as_text(asyncio.run(server_figures(server, variables)))
    parts |= dict(given_logs(logs))
    return parts


def versions(secrets: Secrets) -> dict[str, Any]:
    """Versions of Weft and of what it runs on, and the variables that it reads."""
    installed = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"]}
    return {
        "weft": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "packages": {name: installed[name] for name in sorted(installed) if name.lower().startswith(PACKAGES)},
        "environment": read_variables(os.environ, secrets),
    }


def read_variables(environ: Mapping[str, str], secrets: Secrets) -> dict[str, str]:
    """Variables that change what Weft does, with the values of the variables in SHOWN.

    All of the environment's secrets are noted, and values that are not shown are such.
    """
    cleaned = secrets.clean_variables(environ)
    read = {name: value for name, value in cleaned.items() if name in SHOWN or name.startswith(FAMILIES)}
    secrets.learn([value for name, value in read.items() if name not in SHOWN and value != REMOVED])
    return {name: value if name in SHOWN or value == REMOVED else NOT_SHOWN for name, value in read.items()}


def server_parts(process: Process, secrets: Secrets) -> dict[str, str]:
    """Command, environment, configuration file, plan and log of a server."""
    folder = working_folder(process.pid)
    command: dict[str, Any] = {
        "role": process.role,
        "command": secrets.clean_command(process.command, folder),
        "environment": read_variables(process_variables(process.pid), secrets),
    }
    for flag in ("--config", "--plan"):
        for name in flag_values(process.command, flag):
            command[flag] = read_settings(folder / name, secrets)
    parts = {f"servers/{process.pid}-command.json": as_text(command)}
    log = process_log(process.pid)
    if log is not None:
        logs_prompts = any(word.replace("_", "-").startswith("--enable-log-requests") for word in process.command)
        parts[f"logs/{process.pid}.log"] = without_prompts(log, logs_prompts=logs_prompts)
    return parts


def working_folder(pid: int) -> Path:
    """Folder that a process's relative paths begin at."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path()


def read_settings(path: Path, secrets: Secrets) -> Any:
    """Settings of a YAML or JSON file without secrets; a sentence if it cannot be read."""
    try:
        return secrets.clean_fields(load_yaml(read_regular_text(path, SETTINGS_BYTES)), path.parent)
    except OSError as error:
        return f"left out: {error_reason(error)}"
    except ValueError:
        return "left out: it cannot be read as YAML, so secrets could not be told from other fields"


async def server_figures(server: RunningServer, variables: Mapping[str, str]) -> dict[str, Any]:
    """Answers of a server about itself, or a sentence in the place of each that it does not give."""
    paths = {"monitor": "VLLM_API_KEY", "layout": "WEFT_ADMIN_KEY", "version": "VLLM_API_KEY", "load": "VLLM_API_KEY"}
    answers: dict[str, Any] = {"names": server.names, "url": server.url, "checkpoints": server.checkpoints}
    for path, key in paths.items():
        sent = {"Authorization": f"Bearer {variables[key]}"} if variables.get(key) else None
        try:
            with contextlib.closing(HttpClient(ServerAddress(server.url, sent))) as client:
                answers[path] = json.loads(await asyncio.wait_for(client.get(f"/{path}"), ANSWER_S))
        except (HttpFailure, TimeoutError, ValueError, ConfigError) as error:
            answers[path] = f"no answer: {f'{error}' or 'it took too long'}"
    return answers


def given_logs(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The ends of log files: from `weft cluster up`, and the files that were named.

    Raises ConfigError for a file that cannot be read.
    """
    for path in sorted((cache_path() / "cluster").glob("*/log*")):
        text = file_tail(path)
        if text is not None:
            yield f"logs/{path.parent.name}-{path.name}", without_prompts(text)
    for number, path in enumerate(paths):
        text = file_tail(path)
        if text is None:
            raise ConfigError(f"--log {path} cannot be read; give a file of yours", code="log-unreadable")
        yield f"logs/given-{number}-{path.name}", text


def as_text(content: object) -> str:
    """JSON for people."""
    return json.dumps(msgspec.to_builtins(content, str_keys=True), indent=1, ensure_ascii=False) + "\n"


def write_bundle(path: Path, files: Mapping[str, str]) -> None:
    """Write a new archive that only this user can read. Raises ConfigError."""
    folder = path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in sorted(files.items()):
                content = text.encode()
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(content))
    except FileExistsError:
        raise ConfigError(f"{path} exists; give another --output", code="bundle-exists") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error_reason(error)}; give another --output", code="cannot-write-bundle"
        ) from None
