"""Command lines that are wrong: the exit status, the error's code, and the values that its message names."""

from __future__ import annotations

from typing import NamedTuple


class WrongLine(NamedTuple):
    words: str
    status: int
    code: str
    values: str = ""  # with blanks between them


COMMANDS = (
    WrongLine("srve m", 2, "unknown-command", "'srve' serve bench"),
    WrongLine("bench", 2, "subcommand-missing", "latency throughput"),
    WrongLine("bench latenzy m", 2, "subcommand-missing", "latency throughput"),
    WrongLine("pull m", 1, "unknown-tag", "'m' hf.co/OWNER/REPO:QUANT"),
    WrongLine("list m", 2, "unknown-command", "'list' ls?"),
    WrongLine("lsit", 2, "unknown-command", "'lsit' ls?"),
    WrongLine("show m", 2, "unknown-command", "'show' plan"),
    WrongLine("update", 2, "unknown-command", "scripts/setup"),
    WrongLine("uninstall", 2, "unknown-command", "~/.cache/weft"),
)

SERVE = (
    WrongLine("serve --config /nowhere.yaml", 2, "cannot-read-config", "/nowhere.yaml"),
    WrongLine("serve m --max-modell-len 5", 2, "unknown-flag", "--max-modell-len --max-model-len?"),
    WrongLine("serve m --tensor-paralel-size=5", 2, "unknown-flag", "--tensor-paralel-size --tensor-parallel-size?"),
    WrongLine("serve m --lora x", 2, "unknown-flag", "--lora LoRA merge"),
    WrongLine("serve m --zzz", 2, "unknown-flag", "--zzz"),
    WrongLine("serve m n", 2, "unexpected-argument", "'n'"),
    WrongLine("serve m --port", 2, "invalid-flag-value", "--port"),
    WrongLine("serve m --port x", 2, "invalid-flag-value", "--port 'x'"),
    WrongLine("serve m --dtype fp4", 2, "invalid-flag-value", "--dtype 'fp4' bfloat16"),
    WrongLine("serve m --max-model-len 1.5", 2, "invalid-flag-value", "'1.5'"),
    WrongLine("serve m --tensor-split 2;1", 2, "invalid-flag-value", "'2;1' 2,1"),
    WrongLine("serve m --max-model 5", 2, "unknown-flag", "--max-model"),
    WrongLine("serve m --distributed-executor-backend dask", 2, "invalid-flag-value", "'dask'"),
    WrongLine("serve m --gpus 2", 2, "unknown-flag", "--gpus --device-ids"),
    WrongLine("serve m --nodes 2", 2, "unknown-flag", "--nodes plan"),
    WrongLine("serve m --ctx-size 4", 2, "unknown-flag", "--ctx-size --max-model-len"),
    WrongLine("serve m -c 4", 2, "unknown-flag", "-c --max-model-len"),
    WrongLine("serve m --gpu 0", 2, "unknown-flag", "--gpu --device-ids"),
    WrongLine("serve m --context 32k", 2, "unknown-flag", "--context --max-model-len"),
    WrongLine("serve m -n 4", 2, "unknown-flag", "-n"),
    WrongLine("serve m -ngl 4", 2, "unknown-flag", "-ngl"),
    WrongLine("serve m --n-gpu-layers 4", 2, "unknown-flag", "--n-gpu-layers"),
    WrongLine("serve m -t 4", 2, "unknown-flag", "-t OMP_NUM_THREADS"),
)

RUN = (
    WrongLine("run m --prompt p --port 1", 2, "unknown-flag", "--port"),
    WrongLine("run m -n 4", 2, "unknown-flag", "-n --max-tokens"),
    WrongLine("run m --num-predict 4", 2, "unknown-flag", "--num-predict --max-tokens"),
    WrongLine("run -m x", 2, "unknown-flag", "-m"),
    WrongLine("run -hf x", 2, "unknown-flag", "-hf"),
    WrongLine("run m --temp 0", 2, "unknown-flag", "--temp --temperature"),
)

BENCH = (WrongLine("bench latency m --num-iters 0", 2, "invalid-flag-value", "'0' 1"),)

