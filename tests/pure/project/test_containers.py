"""The image's recipe, the kernels that are built ahead for it, and the script that starts Ray in containers."""

from __future__ import annotations

import os
import platform
import re
import stat
import subprocess
from pathlib import Path

import pytest

from weft.machine.native import build, library, prebuilt
from weft.machine.native.prebuilt import TARGETS, CpuTarget, find_prebuilt

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "containers/run_cluster.sh"

# --- Kernels built ahead ---

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 CPU")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of WEFT_KERNELS with a whole file for every kind of CPU."""
    for target in TARGETS:
        path = prebuilt.library_path(tmp_path, "bfloat16", target)
        path.write_text(target.name)
        path.chmod(0o755)
        library.digest_path(path).write_text(library._digest(path))
    monkeypatch.setenv(prebuilt.VARIABLE, str(tmp_path))
    monkeypatch.setattr(library, "objection", lambda path: None)  # pytest's folders lie below one that others may write
    return tmp_path


def found(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> str | None:
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: features)
    path = find_prebuilt("bfloat16")
    return None if path is None else path.read_text()


@X86
def test_the_best_library_that_the_cpu_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in TARGETS:
        assert found(monkeypatch, target.features | {"sse2", "aes"}) == target.name
        for missing in target.features:
            other = found(monkeypatch, target.features - {missing})
            assert other != target.name
    assert found(monkeypatch, frozenset({"sse2"})) is None
    assert find_prebuilt("float32") is None  # not in the folder
    monkeypatch.delenv(prebuilt.VARIABLE)
    assert found(monkeypatch, TARGETS[0].features) is None


@X86
def test_a_narrow_library_has_no_wider_vectors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for vnni, name in ((frozenset(), "avx2"), ({"avx_vnni"}, "avx2-vnni")):
        monkeypatch.setattr(prebuilt, "cpu_features", lambda vnni=vnni: TARGETS[0].features | vnni)
        path = find_prebuilt("bfloat16", narrow=True)
        assert path is not None and path.read_text() == name


@X86
def test_a_library_that_must_not_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, writable by others, or of other sources."""
    avx2 = TARGETS[-1]
    path = prebuilt.library_path(folder, "bfloat16", avx2)
    path.write_text("cut")
    assert found(monkeypatch, avx2.features) is None
    library.digest_path(path).write_text(library._digest(path))
    assert found(monkeypatch, avx2.features) == "cut"
    monkeypatch.setattr(library, "objection", lambda path: "others may write it")
    assert found(monkeypatch, avx2.features) is None
    monkeypatch.setattr(library, "objection", lambda path: None)
    monkeypatch.setattr(prebuilt, "FLAGS", (*prebuilt.FLAGS, "-g"))
    assert found(monkeypatch, avx2.features) is None


@X86
def test_the_compiler_knows_every_kind_of_cpu(tmp_path: Path) -> None:
    """The flags turn on what the kernels ask for, and nothing that the CPU need not have."""
    compiler = library.find_compiler()
    macros = {"avx512_bf16": "__AVX512BF16__", "avx512_vnni": "__AVX512VNNI__", "amx_bf16": "__AMX_BF16__"}
    macros |= {"avx512f": "__AVX512F__", "avx_vnni": "__AVXVNNI__", "avx2": "__AVX2__", "f16c": "__F16C__"}
    macros |= {"avx512_fp16": "__AVX512FP16__", "gfni": "__GFNI__", "aes": "__AES__"}
    for target in TARGETS:
        flags = prebuilt.target_flags("bfloat16", target)
        assert not any(flag.endswith("native") for flag in flags)
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
        defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        has = {feature for feature, macro in macros.items() if f"#define {macro} " in defined}
        assert has == target.features & macros.keys(), target.name


@X86
def test_a_library_is_built_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built in place of one for this machine; `build_library` takes it, and compiles nothing."""
    plain = CpuTarget("plain", ("-march=x86-64",), frozenset())
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    kernels = tmp_path / "kernels"
    for module in (prebuilt, build):
        monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setattr(prebuilt, "TARGETS", (plain,))
    built = build.build_all(kernels, (plain,))
    assert len(built) == len(library.CPP_TYPES) and all(stat.S_IMODE(it.stat().st_mode) == 0o755 for it in built)
    monkeypatch.setenv(prebuilt.VARIABLE, str(kernels))
    monkeypatch.setattr(library, "objection", lambda path: None)
    monkeypatch.setattr(build, "compile_library", lambda *arguments: pytest.fail("it compiles"))
    build.build_library.cache_clear()
    assert build.build_library("bfloat16") in built
    build.build_library.cache_clear()
    assert prebuilt.built_library() in map(str, built)


# --- The recipe ---


