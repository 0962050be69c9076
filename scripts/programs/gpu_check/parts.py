"""The parts as data: what each consists of, in the order in which its tasks run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.programs.gpu_check.needs import SERVER, TESTS, Needs
from scripts.programs.gpu_check.tasks import GpuTests, Profile, Sanitize, Task, Together, Work, Worst

PART_S, QUARTER_S = 530.0, 520.0
GPU = "tests/gpu/"
PARITY = (f"{GPU}test_parity_cuda.py",)


@dataclass(frozen=True)
class Part:
    """`minutes` is about what it takes, and `seconds` after what time no task begins and the one under way is ended.
    With `together` its tasks run side by side, since most of their time one core compiles."""

    name: str
    what: str
    minutes: float
    tasks: Sequence[Task]
    needs: Needs = field(default_factory=Needs)
    together: bool = False
    seconds: float = PART_S


def nano(model: str, seconds: float, **more: object) -> Work:
    """Seed 0 of the nano-vllm workload."""
    name = str(more.pop("name", model))
    options = {"model": model, "kind": "nano", "name": name, **more}
    return Work(f"{name} nano-vllm", seconds, "bench", options)


def one(model: str, name: str = "", **engine: object) -> Work:
    """One request."""
    name = name or model
    return Work(f"{name} one request", 120, "bench", {"model": model, "kind": "one", "name": name, "engine": engine})


SMALL, LLAMA = "Qwen3-0.6B", "Llama-3.1-8B"
CHOSEN = {"chosen": True}
TESTS_ALL = (
    GpuTests("kernels", 480, (f"{GPU}test_triton_cuda.py",)),
    GpuTests("latents", 480, (f"{GPU}test_latents_cuda.py",)),
    GpuTests(
        "sampling", 480, tuple(f"{GPU}test_{name}_cuda.py" for name in ("sampling", "links", "sums")),
    ),
    GpuTests("tuning", 480, tuple(f"{GPU}test_{name}_cuda.py" for name in ("tuning", "memory", "importance"))),
    GpuTests("quick", 480, (f"{GPU}test_quick_cuda.py",)),
    GpuTests("backends", 480, (f"{GPU}test_backends_cuda.py",)),
    GpuTests("products-bfloat16", 480, (f"{GPU}test_products_cuda.py",), "bfloat16 or captured or scratch"),
    GpuTests("products-others", 480, (f"{GPU}test_products_cuda.py",), "not bfloat16 and not captured and not scratch"),
    GpuTests("experts-bfloat16", 480, (f"{GPU}test_experts_cuda.py",), "bfloat16"),
    GpuTests("experts-others", 480, (f"{GPU}test_experts_cuda.py",), "not bfloat16"),
    GpuTests("humming", 480, (f"{GPU}test_humming_cuda.py",)),
    GpuTests("parity", 480, PARITY, "whole"),
)  # fmt: skip
KERNELS, SAMPLER = f"{GPU}test_triton_cuda.py::test_", f"{GPU}test_sampling_cuda.py::test_"
QUICK = f"{GPU}test_quick_cuda.py"
TINY = {  # each a second or so without the tools
    "attention": f"{KERNELS}attention_over_paged_kv_is_exact[[1, 40, 7]-torch.bfloat16]",
    "pointwise": f"{KERNELS}operations_between_the_products[50-torch.bfloat16]",
    "sampling": f"{SAMPLER}rows_that_are_no_distribution",
    "products": f"{GPU}test_products_cuda.py::test_products[33-Span(start=0, stop=576)-576-Q4_1-torch.bfloat16]",
    "latents": f"{GPU}test_latents_cuda.py::test_latent_attention_is_that_of_torch[128x512_1-torch.bfloat16]",
    "experts": f"{GPU}test_experts_cuda.py::test_experts[small-MXFP4-torch.bfloat16]",
}
SANITIZED = tuple(Sanitize(tool, case, TINY[case]) for tool in ("memcheck", "racecheck") for case in TINY)
LOGITS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16 and not bfloat16"}
PARITY_SIDES = (
    *(GpuTests(f"logits-{name}", 480, PARITY, f"logits and {choice}") for name, choice in LOGITS.items()),
    GpuTests("greedy", 480, PARITY, "greedy and not processes"),
    GpuTests("processes", 480, PARITY, "processes"),
    GpuTests("published", 480, PARITY, "published"),
    GpuTests("memory", 480, PARITY, "memory"),
)
SPEED = (
    nano("Qwen3-8B", 130),
    one(LLAMA),
    nano(LLAMA, 130),
    nano("Qwen3-14B", 150),
)
RANKS = (
    Work("symmetric memory", 330, "symmetric"),
    Work("NCCL in graphs", 60, "nccl"),
    Work("killed rank", 150, "death"),
    Work("two ranks on one card", 200, "shared", {"model": SMALL}),
)
ABLATIONS = (
    nano(SMALL, 100, name="all on"),
    nano(SMALL, 120, name="--enforce-eager", engine={"enforce_eager": True}),
    nano(SMALL, 100, name="--no-async-scheduling", engine={"async_scheduling": False}),
    nano(SMALL, 100, name="--kv-cache-dtype fp8", engine={"kv_cache_dtype": "fp8"}),
    one(SMALL, "all on"),
    one(SMALL, "--enforce-eager", enforce_eager=True),
    one(SMALL, "--attention-backend torch", attention_backend="torch"),
)
PRODUCTS = (
    Work("products", 200, "products"),
    Profile("_multiply", "products", "products", {}),
    one(LLAMA),
    one(LLAMA, f"{LLAMA} int4", quantization="int4"),
    one(LLAMA, f"{LLAMA} int8", quantization="int8"),
    Work("int4 start", 120, "start", {"model": LLAMA, "quantization": "int4"}),
    nano(LLAMA, 150, name=f"{LLAMA} int4", engine={"quantization": "int4"}),
)
EXPERTS = (
    Work("experts", 300, "experts"),
    Profile("_multiply_experts", "experts", "experts", {}),
    Work("humming", 120, "humming"),
)
QUICK_KINDS = ("attention or cache", "latents", "routers or sorted", "between", "products")
EXPERT_KINDS = ("None or Q4_1", "INT4_128 or FP8_128", "MXFP4")
CORRECT = Together(
    "correctness", 75,
    (
        *(GpuTests(name, 75, (QUICK,), name) for name in QUICK_KINDS),
        *(GpuTests(f"experts {kinds}", 75, (QUICK,), f"experts and ({kinds})") for kinds in EXPERT_KINDS),
        GpuTests("shared experts", 75, (f"{GPU}test_experts_cuda.py",), "shared"),
        GpuTests("sampling", 75, (f"{SAMPLER}rows_that_are_no_distribution", f"{SAMPLER}masks[torch.bfloat16]")),
    ),
)  # fmt: skip


def decode_steps(model: str, value: int, **engine: object) -> Work:
    """Decode steps of 1, 32 and 256 rows by kernel names, and their trace."""
    name = " ".join([model, *map(str, engine.values())])
    options = {"model": model, "kind": "steps", "name": name, "engine": engine, "kernels": True, "trace_value": value}
    return Work(f"{name} steps", 45, "bench", options)


SHORT = {"short": True}
# The most valuable first: what is left when the time is up has to wait.
QUARTER = (
    nano(SMALL, 110, profile=True, trace_value=9),
    Work("decode attention", 60, "attention", CHOSEN),
    CORRECT,
    decode_steps("Qwen3-30B-A3B", 8),
    decode_steps("Qwen3-30B-A3B", 5, quantization="int4"),
    decode_steps("gpt-oss-20b", 7),
    decode_steps("DeepSeek-V2-Lite", 6),
    Work("products", 50, "products", SHORT),
    Work("experts", 60, "experts", SHORT),
    Work("humming", 75, "humming"),
    Work("NCCL in graphs", 25, "nccl"),
    Work("sleep", 40, "sleep", {"model": LLAMA}),
    Together("sanitize", 60, tuple(Sanitize("memcheck", case, TINY[case], 60) for case in ("latents", "experts"))),
    one(LLAMA),
    one(LLAMA, f"{LLAMA} int4", quantization="int4"),
    Worst("ncu of the worst", 90, (
        Profile("_decode", "decode attention", "attention", CHOSEN),
        Profile("_multiply", "products", "products", SHORT),
        Profile("_multiply_experts", "experts", "experts", SHORT),
    )),
)  # fmt: skip
PEERS = (
    Work(f"{SMALL} beside vLLM", 270, "peers", {"model": SMALL}),
    Work("Qwen3-8B beside vLLM", 330, "peers", {"model": "Qwen3-8B"}),
)

PARTS = {
    part.name: part
    for part in (
        Part(
            "quarter", "the first quarter of an hour on a card: a bit of everything, the most valuable first", 8.7,
            QUARTER, Needs(TESTS, memory_GB=40), seconds=QUARTER_S,
        ),
        Part("tests", "the GPU tests, side by side", 8, TESTS_ALL, Needs(TESTS, memory_GB=20), together=True),
        Part(
            "sanitize", "compute-sanitizer over tiny cases of the kernels", 8, SANITIZED,
            Needs(TESTS, ("compute-sanitizer",), memory_GB=4),
        ),
        Part(
            "parity", "every architecture and layout beside Transformers", 8, PARITY_SIDES, Needs(TESTS, memory_GB=20),
            together=True,
        ),
        Part("speed", "three models on the nano-vllm workload, and one request", 7, SPEED, Needs(memory_GB=60)),
        Part(
            "ranks", "several ranks on one card: symmetric memory, NCCL, a killed rank", 7, RANKS,
            Needs(SERVER, files=("tests/gpu/sums_worker.py", "tests/cpu/fake_worker.py"), memory_GB=20),
        ),
        Part("ablations", "what graphs, scheduling ahead and each kernel bring", 7, ABLATIONS, Needs(memory_GB=20)),
        Part(
            "attention", "every size of the attention kernels, other backends beside them", 4,
            (Work("attention", 480, "attention"),), Needs(memory_GB=8),
        ),
        Part("products", "products with quantised weights, and a model with them", 8, PRODUCTS, Needs(memory_GB=40)),
        Part("experts", "mixtures of experts: three models' layers", 7, EXPERTS, Needs(memory_GB=20)),
        Part("sampling", "the sampler's kernels beside torch", 1, (Work("sampling", 200, "sampling"),), Needs()),
        Part(
            "peers", "Weft and vLLM, the same token ids, by turns", 8, PEERS,
            Needs(files=("scripts/programs/bench/peers/engines/vllm_cuda_engine.py",), memory_GB=60, vllm=True),
        ),
    )
}  # fmt: skip