PLAN = (
    WrongLine("plan m --policy 1", 2, "unknown-flag", "--policy simulate"),
    WrongLine("plan m --temp 0", 2, "unknown-flag", "--temp --temperature run, chat"),
    WrongLine("plan m --zlo 1", 2, "unknown-flag", "--zlo"),
    WrongLine("plan m --gpu 4090", 2, "unknown-flag", "--gpu --gpus"),
    WrongLine("plan m --context 32k", 2, "unknown-flag", "--context --max-model-len"),
    WrongLine("plan m --format q4_k_m", 2, "unknown-flag", "--format --precision"),
    WrongLine("plan m --quant int4", 2, "unknown-flag", "--quant --quantization"),
    WrongLine("plan m --quiet", 2, "unknown-flag", "--quiet 2>/dev/null"),
    WrongLine("plan gpt2 --gpus 1x7900XTX", 1, "gpu-of-other-maker", "AMD"),
    WrongLine("plan gpt2 --gpus 24GB", 1, "memory-without-gpu", "RTX 4090"),
    WrongLine("plan qwen2.5vl:7b --gpus 4090", 1, "kind-not-run", "qwen2.5vl:7b"),
    WrongLine("plan Llama-3.1-8B --gpus 1xH10", 1, "unknown-gpu", "'H10' H100-SXM"),
    WrongLine("plan Lama-3.1-8B --gpus 1xH100", 1, "unknown-model", "'Lama-3.1-8B' Llama-3.1-8B"),
    WrongLine("plan gpt2 --gpus 0xH100", 1, "count-out-of-range", "0"),
    WrongLine("plan gpt2 --gpus=-1xH100", 1, "count-out-of-range", "-1"),
    WrongLine("plan gpt2 --gpus 10000xH100", 1, "too-many-gpus-in-machine", "16 --nodes 1250x8xH100-SXM"),
    WrongLine("plan gpt2 --gpus missing.yaml", 1, "cannot-read-hardware-file", "missing.yaml"),
    WrongLine("plan gpt2 --gpus H100x", 1, "unknown-gpu", "H100"),
    WrongLine("plan gpt2 --gpus 4xL40S@nvlink", 1, "gpu-without-nvlink", "L40S"),
    WrongLine("plan gpt2 --gpus 4xH100@ethernet", 1, "unknown-link", "ethernet nvlink pcie"),
    WrongLine("plan gpt2 --nodes 8xH100", 1, "bad-node-spec", "2x8xH100"),
    WrongLine("plan gpt2 --nodes 2x8xH100 --network fast", 1, "bad-network-speed", "fast"),
    WrongLine("plan gpt2 --gpus 1xH100 --network 100Gb", 2, "network-of-one-machine", "--nodes"),
    WrongLine("plan gpt2 --gpus 1xH100 --nodes 1x1xH100", 2, "gpus-and-nodes", "--gpus --nodes"),
    WrongLine("plan gpt2 --gpus 1xH100 --precision int5", 1, "unknown-precision", "int5 int8"),
    WrongLine("plan gpt2 --gpus 1xH100 --precision ,", 2, "precision-empty", "--precision"),
    WrongLine("plan gpt2 --gpus 1xH100 --kv-cache-dtype fp3", 1, "unknown-kv-cache-dtype", "fp3 fp8"),
    WrongLine("plan gpt2 --gpus 1xH100 --engine tgi", 2, "invalid-flag-value", "tgi vllm"),
    WrongLine("plan gpt2 --gpus 1xH100 --objective speed", 2, "invalid-flag-value", "speed latency"),
    WrongLine("plan gpt2 --gpus 1xH100 --concurrency 0", 2, "invalid-flag-value", "--concurrency 1"),
    WrongLine("plan gpt2 --gpus 1xH100 --concurrency many", 2, "invalid-flag-value", "many"),
    WrongLine("plan gpt2 --gpus 1xH100 --input-len 0", 2, "invalid-flag-value", "--input-len 1"),
    WrongLine("plan gpt2 --gpus 1xH100 --output-len -5", 2, "invalid-flag-value", "--output-len 1"),
    WrongLine("plan gpt2 --gpus 1xH100 --max-model-len 0", 2, "invalid-flag-value", "--max-model-len 1"),
    WrongLine("plan gpt2 --gpus 1xH100 --max-model-len 4096", 1, "max-model-len-above-model", "4096 1,024"),
    WrongLine(
        "plan gpt2 --gpus 1xH100 --input-len 600 --output-len 600 --max-model-len 1000",
        2,
        "lengths-above-max-model-len",
        "1,200 1,000",
    ),
    WrongLine("plan gpt2 --gpus 1xH100 --price 0", 2, "invalid-flag-value", "--price 0"),
    WrongLine("plan gpt2 --gpus 1xH100 --price nan", 2, "invalid-flag-value", "nan"),
    WrongLine("plan gpt2 --gpus 1xH100 --price cheap", 2, "invalid-flag-value", "cheap"),
    WrongLine("plan gpt2 --gpus 1xH100 --gpu-memory-utilization 1.5", 2, "invalid-flag-value", "1.5"),
    WrongLine("plan gpt2 --gpus 4xH100 --tensor-parallel-size 0", 2, "invalid-flag-value", "--tensor-parallel-size 1"),
    WrongLine("plan gpt2 --gpus 4xH100 --tensor-parallel-size 8", 2, "more-ranks-than-gpus", "8 4"),
    WrongLine("plan gpt2 --gpus 4xH100 -tp 2 -pp 2 -dp 2", 2, "more-ranks-than-gpus", "2 x 2 x 2 = 8 4"),
    WrongLine("plan gpt2 --gpus 16xH100 -tp 13", 2, "more-ranks-than-heads", "13 12"),
    WrongLine("plan gpt2 --gpus 16xH100 -pp 13", 2, "more-stages-than-layers", "13 12"),
    WrongLine("plan gpt2 --gpus 4xH100 -ep", 2, "no-experts", "gpt2"),
    WrongLine(
        "plan Qwen/Qwen3-30B-A3B --gpus 4xH100 --expert-parallel-size 2", 2, "expert-size-without-expert-parallel", "2"
    ),
    WrongLine(
        "plan mistralai/Mixtral-8x7B-v0.1 --gpus 16xH100 -tp 4 -dp 4 -ep", 2, "more-expert-ranks-than-experts", "16 8"
    ),
    WrongLine(
        "plan mistralai/Mixtral-8x7B-v0.1 --gpus 4xH100 -tp 2 -dp 2 -ep --expert-parallel-size 3",
        2,
        "expert-size-not-dividing",
        "1,2,4",
    ),
    WrongLine(
        "plan mistralai/Mixtral-8x7B-v0.1 --gpus 4xH100 -ep --expert-parallel-size 9",
        2,
        "more-expert-ranks-than-experts",
        "9 8",
    ),
    WrongLine(
        "plan mistralai/Mixtral-8x7B-v0.1 --gpus 4xH100 -dp 2 -ep --device-map balanced",
        1,
        "device-map-beside-other-cut",
        "--enable-expert-parallel attention",
    ),
    WrongLine("plan gpt2 --gpus 2xH100 --tensor-split 2,0", 2, "bad-tensor-split-weight", "0.0"),
    WrongLine("plan gpt2 --gpus 2xH100 --tensor-split 2,1 -tp 3", 2, "tensor-split-of-other-size", "2 3"),
    WrongLine("plan gpt2 --gpus 2xH100 --pipeline-split 6,5", 2, "pipeline-split-of-other-sum", "11 12"),
    WrongLine("plan gpt2 --gpus 2xH100 --pipeline-split 12,0", 2, "pipeline-split-of-other-sum", "12"),
    WrongLine("plan gpt2 --gpus 2xH100 --pipeline-split 6,6 -pp 3", 2, "pipeline-split-of-other-size", "2 3"),
    WrongLine("plan gpt2 --gpus 1xH100 --gpuz 2", 2, "unknown-flag", "--gpuz --gpus"),
    WrongLine("plan --gpus 1xH100 --html x.html", 2, "model-missing", "--html"),
    WrongLine("plan --gpus 1xH100 --emit vllm", 2, "model-missing", "--emit"),
    WrongLine("plan --gpus 1xH100 --revision main", 2, "model-missing", "--revision"),
    WrongLine("plan --gpus 1xH100 --device-map auto", 2, "model-missing", "--device-map"),
    WrongLine("plan --check nonsense", 1, "bad-claim", "nonsense"),
    WrongLine("plan gpt2 --check nonsense", 2, "flag-in-claim", "MODEL"),
    WrongLine("plan -q int4 --check nonsense", 2, "flag-in-claim", "--quantization"),
    WrongLine("plan gpt2 --gpus 1xH100 --json --html -", 2, "two-outputs-to-stdout", "--json --html"),
    WrongLine("plan gpt2 --gpus 1xH100 --html /nowhere/plan.html", 2, "cannot-write-output", "/nowhere/plan.html"),
    WrongLine("plan Llama-3.1-8B --gpus 1xH100 -q int4 --engine vllm", 2, "quantization-of-other-engine", "int4 vllm"),
    WrongLine("plan Llama-3.1-8B --gpus 1xH100 -q int4 --precision bf16", 2, "quantization-and-precision", "int4 bf16"),
    WrongLine(
        "plan Llama-3.1-8B --gpus 1xH100 -q int4 --max-num-batched-tokens 0",
        2,
        "invalid-flag-value",
        "max-num-batched-tokens",
    ),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --slo ttft_p95=1s", 2, "load-missing", "ttft_p95=1s --users --rate"),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --users 300", 2, "promise-missing", "--users 300 --slo"),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --rate 4", 2, "promise-missing", "--rate 4 --slo"),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --think 4s", 2, "promise-missing", "--think --slo"),
    WrongLine(
        "plan Llama-3.2-1B --gpus 1xL40S --rate 4 --think 4s --slo ttft_p95=1s",
        2,
        "think-without-users",
        "--think --users",
    ),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --rate 4 --users 4 --slo ttft_p95=1s", 2, "two-loads", "--rate --users"),
    WrongLine(
        "plan Llama-3.2-1B --gpus 1xL40S --users 4 --concurrency 4 --slo ttft_p95=1s",
        2,
        "excluded-by-slo",
        "--concurrency",
    ),
    WrongLine(
        "plan Llama-3.2-1B --gpus 1xL40S --users 4 --emit vllm --slo ttft_p95=1s", 2, "excluded-by-slo", "--slo --emit"
    ),
    WrongLine(
        'plan Llama-3.2-1B --gpus 1xL40S --users 4 --slo ttft_p95=1s -sc {"method":"ngram"}',
        2,
        "excluded-by-slo",
        "--speculative-config",
    ),
    WrongLine("plan Llama-3.2-1B --gpus 1xL40S --users 4 --slo soon", 1, "bad-slo-target", "'soon'"),
)