def test_the_recipe_ends_as_another_user_with_a_health_check() -> None:
    recipe = (ROOT / "containers/Containerfile").read_text()
    last = recipe.rpartition("\nFROM ")[2]
    assert re.search(r"^USER weft$", last, re.MULTILINE) and "useradd --uid 1000" in last
    assert last.index("COPY --from=build") < last.index("USER weft") < last.index("ENTRYPOINT")
    assert re.search(r"^HEALTHCHECK .*\n +CMD .*/health/ready", last, re.MULTILINE)
    extras = re.search(r"^ARG EXTRAS=(.*)$", recipe, re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    assert extras and all(f"\n{name} = [" in project for name in extras[1].split(","))
    torch = re.search(r'"torch>=(2\.\d+),<(2\.\d+)"', project)
    pinned = re.search(r"^ARG TORCH=torch==(2\.\d+)\.\d+$", recipe, re.MULTILINE)
    assert torch and pinned
    low, high, own = ([int(part) for part in it.split(".")] for it in (torch[1], torch[2], pinned[1]))
    assert low <= own < high


# --- run_cluster.sh ---


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A container program that only notes its words."""
    program = tmp_path / "runtime"
    program.write_text(f'#!/bin/sh\n[ "$1" = rm ] || printf \'%s\\n\' "$@" >{tmp_path}/words\n')
    program.chmod(0o755)
    return program


def start(runtime: Path, *words: str, address: str | None = "10.0.0.1") -> tuple[int, list[str], str]:
    variables = {"PATH": "/usr/bin:/bin", "RUNTIME": str(runtime)} | ({"VLLM_HOST_IP": address} if address else {})
    done = subprocess.run(["bash", str(SCRIPT), *words], env=variables, capture_output=True, text=True, timeout=30)
    noted = runtime.with_name("words")
    said = noted.read_text().splitlines() if noted.exists() else []
    noted.unlink(missing_ok=True)
    return done.returncode, said, done.stderr


def test_head_and_worker(runtime: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a cache; $(touch x)"
    cache.mkdir()
    status, head, err = start(runtime, "weft:1", "10.0.0.1", "--head", str(cache), "--env", "A=b c")
    assert status == 0, err
    image = head.index("weft:1")
    assert head[0] == "run" and head[image + 1 :] == [
        *("start", "--block", "--head", "--node-ip-address=10.0.0.1", "--port=6379")
    ]
    assert head[image - 2 : image] == ["--env", "A=b c"] and head[head.index("--entrypoint") + 1] == "ray"
    assert f"{cache}:/var/lib/weft/.cache/huggingface" in head and "VLLM_HOST_IP=10.0.0.1" in head
    assert not any("SYS_ADMIN" in word or "privileged" in word for word in head)
    relative = os.path.relpath(cache)
    status, worker, err = start(runtime, "weft:1", "10.0.0.1", "--worker", relative, address="10.0.0.2")
    assert status == 0, err
    assert worker[worker.index("weft:1") + 1 :] == [
        *("start", "--block", "--node-ip-address=10.0.0.2", "--address=10.0.0.1:6379")
    ]
    assert f"{cache}:/var/lib/weft/.cache/huggingface" in worker


@pytest.mark.parametrize("flag", [("-e", "{}"), ("--env", "{}"), ("-e{}",), ("--env={}",)], ids=str)
@pytest.mark.parametrize("set_too", [False, True])
def test_the_address_as_vllm_s_script_takes_it(runtime: Path, tmp_path: Path, flag: list[str], set_too: bool) -> None:
    words = [word.format("VLLM_HOST_IP=10.0.0.2") for word in flag]
    arguments = ("weft", "10.0.0.1", "--worker", str(tmp_path), "-e", "A=b", *words, "-v", "/x:/y")
    status, worker, err = start(runtime, *arguments, address="10.0.0.9" if set_too else None)
    assert status == 0 and "--node-ip-address=10.0.0.2" in worker, err
    assert worker[: worker.index("weft")][-len(arguments[4:]) :] == list(arguments[4:])
    assert "VLLM_HOST_IP=10.0.0.2" in worker and not any("10.0.0.9" in word for word in worker)


def test_the_capability_is_for_profiling_only(runtime: Path, tmp_path: Path) -> None:
    status, words, err = start(runtime, "--profile", "weft", "10.0.0.1", "--head", str(tmp_path))
    assert status == 0 and words.count("--cap-add=CAP_SYS_ADMIN") == 1, err


def test_wrong_words_of_the_script(runtime: Path, tmp_path: Path) -> None:
    cases = [
        (("weft", "10.0.0.1", "--head"), "10.0.0.1", "IMAGE"),
        (("weft", "10.0.0.1", "--both", str(tmp_path)), "10.0.0.1", "IMAGE"),
        (("weft", "10.0.0.1", "--head", str(tmp_path)), "10.0.0.9", "not 10.0.0.1"),
        (("weft", "10.0.0.1", "--head", str(tmp_path / "absent")), "10.0.0.1", "absent"),
        (("weft", "10.0.0.1", "--head", str(tmp_path)), None, "VLLM_HOST_IP"),
    ]
    for words, address, value in cases:
        status, called, err = start(runtime, *words, address=address)
        assert status != 0 and not called and value in err, (words, err)
