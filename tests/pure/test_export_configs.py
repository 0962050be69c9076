"""Configurations of weft plan --emit, judged by their readers: nginx, Compose, KubeRay, Python, Infernet."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import crossplane
import jsonschema
import pytest
import yaml

from tests.pure.exports import VLLM, flags, parts, plans

DATA = Path(__file__).parents[1] / "data"


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
    tls = target == "nginx"
    assert any(it["directive"] == "ssl_certificate" for it in servers[-1]["block"]) == tls


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


# --- KubeRay ---


@pytest.mark.parametrize("plan", plans("kuberay"))
def test_kuberay_s_fields(plan: str) -> None:
    schema = json.loads((DATA / "kuberay/rayservice.json").read_text())
    manifest = yaml.safe_load(parts("kuberay", plan)["kuberay"])
    jsonschema.validate(manifest, schema)
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    jsonschema.validate(serve, {**schema, **schema["$defs"]["serve"], "$defs": schema["$defs"]})
    (config,) = serve["applications"][0]["args"]["llm_configs"]
    assert {name.replace("_", "-") for name in config["engine_kwargs"]} <= VLLM
    # Kubernetes gives as many GPUs as the replicas take.
    cluster = manifest["spec"]["rayClusterConfig"]
    given = 0
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        (gpus,) = (int(count) for name, count in container["resources"]["limits"].items() if name.endswith("/gpu"))
        assert group["rayStartParams"]["num-gpus"] == f"{gpus}"
        given += gpus * group["replicas"]
    assert given == len(config["placement_group_config"]["bundles"]) * config["deployment_config"]["num_replicas"]
    # Kubernetes sets variables from the names of services, and vLLM reads those that begin with its name.
    assert not manifest["metadata"]["name"].startswith("vllm")
    images = {cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"], container["image"]}
    assert len(images) == 1 and cluster["rayVersion"] in images.pop()


def test_kuberay_spans_nodes_only_where_the_plan_does() -> None:
    def strategy(plan: str) -> str:
        manifest = yaml.safe_load(parts("kuberay", plan)["kuberay"])
        (config,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]["llm_configs"]
        return str(config["placement_group_config"]["strategy"])

    assert (strategy("two-nodes"), strategy("tensor")) == ("PACK", "STRICT_PACK")


# --- Transformers ---


@pytest.mark.parametrize("plan", plans("transformers"))
def test_python_reads_the_script(plan: str) -> None:
    tree = ast.parse(parts("transformers", plan)["transformers"])
    names = {it.target.id for it in tree.body if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name)}
    assert names == {"DEVICE_MAP", "MAX_MEMORY"}
    assert "trust_remote_code" not in parts("transformers", plan)["transformers"]


# --- Infernet ---


def test_what_a_node_reads() -> None:
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