LOAD = "Llama-3.1-8B --gpus 2xH100 --engine vllm --output-len 64 --duration 40s"
SIMULATE = (
    WrongLine(f"simulate {LOAD} --rate -1", 2, "invalid-flag-value", "'-1' 0"),
    WrongLine(f"simulate {LOAD} --rate inf", 2, "invalid-flag-value", "'inf'"),
    WrongLine(f"simulate {LOAD} --rate 1,2", 2, "invalid-flag-value", "'1,2' --rates"),
    WrongLine(f"simulate {LOAD} --rates 1,x", 2, "invalid-flag-value", "'x' 0.5"),
    WrongLine(f"simulate {LOAD} --rate 1 --policy fastest", 2, "invalid-flag-value", "'fastest'"),
    WrongLine(f"simulate {LOAD} --rate 1 --burstiness 0", 2, "invalid-flag-value", "'0'"),
    WrongLine(f"simulate {LOAD} --rate 1 --users 2", 2, "two-loads", "--rate --users"),
    WrongLine(f"simulate {LOAD} --think 2s --rate 1", 2, "think-without-users", "--think --users"),
    WrongLine(f"simulate {LOAD} --rate 1 --replicas 0", 2, "invalid-flag-value", "'0' 1"),
    WrongLine(f"simulate {LOAD} --rate 1 --sample-replicas some", 2, "invalid-flag-value", "'some'"),
    WrongLine(f"simulate {LOAD} --rate 1 --slo ttft_p95", 1, "bad-slo-target", "'ttft_p95'"),
    WrongLine(f"simulate {LOAD} --rate 1 --find replicas", 2, "promise-missing", "--find replicas --slo"),
    WrongLine(f"simulate {LOAD} --find replicas --slo ttft_p95=1s", 2, "load-missing", "--find replicas --rate"),
    WrongLine(
        f"simulate {LOAD} --find replicas --rate 1 --replicas 2 --slo ttft_p95=1s",
        2,
        "found-number-given",
        "--replicas",
    ),
    WrongLine(f"simulate {LOAD} --find rate --rate 1 --slo ttft_p95=1s", 2, "found-number-given", "--rate"),
    WrongLine(f"simulate {LOAD} --find rate --rates 1,2 --slo ttft_p95=1s", 2, "find-with-several-rates", "--rates"),
    WrongLine(f"simulate {LOAD} --find rate --users 3 --slo ttft_p95=1s", 2, "find-with-users", "--users"),
    WrongLine(f"simulate {LOAD} --rate 1 --input-len 9:3", 1, "length-out-of-range", "--input-len '9:3'"),
    WrongLine(f"simulate {LOAD} --rate 1 --input-len 131072", 1, "lengths-above-model", "131,136 131,072"),
    WrongLine(f"simulate {LOAD} --rate 1 --prefix-len 131072", 1, "prefix-above-model", "--prefix-len 131,072"),
    WrongLine(f"simulate {LOAD} --rate 1e9", 1, "too-many-requests", "10,000,000 --duration"),
    WrongLine(f"simulate {LOAD} --users 1000000000", 1, "too-many-requests", "1,000,000,000"),
    WrongLine(f"simulate {LOAD} --rate 1 --duration 1000000h", 1, "too-many-requests", "3.6e+09 1e+06 h"),
    WrongLine(f"simulate {LOAD} --rate 1 --replicas 1000000", 1, "too-many-replicas", "1,000,000 10,000"),
    WrongLine(
        f"simulate {LOAD} --find replicas --rate 100000000 --slo ttft_p95=1h --duration 50ms",
        1,
        "too-many-replicas",
        "10,000",
    ),
    WrongLine(f"simulate {LOAD} --rate 1 --input-len lognormal:1e300:1", 1, "lognormal-out-of-range", "100,000,000"),
    WrongLine(f"simulate {LOAD} --rate 1 --input-len lognormal:100:1e300", 1, "lognormal-out-of-range", "100,000,000"),
    WrongLine(f"simulate {LOAD} --rate 1 --duration 10", 1, "bad-duration", "--duration '10'"),
    WrongLine(f"simulate {LOAD} --rate 1 --warmup 40s", 2, "warmup-too-long", "40"),
    WrongLine(
        f"simulate {LOAD} --rate 1 --trace none.csv --lengths none.csv", 2, "lengths-given-twice", "--output-len"
    ),
)

