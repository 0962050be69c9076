"""Configurations of weft plan --emit, judged by their readers: nginx, Compose, KubeRay, Python, Infernet."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import crossplane
import jsonschema
import msgspec
import pytest
import yaml

from tests.pure.exports import MORE, PLANS, VLLM, emit, flags, parts, plans
from weft.cli.flags.flags import engine_config as cli_engine_config
from weft.cli.parser import find_command, parse_command
from weft.engine.client.arguments import engine_config
from weft.engine.cluster.ray_cluster import sized_ranks
from weft.machine.hardware.cluster import Cluster, Node, parse_gpus
from weft.machine.hardware.cpu import CpuSpeed
from weft.machine.hardware.host import Host
from weft.probes.machine import cpu_spec
from weft.ray.serve import ServeArguments

DATA = Path(__file__).parents[2] / "data"


# --- nginx ---


NGINX = [*(("nginx", plan) for plan in plans("nginx")), ("compose", "replicas-int4")]


def site(target: str, plan: str) -> str:
    return parts(target, plan)["nginx.conf" if target == "compose" else "nginx"]


@pytest.mark.parametrize(("target", "plan"), NGINX)
def test_crossplane_reads_it(target: str, plan: str, tmp_path: Path) -> None:
    (tmp_path / "site.conf").write_text(site(target, plan))
    whole = tmp_path / "nginx.conf"
    whole.write_text(f"events {{}}\nhttp {{\n    include {tmp_path}/site.conf;\n}}\n")
    read = crossplane.parse(str(whole), strict=True, comments=False)
    assert read["status"] == "ok", read["errors"]
    (upstream, *servers) = read["config"][1]["parsed"]
    directives = [it["directive"] for it in upstream["block"]]
    assert directives.index("least_conn") < directives.index("keepalive")
    ends = [it["args"][0] for it in upstream["block"] if it["directive"] == "server"]
    assert len(ends) == len(set(ends)) >= 1
    proxied = servers[-1]["block"][-1]
    said = {it["directive"]: it["args"] for it in proxied["block"]}
    assert said["proxy_buffering"] == ["off"] and said["proxy_http_version"] == ["1.1"]
    # A POST that was sent is not sent again.
    assert said["proxy_next_upstream"] == ["error", "timeout"]
    assert any(it["directive"] == "location" and it["args"] == ["^~", "/metrics"] for it in servers[-1]["block"])
    tls = target == "nginx"
    assert any(it["directive"] == "ssl_certificate" for it in servers[-1]["block"]) == tls


def test_crossplane_reads_the_page_s_site(tmp_path: Path) -> None:
    (site_text,) = re.findall(r"```nginx\n(.*?)```", (DATA.parents[1] / "docs/nginx.md").read_text(), re.DOTALL)
    (tmp_path / "nginx.conf").write_text(f"events {{}}\nhttp {{\n{site_text}}}\n")
    read = crossplane.parse(str(tmp_path / "nginx.conf"), strict=True, comments=False)
    assert read["status"] == "ok", read["errors"]


def test_nginx_has_every_replica(tmp_path: Path) -> None:
    assert re.findall(r"server (127\S+)", site("nginx", "replicas-int4")) == ["127.0.0.1:8000", "127.0.0.1:8001"]
    nodes = re.findall(r"server (NODE\S+)", site("nginx", "two-nodes-replicas"))
    assert nodes == ["NODE0_ADDRESS:9000", "NODE1_ADDRESS:9000"]
    assert re.findall(r"server (replica\S+)", site("compose", "replicas-int4")) == ["replica-0:8000", "replica-1:8000"]


@pytest.mark.skipif(not shutil.which("nginx") or not shutil.which("openssl"), reason="needs nginx and openssl")
@pytest.mark.parametrize(("target", "plan"), NGINX)
def test_nginx_accepts_it(target: str, plan: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "1", "-subj", "/CN=llm.example.org", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    written = site(target, plan).replace("CERTIFICATE_KEY;", f"{key};").replace("CERTIFICATE;", f"{certificate};")
    written = re.sub(r"NODE\d_ADDRESS|replica-\d", "127.0.0.1", written).replace("SERVER_NAME", "llm.example.org")
    (tmp_path / "site.conf").write_text(written)
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\n"
        f"    access_log off;\n    include {tmp_path}/site.conf;\n}}\n"
    )
    tested = subprocess.run(["nginx", "-t", "-q", "-c", str(whole)], capture_output=True, text=True)
    assert tested.returncode == 0 and tested.stderr == ""


# --- Compose ---


@pytest.fixture(scope="module")
def compose() -> Any:
    return jsonschema.Draft202012Validator(json.loads((DATA / "compose/compose-spec.json").read_text()))


@pytest.mark.parametrize("plan", plans("compose"))
def test_compose_s_schema_accepts_it(plan: str, compose: Any) -> None:
    files = parts("compose", plan)
    read = [yaml.safe_load(text) for name, text in files.items() if not name.endswith(".conf")]
    assert read
    for content in read:
        compose.validate(content)


def test_the_schema_refuses_what_is_none(compose: Any) -> None:
    content = yaml.safe_load(parts("compose", "one-gpu")["compose"])
    content["services"]["replica-0"]["shm_sizes"] = "1gb"
    assert not compose.is_valid(content)


def test_a_service_for_each_replica() -> None:
    files = parts("compose", "replicas-int4")
    services = yaml.safe_load(files["compose.yaml"])["services"]
    assert list(services) == ["replica-0", "replica-1", "nginx"]
    gpus = [services[f"replica-{n}"]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for n in (0, 1)]
    assert gpus == [["0", "1"], ["2", "3"]]
    assert "ports" not in services["replica-0"] and services["nginx"]["ports"] == ["127.0.0.1:8000:80"]
    assert services["replica-0"]["command"][:2] == [
        "serve",
        "${MODEL:?an AWQ or GPTQ 4-bit checkpoint of Qwen/Qwen2.5-32B-Instruct}",
    ]


def test_compose_with_vllm() -> None:
    services = yaml.safe_load(parts("compose", "engine-vllm")["compose.yaml"])["services"]
    one = services["replica-1"]
    assert one["entrypoint"] == ["vllm", "serve"] and one["command"][0] == "Qwen/Qwen2.5-7B-Instruct"
    assert flags(one["command"]).keys() <= VLLM and "shm_size" in one and "build" not in one
    assert one["healthcheck"]["test"][-1].count("/health'") == 1


def test_compose_one_replica_needs_no_balancer() -> None:
    services = yaml.safe_load(parts("compose", "one-gpu")["compose"])["services"]
    assert list(services) == ["replica-0"] and services["replica-0"]["ports"] == ["127.0.0.1:8000:8000"]


def services(words: str) -> dict[str, Any]:
    status, out, err = emit("compose", words)
    assert status == 0, err
    found: dict[str, Any] = yaml.safe_load(re.split(r"^# ======== nginx.conf", out, flags=re.MULTILINE)[0])["services"]
    return found


def test_containers_keep_the_order_of_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives GPUs in the machine's order, and CUDA sorts them by speed: the parts of a pipeline change places."""
    one = services("Qwen3-14B --gpus 1xRTX4090+1xRTX3060 --max-model-len 2048 --engine vllm")["replica-0"]
    assert one["environment"]["VLLM_PP_LAYER_PARTITION"] == "11,29"  # the smaller card is the first
    assert one["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["1", "0"]
    assert one["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert one["environment"]["CUDA_VISIBLE_DEVICES"] == "1,0"
    usual = services("Qwen2.5-14B-Instruct --gpus 4xRTX4090 -pp 2 -dp 2 --max-model-len 8192")["replica-1"]
    assert "CUDA_VISIBLE_DEVICES" not in usual["environment"]
    cluster = parse_gpus("2xRTX4090")
    monkeypatch.setattr("weft.cli.plan_question.described_cluster", lambda said: cluster)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,GPU-aa")
    named = services("Qwen2.5-14B-Instruct -pp 2 --max-model-len 8192")["replica-0"]
    assert named["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-bb,GPU-aa"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    numbered = services("Qwen2.5-14B-Instruct -pp 2 --max-model-len 8192")["replica-0"]
    assert numbered["environment"]["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_the_image_of_weft_is_that_of_the_recipe() -> None:
    root = DATA.parents[1]
    service = services("Qwen3-0.6B --gpus 1xL4")["replica-0"]
    recipe = (root / service["build"]["dockerfile"]).read_text()
    copied = re.search(r"^COPY (pyproject.*) \./$", recipe, re.MULTILINE)
    assert copied and all((root / name).exists() for name in copied[1].split())
    assert all(volume.partition(":")[2] in recipe for volume in service["volumes"])
    assert "args" not in service["build"]


def test_a_cpu_needs_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(hostname="", cores=(0,), memory_total_bytes=1, memory_free_bytes=16 << 30)
    cpu = cpu_spec(host, CpuSpeed(4e10, 1e12))
    monkeypatch.setattr(
        "weft.cli.plan_question.described_cluster", lambda said: Cluster((Node((cpu,), "memory"),), 1e9)
    )
    one = services("Qwen3-0.6B")["replica-0"]
    assert one["build"]["args"] == {"TORCH_INDEX": "https://download.pytorch.org/whl/cpu"} and "deploy" not in one


@pytest.mark.parametrize("name", ["1e3", "0o17", "0x1F", "1_0", "12", ".5", "1.", ".inf", ".NaN", "on", "null", "~"])
def test_names_that_look_like_numbers_are_quoted(name: str) -> None:
    """Compose and Kubernetes read YAML by other rules than Python does."""
    out = emit("compose", f"Qwen3-0.6B --gpus 1xL4 --served-model-name {name}")[1]
    assert f"- '{name}'\n" in out or name == "1_0"
    assert name in yaml.safe_load(out)["services"]["replica-0"]["command"]


# --- KubeRay ---


@pytest.fixture(scope="module")
def kuberay() -> Any:
    return json.loads((DATA / "kuberay/kuberay.json").read_text())


def check_part(schema: Any, part: str, value: Any) -> None:
    """Judge a value by one of the schema's definitions."""
    jsonschema.Draft202012Validator({"$defs": schema["$defs"], "$ref": f"#/$defs/{part}"}).validate(value)


def check_manifest(schema: Any, manifest: Any) -> Any:
    """Judge a manifest by the schema; return its cluster."""
    jsonschema.Draft202012Validator(schema).validate(manifest)
    spec = manifest["spec"]
    return spec["rayClusterConfig" if manifest["kind"] == "RayService" else "rayClusterSpec"]


def given_gpus(cluster: Any) -> int:
    """Number of GPUs that Kubernetes gives the workers."""
    given = 0
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        (gpus,) = (int(count) for name, count in container["resources"]["limits"].items() if name.endswith("/gpu"))
        assert group["rayStartParams"]["num-gpus"] == f"{gpus}"
        given += gpus * group["replicas"]
    return given


def images(cluster: Any) -> set[str]:
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    return {group["template"]["spec"]["containers"][0]["image"] for group in groups}


def uses_vllm(plan: str) -> bool:
    return "--engine vllm" in (PLANS | MORE)[plan]


@pytest.mark.parametrize("plan", [plan for plan in plans("kuberay") if uses_vllm(plan)])
def test_kuberay_s_fields_with_vllm(plan: str, kuberay: Any) -> None:
    manifest = yaml.safe_load(parts("kuberay", plan)["kuberay"])
    cluster = check_manifest(kuberay, manifest)
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    check_part(kuberay, "serve", serve)
    (config,) = serve["applications"][0]["args"]["llm_configs"]
    assert {name.replace("_", "-") for name in config["engine_kwargs"]} <= VLLM
    bundles, replicas = config["placement_group_config"]["bundles"], config["deployment_config"]["num_replicas"]
    assert given_gpus(cluster) == len(bundles) * replicas
    # Kubernetes sets variables from the names of services, and vLLM reads those that begin with its name.
    assert not manifest["metadata"]["name"].startswith("vllm")
    (image,) = images(cluster)
    assert f":{cluster['rayVersion']}-" in image or plan == "amd"


@pytest.mark.parametrize("plan", [plan for plan in plans("kuberay") if not uses_vllm(plan)])
def test_kuberay_s_fields_with_weft(plan: str, kuberay: Any) -> None:
    """A RayService whose application `weft.ray.serve` builds, and a RayJob whose command `weft batch` reads."""
    written = {name: yaml.safe_load(text) for name, text in parts("kuberay", plan).items()}
    service, job = written["rayservice.yaml"], written["rayjob.yaml"]
    cluster = check_manifest(kuberay, service)
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    check_part(kuberay, "serve", serve)
    (application,) = serve["applications"]
    wanted = msgspec.convert(application["args"], ServeArguments)
    config = engine_config(wanted.model, wanted.engine)
    replicas, gpus = wanted.deployment["num_replicas"], wanted.deployment["ray_actor_options"]["num_gpus"]
    ranks = sized_ranks(config)
    assert given_gpus(cluster) == replicas * (gpus or ranks)
    assert gpus == (0 if config.executor == "ray" else len(set(config.device_ids or range(ranks))))
    assert images(cluster) == {"REPLACE_WITH_IMAGE"}
    assert f"ARG RAY_VERSION={cluster['rayVersion']}\n" in (DATA.parents[1] / "containers/Containerfile").read_text()
    own = check_manifest(kuberay, job)
    assert given_gpus(own) == given_gpus(cluster)
    program, *words = shlex.split(job["spec"]["entrypoint"])
    command, flags = find_command(words)
    arguments = parse_command(command, flags)
    assert (program, command.name, arguments.ray) == ("weft", "batch", True)
    asked = cli_engine_config(arguments)
    assert sized_ranks(asked) == ranks and asked.max_model_len == config.max_model_len
    mounts = own["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert all(name.startswith(mounts[0]["mountPath"]) for name in arguments.argument)


def test_the_schema_refuses_what_kuberay_does_not_have(kuberay: Any) -> None:
    job = yaml.safe_load(parts("kuberay", "one-gpu")["rayjob.yaml"])
    validator = jsonschema.Draft202012Validator(kuberay)
    for change in ({"retries": 3}, {"backoffLimit": "3"}, {"submissionMode": "SSHMode"}):
        assert not validator.is_valid({**job, "spec": {**job["spec"], **change}}), change
    assert validator.is_valid({**job, "spec": {**job["spec"], "submissionMode": "HTTPMode"}})


@pytest.mark.parametrize("name", ["模型", "..", "$$", "A B!", "x" * 100, "-" * 39 + "x" * 9])
def test_every_name_becomes_a_label(name: str) -> None:
    _, out, _ = emit("kuberay", "Qwen3-0.6B --gpus 1xL4 --engine vllm", "--served-model-name", f"a/{name}")
    manifest = yaml.safe_load(out)
    labels = [manifest["metadata"]["name"]]
    labels += [it["groupName"] for it in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]]
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?|\d[a-z0-9-]*[a-z0-9]", it) for it in labels), labels
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["llm_configs"][0]["model_loading_config"]["model_id"] == f"a/{name}"


def test_kuberay_has_no_image_for_amd() -> None:
    out = parts("kuberay", "amd")["kuberay"]
    assert "rayproject/ray-llm" not in out and "# - REPLACE_WITH_IMAGE: an image with Ray" in out


def test_kuberay_spans_nodes_only_where_the_plan_does() -> None:
    def strategy(plan: str) -> str:
        manifest = yaml.safe_load(parts("kuberay", plan)["kuberay"])
        (config,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]["llm_configs"]
        return str(config["placement_group_config"]["strategy"])

    assert (strategy("two-nodes-vllm"), strategy("amd")) == ("PACK", "STRICT_PACK")


# --- Transformers ---


@pytest.mark.parametrize("plan", plans("transformers"))
def test_python_reads_the_script(plan: str) -> None:
    tree = ast.parse(parts("transformers", plan)["transformers"])
    names = {it.target.id for it in tree.body if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)}
    assert names == {"DEVICE_MAP", "MAX_MEMORY"}
    assert "trust_remote_code" not in parts("transformers", plan)["transformers"]


# --- Infernet ---


def test_settings_that_a_node_reads() -> None:
    files = parts("infernet", "replicas-int4")
    assert list(files) == ["infernet.env", "infernet-engine.json", "weft.sh"]
    lines = [line for line in files["infernet.env"].splitlines() if line and not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert variables == {
        "INFERNET_ENGINE_BACKEND": "vllm",
        "INFERNET_ENGINE_MODEL": "Qwen/Qwen2.5-32B-Instruct",
        "VLLM_HOST": "http://127.0.0.1:8000",
        "VLLM_MODEL": "Qwen/Qwen2.5-32B-Instruct",
    }
    engine = json.loads(files["infernet-engine.json"])
    assert engine == {
        "engine": {"backend": "vllm", "model": variables["VLLM_MODEL"], "ollamaHost": variables["VLLM_HOST"]}
    }
    assert "RTX 4090 is 16-24gb" in files["infernet.env"] and "the other replicas" in files["infernet.env"]
    assert list(parts("infernet", "engine-vllm"))[-1] == "vllm.sh"
    assert files["weft.sh"].count("--reset-on-error") == files["weft.sh"].count("--list-served-only") == 2
    assert not any("--reset-on-error" in text for text in parts("weft", "replicas-int4").values())
