"""hosts.yaml: the machines of a cluster, the model and the flags that `weft cluster up` starts there.

Names that reach ssh or a shell are limited to characters that no shell and no program takes for anything else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.checkpoint.files.yaml_text import load_yaml
from weft.errors import ConfigError, error_reason
from weft.regular_files import open_regular

MAX_HOSTS = 256
MAX_FILE_BYTES = 1 << 18
HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Within single quotes every shell takes all of these literally. Left out: ' \ ! and control characters.
PYTHON = re.compile(r"[A-Za-z0-9_./~][^'\\!\x00-\x1f\x7f]*")

Port = Annotated[int, Meta(ge=1, le=65535)]
Gpu = Annotated[int, Meta(ge=0, le=1023)]


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine: its address for ssh, the Python that has Weft, and the GPUs to use: a count, or their numbers."""

    host: str
    user: str = ""
    port: Port | None = None
    python: str = "python3"
    gpus: Gpu | tuple[Gpu, ...] | None = None

    @property
    def visible_gpus(self) -> str | None:
        """Value of CUDA_VISIBLE_DEVICES, None for all GPUs."""
        if self.gpus is None:
            return None
        numbers = range(self.gpus) if isinstance(self.gpus, int) else self.gpus
        return ",".join(map(str, numbers))


class HostsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; machines are nodes in their order, the first is the head.

    `serve` are flags of weft serve. `variables` are names in the environment of weft cluster up that the servers get as
    well. `name` tells several engines on the same machines apart. `key_file` has the cluster key, `certificates` is the
    directory that weft cluster cert has written; "" for none.
    """

    hosts: Annotated[tuple[Machine, ...], Meta(min_length=1, max_length=MAX_HOSTS)]
    model: str = ""
    serve: dict[str, Any] = {}
    variables: tuple[str, ...] = ()
    name: str = ""
    key_file: str = ""
    certificates: str = ""


def read_hosts(path: str) -> HostsFile:
    """Read and check a file; its `name` and `key_file` are filled in. Raises ConfigError of one line."""
    file = Path(path).expanduser()
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error_reason(error)}; write one with hosts: and a - host: for every machine "
            "(docs/several-machines.md)",
            code="cannot-read-hosts",
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 10} KiB", code="hosts-file-too-large")
    try:
        hosts = msgspec.convert(load_yaml(text), HostsFile)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "")
        raise ConfigError(f"{path}: {problem}; see docs/several-machines.md", code="bad-hosts-file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}", code="hosts-file-not-yaml") from None
    stem = re.sub(r"[^A-Za-z0-9_.-]", "-", file.stem).lstrip(".-")[:64]
    hosts = msgspec.structs.replace(
        hosts,
        name=hosts.name or stem or "weft",
        key_file=str(_beside(file, hosts.key_file) if hosts.key_file else file.with_suffix(".key")),
        certificates=str(_beside(file, hosts.certificates)) if hosts.certificates else "",
    )
    try:
        _check(hosts)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", code=error.code) from None
    return hosts


def check_model(model: str) -> str:
    """Return a model's name or path. Raises ConfigError for a value that a command would take for something else."""
    if not model or model.startswith("-") or not model.isprintable():
        raise ConfigError(
            f"{model!r} is no model; give a name on the hub or a path that does not begin with -", code="bad-model-name"
        )
    return model


def _beside(file: Path, name: str) -> Path:
    """A path of the file, relative to the file's own folder."""
    return file.parent / Path(name).expanduser()


def _check(hosts: HostsFile) -> None:
    if not NAME.fullmatch(hosts.name):
        raise _wrong("name", hosts.name, "letters, digits, dots, dashes and underscores")
    seen = set()
    for machine in hosts.hosts:
        _check_machine(machine)
        place = (machine.host, machine.user, machine.port)
        if place in seen:
            raise ConfigError(f"host {machine.host} is there twice; each machine is one node", code="host-twice")
        seen.add(place)
    for name in hosts.variables:
        if not VARIABLE.fullmatch(name):
            raise _wrong("variables", name, "names of environment variables")
    if hosts.model:
        check_model(hosts.model)


def _check_machine(machine: Machine) -> None:
    if not HOST.fullmatch(machine.host):
        raise _wrong("host", machine.host, "a name or an address, as ssh takes it")
    if machine.user and not USER.fullmatch(machine.user):
        raise _wrong("user", machine.user, "a user's name of letters, digits, dots, dashes and underscores")
    of_other_user = machine.python.startswith("~") and not machine.python.startswith("~/")
    if of_other_user or not PYTHON.fullmatch(machine.python):
        raise _wrong("python", machine.python, "a program's path, without quotes, backslashes and !")


def _wrong(field: str, value: str, form: str) -> ConfigError:
    return ConfigError(f"{field} is {value!r}; it must be {form}", code=f"bad-{field}")