REPLICAS = "Llama-3.1-8B-Instruct --gpus 2xL40S --price 0.9"
COST = (
    WrongLine(f"cost {REPLICAS} --against gpt4omini", 1, "unknown-api-price", "'gpt4omini' gpt-4o-mini"),
    WrongLine(f"cost {REPLICAS} --api-price 1", 2, "invalid-flag-value", "'1' 0.15/0.60"),
    WrongLine(f"cost {REPLICAS} --api-price 0/0", 2, "invalid-flag-value", "'0/0' 0.15/0.60"),
    WrongLine(f"cost {REPLICAS} --api-price 1/inf", 2, "invalid-flag-value", "'1/inf' 0.15/0.60"),
    WrongLine(f"cost {REPLICAS} --demand 0,0", 2, "invalid-flag-value", "'0,0'"),
    WrongLine(f"cost {REPLICAS} --demand -1", 2, "invalid-flag-value", "'-1'"),
    WrongLine(f"cost {REPLICAS} --demand missing.csv", 2, "invalid-flag-value", "missing.csv"),
    WrongLine(f"cost {REPLICAS} --utilization 0", 2, "invalid-flag-value", "'0'"),
    WrongLine(f"cost {REPLICAS} --cached 1.5", 2, "invalid-flag-value", "'1.5'"),
    WrongLine("cost Llama-3.1-8B-Instruct --gpus 2xL40S", 2, "price-missing", "--price 2.49"),
)

BY_COMMAND = {
    "commands": COMMANDS,
    "serve": SERVE,
    "run": RUN,
    "bench": BENCH,
    "plan": PLAN,
    "simulate": SIMULATE,
    "cost": COST,
}
