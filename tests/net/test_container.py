"""The image's recipe, built in a bare Debian step by step, in namespaces of this machine, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.net.recipe import Stage, run_recipe
from weft.checkpoint.hub import demo

pytestmark = pytest.mark.long  # it installs torch

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
WAIT_S = 300
# Enough for this test; the image has more.
ARGUMENTS = {"EXTRAS": "gateway", "RAY_VERSION": "2.60.0", "KERNELS": "avx2"}
ASK = """
import json, urllib.request
body = {"model": "demo", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
asked = urllib.request.Request(
    "http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
print(json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"])
"""


def pip_settings() -> tuple[dict[str, str], list[Path]]:
    """This machine's own settings of pip, where it finds packages and whom it trusts, and folders that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        if "file:" not in value:  # an index whose files lie elsewhere
            settings[name.rpartition(".")[2]] = value.strip("'")
    return settings, [Path(word) for word in settings.get("find-links", "").split() if Path(word).is_dir()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bare Debian, with this machine's resolver and settings of pip."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("needs mmdebstrap")
    if os.geteuid() or subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"]).returncode:
        pytest.skip("needs root and namespaces")
    root = tmp_path_factory.mktemp("container") / "base"
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", SUITE, str(root)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"mmdebstrap fails: {made.stderr.strip().splitlines()[-1]}")
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    _, folders = pip_settings()
    for folder in folders:
        shutil.copytree(folder, root / str(folder).lstrip("/"), dirs_exist_ok=True)
    yield root
    shutil.rmtree(root.parent, ignore_errors=True)


@pytest.fixture(scope="module")
def image(base: Path) -> Stage:
    settings, _ = pip_settings()
    for name in ("cert", "constraint"):
        if name in settings:  # certificates: beside those of the package that a step installs
            shutil.copyfile(settings[name], base / f"etc/pip-{name}")
            settings[name] = f"/etc/pip-{name}"
    lines = ["[global]", *(f"{name} = {value}" for name, value in settings.items())]
    (base / "etc/pip.conf").write_text("\n".join(lines) + "\n")
    return run_recipe(ROOT / "containers/Containerfile", ROOT, base, ARGUMENTS, base.parent)


def test_the_image_serves_the_demo(image: Stage) -> None:
    """It runs as its own user, without a compiler, with the kernels that are built in; the health check says when."""
    cache = image.root / "var/lib/weft/.cache/weft"
    shutil.copy2(demo.fetch_demo(), cache)
    owner = image.root / "var/lib/weft"
    status = owner.stat()
    assert status.st_uid == 1000 and image.user == "weft" and cache.stat().st_uid == 1000
    os.chown(next(cache.glob("*.gguf")), 1000, 1000)
    missing = subprocess.run(image.command(["sh", "-c", "command -v g++ c++"]), capture_output=True, text=True)
    assert missing.returncode and not missing.stdout
    with serving(image, *image.entrypoint, "serve", "demo", "--max-model-len", "512", "--device", "cpu") as process:
        healthy = inside(image, process, image.health)
        deadline = time.monotonic() + WAIT_S
        while subprocess.run(healthy, capture_output=True).returncode:
            assert process.is_running() and time.monotonic() < deadline
            time.sleep(1)
        answer = subprocess.run(
            inside(image, process, ["python3", "-c", ASK]), capture_output=True, text=True, timeout=WAIT_S
        )
        assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr
        users = {child.uids().real for child in process.children(recursive=True)} | {process.uids().real}
        assert users == {1000}
        loaded = [row.path for child in process.children(recursive=True) for row in child.memory_maps()]
        assert any("/opt/weft/kernels/" in path for path in loaded)
    assert not (cache / "kernels").exists() or not list((cache / "kernels").glob("*.so"))


@contextmanager
def serving(image: Stage, *words: str) -> Iterator[psutil.Process]:
    """A process in the image, in a network of its own, which ends with the block."""
    started = subprocess.Popen(image.command(list(words), network=False), env={**os.environ, "LOOPBACK": "1"})
    try:
        deadline = time.monotonic() + WAIT_S
        while not (children := psutil.Process(started.pid).children()) or "weft" not in " ".join(children[0].cmdline()):
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield children[0]
    finally:
        for child in psutil.Process(started.pid).children():  # unshare itself takes no signals
            child.terminate()
        try:
            started.wait(WAIT_S)
        finally:
            started.kill()


def inside(image: Stage, process: psutil.Process, words: list[str]) -> list[str]:
    """Words that run a command beside a process of the image, as the image's user."""
    values = [f"{name}={value}" for name, value in image.environment.items()]
    user = ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups"]
    joined = ["nsenter", "--target", str(process.pid), "--net", "--mount", "--pid", f"--root={image.root}"]
    return [*joined, *user, "env", "-i", *values, *words]
