"""Statements of Weft's guides about models and GPUs, judged by arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.refusals import refusals, refuses
from weft.checkpoint.names import catalogue
from weft.errors import ConfigError
from weft.machine.hardware.cluster import parse_gpus
from weft.planner.claims.claims import ClaimVerdict, judge_claim
from weft.planner.claims.text import Claim, GainClaim, LinkClaim, parse_claim


def verdict(text: str) -> ClaimVerdict:
    claim = parse_claim(text)
    assert isinstance(claim, Claim)
    found = catalogue.find(claim.model)
    return judge_claim(found.shape, claim.precision, parse_gpus(claim.gpus), claim.tokens, claim.tok_s)


INFERNET_BOOK = [
    # Performance expectations: each end of each range.
    ("Qwen2.5-72B-Instruct fp16 on 1xH100, 45 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 1xH100, 60 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 2xA100-40GB, 70 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 2xA100-40GB, 90 tok/s", False),
    ("Qwen2.5-72B-Instruct int4 on 2xRTX4090, 30 tok/s", True),
    ("Qwen2.5-72B-Instruct int4 on 2xRTX4090, 45 tok/s", True),
    ("Qwen2.5-72B-Instruct fp16 on 4xRTX4090, 80 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 4xRTX4090, 100 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 4xH100, 150 tok/s", False),
    ("Qwen2.5-72B-Instruct fp16 on 4xH100, 200 tok/s", False),
    # When you need several GPUs.
    ("Qwen2.5-72B-Instruct int4 on 1xH100", True),
    ("Qwen2.5-72B-Instruct int4 on 1xA100", True),
    ("Qwen2.5-72B-Instruct int4 on 1xRTX6000Ada", True),
    ("Qwen2.5-72B-Instruct int4 on 2xRTX4090", True),
    ("Qwen2.5-72B-Instruct int4 on 2xRTX3090", True),
    ("Qwen2.5-72B-Instruct int4 on 1xRTX4090", False),
    ("Llama-3.1-70B-Instruct int4 on 2xRTX4090", True),
    ("Mixtral-8x7B-Instruct-v0.1 int4 on 2xRTX4090", True),
    ("Mixtral-8x7B-Instruct-v0.1 fp16 on 1xH100", False),
    ("Mixtral-8x7B-Instruct-v0.1 fp16 on 2xH100", True),
    ("DeepSeek-V2 int4 on 1xA100", False),
    ("DeepSeek-V2 int4 on 2xA100", True),
    # The commands: without -AWQ in its name the repository is bf16.
    ("Qwen2.5-72B-Instruct bf16 on 2xRTX4090", False),
    ("Qwen2.5-72B-Instruct int4 on 2xRTX4090 at 32768 tokens", False),
    ("Qwen2.5-72B-Instruct bf16 on 8xRTX4090", True),
    ("Qwen2.5-14B-Instruct bf16 on 2xRTX4090", True),
    ("Qwen2.5-14B-Instruct bf16 on 1xRTX4090", False),
    ("Llama-3.1-8B-Instruct bf16 on 1xRTX4090", True),
]
QWEN_GUIDE = [
    ("Qwen-7B-Chat bf16 on 1xRTX3090", True),
    ("Qwen-7B-Chat bf16 on 2xRTX3090", True),
    ("Qwen-7B-Chat int8 on 1xT4", True),
    ("Qwen-7B-Chat int4 on 1xT4", True),
    ("Qwen-14B-Chat bf16 on 1xA100-40GB", True),
    ("Qwen-14B-Chat bf16 on 2xRTX3090", True),
    ("Qwen-14B-Chat int8 on 1xRTX3090", True),
    ("Qwen-14B-Chat int4 on 1xRTX3090", True),
    ("Qwen-72B-Chat bf16 on 2xA100, 8.48 tok/s", True),
    ("Qwen-72B-Chat int8 on 2xA100, 9.05 tok/s", True),
    ("Qwen-72B-Chat int4 on 1xA100, 11.32 tok/s", True),
    ("Qwen-72B-Chat bf16 on 2xA100, 17.60 tok/s", True),
    ("Qwen-72B-Chat bf16 on 1xA100", False),
    ("Qwen-72B-Chat int8 on 1xA100", True),
    # max_memory of 40 GB on each of two, and the default length of 32,768.
    ("Qwen-72B-Chat bf16 on 2xA100-40GB", False),
    ("Qwen-72B-Chat bf16 on 2xA100 at 7,100 tokens", True),
    ("Qwen-72B-Chat bf16 on 2xA100 at 32768 tokens", False),
    ("Qwen-14B-Chat bf16 on 2xRTX4090", True),
]
HOSTING_GUIDE = [
    ("Llama-3-70B fp16 on 2xRTX PRO 6000", True),
    ("Llama-3-70B fp16 on 1xRTX PRO 6000", False),
    ("Llama-3-70B fp16 on 4xRTX 6000 Ada", True),
    ("Llama-3-70B fp16 on 2xRTX 6000 Ada", False),
    ("Mixtral-8x22B-Instruct-v0.1 fp16 on 4xRTX PRO 6000", True),
    ("Mixtral-8x22B-Instruct-v0.1 fp16 on 2xRTX PRO 6000", False),
    ("Mixtral-8x22B-Instruct-v0.1 fp16 on 8xRTX 6000 Ada", True),
    ("DeepSeek-V3 fp16 on 8xRTX PRO 6000", False),
    ("DeepSeek-R1 fp16 on 8xRTX PRO 6000", False),
    ("DeepSeek-V3 fp8 on 8xRTX PRO 6000", True),
    ("DeepSeek-R1 fp8 on 8xRTX PRO 6000", True),
    ("DeepSeek-R1 fp8 on 8xRTX 6000 Ada", False),
    ("Llama-3.1-405B-Instruct fp16 on 8xRTX PRO 6000", False),
    ("Llama-3.1-405B-Instruct fp16 on 8xRTX 6000 Ada", False),
    ("Llama-3-70B int4 on 2xRTX 5090", True),
    ("Llama-3-70B fp16 on 2xRTX 5090", False),
]
VLLM_GUIDES = [
    ("opt-13b fp16 on 4xRTX 3090", True),
    ("opt-13b fp16 on 1xRTX 3090", False),
    ("gpt2 fp16 on 8xT4", True),
]


@pytest.mark.parametrize(("claim", "possible"), INFERNET_BOOK + QWEN_GUIDE + HOSTING_GUIDE + VLLM_GUIDES)
def test_claims_of_the_guides(claim: str, possible: bool) -> None:
    found = verdict(claim)
    assert found.possible == possible, found.reasons
    assert bool(found.reasons) != possible


@pytest.mark.parametrize(
    ("claim", "bound"),
    [
        ("Qwen2.5-72B-Instruct fp16 on 1xH100", 23.4),
        ("Qwen2.5-72B-Instruct fp16 on 2xA100-40GB", 21.8),
        ("Qwen2.5-72B-Instruct fp16 on 4xRTX4090", 28.2),
        ("Qwen2.5-72B-Instruct fp16 on 4xH100", 93.8),
    ],
)
def test_the_bound_is_bandwidth_over_bytes_read(claim: str, bound: float) -> None:
    found = verdict(claim)
    assert round(found.bound_tok_s, 1) == bound
    assert verdict(f"{claim}, {bound - 0.1} tok/s").reasons == found.reasons
    assert len(verdict(f"{claim}, {bound + 0.1} tok/s").reasons) == len(found.reasons) + 1


def test_the_arithmetic_is_told() -> None:
    memory, speed = verdict("Qwen2.5-72B-Instruct fp16 on 1xH100, 50 tok/s").reasons
    assert memory.code == "claim_too_large" and speed.code == "claim_too_fast"
    assert "145.4 GB" in str(memory) and "671 MB" in str(memory) and "2,048" in str(memory) and "84.0 GB" in str(memory)
    assert "23.4" in str(speed) and "142.9 GB" in str(speed) and "3,350.0 GB/s" in str(speed)


def test_more_memory_never_makes_it_impossible() -> None:
    for count in range(6, 17):
        assert verdict(f"Qwen2.5-72B-Instruct bf16 on {count}xRTX4090").possible == (count >= 7)


def test_different_gpus_are_filled_by_their_size() -> None:
    assert verdict("Qwen2.5-32B-Instruct bf16 on 1xRTX A6000+1xRTX4090").possible
    assert not verdict("Qwen2.5-32B-Instruct bf16 on 1xRTX A6000+1xT4").possible


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        (
            "Qwen2.5-72B-Instruct fp16 on 1xH100, 50 tok/s",
            Claim(model="Qwen2.5-72B-Instruct", precision="fp16", gpus="1xH100", tok_s=50.0),
        ),
        (
            "org/name int4 on 2x RTX 4090 at 32,768 tokens",
            Claim(model="org/name", precision="int4", gpus="2x RTX 4090", tokens=32768),
        ),
        (
            "m q4_k_m on 1xT4 at 1 token, 0.5 tokens/s",
            Claim(model="m", precision="q4_k_m", gpus="1xT4", tokens=1, tok_s=0.5),
        ),
        (
            "m fp8 ON 2x8xH100 AT 4_096 tokens , 1,200.5tok/s",
            Claim(model="m", precision="fp8", gpus="2x8xH100", tokens=4096, tok_s=1200.5),
        ),
        ("m on 1xH100", Claim(model="m", gpus="1xH100")),
        ("m (BF16) on two A100, 10 t/s", Claim(model="m", precision="BF16", gpus="2x A100", tok_s=10.0)),
        ("m Q4: 26 GB", Claim(model="m", precision="Q4", memory_bytes=26 * 10**9)),
        ("m needs 26 GB in Q4", Claim(model="m", precision="Q4", memory_bytes=26 * 10**9)),
        ("m fp16 on 1xH100, about 5 tok/s", Claim(model="m", precision="fp16", gpus="1xH100", tok_s=5.0)),
        (
            "m 70B Q4 on 2 x 4090 at 8k tokens, 30–45 tok/s",
            Claim(model="m 70B", precision="Q4", gpus="2 x 4090", tokens=8000, tok_s=30.0, most_tok_s=45.0),
        ),
        ("m on RTX4090,RTX3090, TP=2, FP8", Claim(model="m", precision="FP8", gpus="RTX4090,RTX3090", tensor=2)),
        ("m (236B MoE) Q4 needs ~130 GB (active)", Claim(model="m", precision="Q4", memory_bytes=130 * 10**9)),
        (
            "m int8 on 2x A100 80GB, ~41GB each",
            Claim(model="m", precision="int8", gpus="2x A100 80GB", memory_bytes=41 * 10**9, each=True),
        ),
        (
            "m int8 needs 41GB each on 2 GPUs",
            Claim(model="m", precision="int8", memory_bytes=41 * 10**9, each=True, count=2),
        ),
        ("m int8 on 2 GPUs, 8GB each", Claim(model="m", precision="int8", gpus="2x8GB")),
        ("m int8 on 2 GPUs of 8 GB", Claim(model="m", precision="int8", gpus="2x8GB")),
        ("m int8 on 8GB each", Claim(model="m", precision="int8", gpus="2x8GB")),
        ("m int8 on 16 GB", Claim(model="m", precision="int8", gpus="1x16GB")),
        ("m needs 4x RTX 6000 Pro 96 GB", Claim(model="m", gpus="4x RTX 6000 Pro 96 GB", fewest=True)),
        (
            "2x RTX 5090: PCIe 4.0, 32 GB/s per GPU",
            LinkClaim(gpu="RTX 5090", links="PCIe 4.0", link_Bps=32e9),
        ),
        # Rows of tables, which have no verb and few commas.
        ("m 8x7B Q4 26 GB", Claim(model="m 8x7B", precision="Q4", memory_bytes=26 * 10**9)),
        ("m | FP16 | 16 GB", Claim(model="m", precision="FP16", memory_bytes=16 * 10**9)),
        ("m 671B FP16 VRAM 640 GB", Claim(model="m 671B", precision="FP16", memory_bytes=640 * 10**9)),
        ("m BF16 single GPU 16GB", Claim(model="m", precision="BF16", memory_bytes=16 * 10**9, count=1)),
        (
            "m int8 2 GPUs 8GB each",
            Claim(model="m", precision="int8", memory_bytes=8 * 10**9, each=True, count=2),
        ),
        (
            "m int8 2x A100 80GB ~41GB each",
            Claim(model="m", precision="int8", gpus="2x A100 80GB", memory_bytes=41 * 10**9, each=True),
        ),
        (
            "m int4 1x A100 80GB ~49GB",
            Claim(model="m", precision="int4", gpus="1x A100 80GB", memory_bytes=49 * 10**9),
        ),
        (
            "m Transformers 2x A100 8.48 145GB total",
            Claim(model="m", gpus="2x A100", tok_s=8.48, memory_bytes=145 * 10**9, engine="transformers"),
        ),
        (
            "m on 2x A100 40GB, TP=2, FP16, 70–90",
            Claim(model="m", precision="FP16", gpus="2x A100 40GB", tok_s=70.0, most_tok_s=90.0, tensor=2),
        ),
        (
            "m on 4x RTX 4090 TP=4 FP16 80–100 tokens/sec",
            Claim(model="m", precision="FP16", gpus="4x RTX 4090", tok_s=80.0, most_tok_s=100.0, tensor=4),
        ),
        ("m needs 8 RTX 6000 Pro 96GB", Claim(model="m", gpus="8x RTX 6000 Pro 96GB", fewest=True)),
        ("m min 4 GPUs RTX 6000 Pro 96GB", Claim(model="m", gpus="4x RTX 6000 Pro 96GB", fewest=True)),
        ("m in 4 bits on 8GB", Claim(model="m", precision="4-bit", gpus="1x8GB")),
        ("m 16-bit on 1xH100", Claim(model="m", precision="bf16", gpus="1xH100")),
        (
            "NVLink +20-40 % for m fp8",
            GainClaim(low=0.2, high=0.4, run=Claim(model="m", precision="fp8", gpus="4xA100")),
        ),
        ("m uses about 16 GB of VRAM", Claim(model="m", memory_bytes=16 * 10**9)),
        ("m can run on two RTX 3090 in Q4", Claim(model="m", precision="Q4", gpus="2x RTX 3090")),
        ("m Q4 fits on one 48GB GPU", Claim(model="m", precision="Q4", gpus="1x48GB")),
        ("m on 1x4090 with 32k context", Claim(model="m", gpus="1x4090", tokens=32000)),
        ("m on a single 4090 with vLLM: 50 t/s", Claim(model="m", gpus="1x 4090", tok_s=50.0, engine="vllm")),
        ("L4: no NVLink", LinkClaim(gpu="L4", links="no NVLink")),
        ("NVLink: +20-40 %", GainClaim(low=0.2, high=0.4)),
        (
            "m bf16 on 2xA100: NVLink is 30% faster",
            GainClaim(low=0.3, high=0.3, run=Claim(model="m", precision="bf16", gpus="2xA100")),
        ),
        (
            "NVLink: 20 to 40 % higher throughput for m on 2xA100",
            GainClaim(low=0.2, high=0.4, run=Claim(model="m", gpus="2xA100")),
        ),
    ],
)
def test_claims_are_read(text: str, claim: Claim | LinkClaim | GainClaim) -> None:
    assert parse_claim(text) == claim


# A text that is no claim, and the code of what is wrong with it.
BAD_CLAIMS = {
    "": "bad-claim",
    "hello": "bad-claim",
    "m fp16": "bad-claim",
    "m fp16 on": "bad-claim",
    "m fp16 on 1xH100, 0 tok/s": "claim-of-zero",
    "m fp16 on 1xH100 at 0 tokens": "claim-of-zero",
    "m fp16 on 1xH100, 1.2.3 tok/s": "claim-speed-not-number",
    "m fp16 on 1xH100, -5 tok/s": "bad-claim",
    "m fp16 on 1xH100, inf tok/s": "bad-claim",
    "m fp16 on 1xH100, some tok/s": "bad-claim",
    "m fp16 needs 0 GB": "claim-of-zero",
    "m fp16 needs": "bad-claim",
    "m fp16 on 2 GPUs": "bad-claim",
    "m fp16 needs 1.2.3 tok/s": "claim-speed-not-number",
}


@pytest.mark.parametrize(("text", "code"), BAD_CLAIMS.items())
def test_texts_that_are_no_claim(text: str, code: str) -> None:
    with refuses(ConfigError, code):
        parse_claim(text)


def test_the_wording_of_claims(golden: Callable[[str, str], None]) -> None:
    told = [str(reason) for reason in verdict("Qwen2.5-72B-Instruct fp16 on 1xH100, 50 tok/s").reasons]
    told += [str(reason) for reason in verdict("Qwen-72B-Chat bf16 on 2xA100-40GB").reasons]
    golden("claim.txt", "\n".join(told) + "\n" + refusals(parse_claim, BAD_CLAIMS))
