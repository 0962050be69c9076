"""Steps of a Containerfile, run in directories with file systems, for machines that have no program for images."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
# Of the host: devices, the resolver, and a proc of the new processes alone.
ENTER = """
set -eu
root=$1
shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
[ -z "${LOOPBACK-}" ] || ip link set lo up
exec chroot "$root" "$@"
"""


@dataclass
class Stage:
    """A stage of a recipe: its file system and what the steps so far have set."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    folder: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def command(self, words: list[str], *, network: bool = True) -> list[str]:
        """Words that run a command in the stage as its user; without `network` only with a loopback of its own."""
        values = [f"{name}={value}" for name, value in {**self.environment, **self._home()}.items()]
        user = [] if self.user == "root" else ["setpriv", "--reuid", self.user, "--regid", self.user, "--init-groups"]
        entering = [*ISOLATED, *([] if network else ["--net"]), "sh", "-c", ENTER, "sh", str(self.root)]
        inside = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", self.folder, *words]
        return [*entering, *user, "env", "-i", *values, *inside]

    def _home(self) -> dict[str, str]:
        lines = (self.root / "etc/passwd").read_text().splitlines()
        return {"HOME": next(line.split(":")[5] for line in lines if line.startswith(f"{self.user}:"))}


def run_recipe(recipe: Path, context: Path, base: Path, arguments: dict[str, str], work: Path) -> Stage:
    """Run a recipe's steps with build arguments, each stage in a copy of `base`; return the last stage.

    Raises AssertionError, with the step's output, for a step that fails, and for an instruction that is not known here.
    """
    build = Build(context, base, arguments, work)
    for instruction, rest in steps(recipe.read_text()):
        step = build.instructions.get(instruction)
        assert step, f"this reader does not know {instruction}"
        step(rest)
    return build.stage


class Build:
    """A build of a recipe: its stages up to now, the last of which the steps change."""

    def __init__(self, context: Path, base: Path, arguments: dict[str, str], work: Path) -> None:
        self._context, self._base, self._arguments, self._work = context, base, arguments, work
        self._stages: dict[str, Stage] = {}
        self._known: dict[str, str] = {}
        self.stage = Stage(base)
        self.instructions: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": lambda rest: run_step(self.stage, rest, self._known),
            "COPY": lambda rest: copy_step(self.stage, rest, self._stages, self._context),
            "WORKDIR": self._workdir,
            "USER": lambda rest: setattr(self.stage, "user", rest),
            "ENTRYPOINT": lambda rest: setattr(self.stage, "entrypoint", json.loads(rest)),
            "HEALTHCHECK": lambda rest: setattr(self.stage, "health", json.loads(rest.partition("CMD ")[2])),
            **dict.fromkeys(("VOLUME", "EXPOSE", "CMD"), lambda rest: None),
        }

    def _from(self, rest: str) -> None:
        self.stage = Stage(self._work / f"stage-{len(self._stages)}")
        subprocess.run(["cp", "--archive", str(self._base), str(self.stage.root)], check=True)
        self._stages[rest.rpartition(" AS ")[2] if " AS " in rest else ""] = self.stage

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self._known[name] = self._arguments.get(name, value)

    def _env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            self.stage.environment[name] = value.replace("$PATH", self.stage.environment["PATH"])

    def _workdir(self, rest: str) -> None:
        self.stage.folder = rest
        (self.stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)


def steps(text: str) -> list[tuple[str, str]]:
    """Instructions of a recipe with what follows them."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def run_step(stage: Stage, script: str, known: dict[str, str]) -> None:
    before = dict(stage.environment)
    stage.environment |= known  # arguments are variables of the steps only
    try:
        subprocess.run(
            stage.command(["sh", "-c", script]), check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"{script}\n{error.output[-4000:]}") from None
    finally:
        stage.environment = before


def copy_step(stage: Stage, rest: str, stages: dict[str, Stage], context: Path) -> None:
    *sources, target = rest.split()
    origin = context
    if sources[0].startswith("--from="):
        origin = stages[sources.pop(0).removeprefix("--from=")].root
    place = stage.root / os.path.join(stage.folder, target).lstrip("/")
    for name in sources:
        source = origin / name.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
