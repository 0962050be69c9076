"""Rows of published guides' tables on models, memory, speeds and links: `weft plan --check` judges each of them.

The figures are the guides', wrong ones among them; the verdicts are arithmetic. GB are 10^9 bytes.
"""

from __future__ import annotations

import pytest

from tests.pure.commands import weft_json

# Claim, and the codes of the reasons against it: none for a claim that is possible.
TOO_LARGE, TOO_FAST, TOO_LITTLE = "claim_too_large", "claim_too_fast", "claim_memory_too_low"
# A node provider's book: smallest memory by precision.
BOOK_MEMORY = {
    "Qwen2.5-72B Q4 needs 38 GB": [TOO_LITTLE],
    "Qwen2.5-72B FP16 needs 144 GB": [],
    "Llama-3.1-70B Q4 needs 37 GB": [TOO_LITTLE],
    "Llama-3.1-70B FP16 needs 140 GB": [],
    "DeepSeek-V2 (236B MoE) Q4 needs 130 GB (active)": [],
    "DeepSeek-V2 (236B MoE) FP16 needs 130 GB": [TOO_LITTLE],
    "Mixtral 8x7B Q4 needs 26 GB": [],
    "Mixtral 8x7B FP16 needs 87 GB": [TOO_LITTLE],
}
# The same book: speed of one request.
BOOK_SPEED = {
    "Qwen2.5-72B on 1x H100 80GB, FP16, 45–60 tok/s": [TOO_LARGE, TOO_FAST],
    "Qwen2.5-72B on 2x A100 40GB, TP=2, FP16, 70–90 tok/s": [TOO_LARGE, TOO_FAST],
    "Qwen2.5-72B on 2x RTX 4090, TP=2, Q4, 30–45 tok/s": [],
    "Qwen2.5-72B on 4x RTX 4090, TP=4, FP16, 80–100 tok/s": [TOO_LARGE, TOO_FAST],
    "Qwen2.5-72B on 4x H100 80GB, TP=4, FP16, 150–200 tok/s": [TOO_FAST],
}
# A model family's guide: memory on one GPU and on two.
GUIDE_MEMORY = {
    "Qwen-7B BF16 on 16GB": [TOO_LARGE],
    "Qwen-7B BF16 on 2 GPUs, 8GB each": [TOO_LARGE],
    "Qwen-7B Int8 on 11GB": [],
    "Qwen-7B Int8 on 2 GPUs, 6GB each": [TOO_LARGE],
    "Qwen-7B Int4 on 8GB": [],
    "Qwen-7B Int4 on 2 GPUs, 4GB each": [TOO_LARGE],
    "Qwen-14B BF16 on 30GB": [],
    "Qwen-14B BF16 on 2 GPUs, 15GB each": [TOO_LARGE],
    "Qwen-14B Int8 on 19GB": [],
    "Qwen-14B Int8 on 2 GPUs, 10GB each": [],
    "Qwen-14B Int4 on 13GB": [],
    "Qwen-14B Int4 on 2 GPUs, 7GB each": [],
    "Qwen-7B BF16 needs 16GB": [],
    "Qwen-7B BF16 needs 8GB each on 2 GPUs": [],
    "Qwen-14B BF16 needs 30GB": [],
    "Qwen-72B BF16 on 2x A100 80GB, ~72GB each": [],
    "Qwen-72B Int8 on 2x A100 80GB, ~41GB each": [],
    "Qwen-72B Int4 on 1x A100 80GB, ~49GB each": [],
    "Qwen-72B BF16 on 2x A100 80GB": [],
    "Qwen-72B Int8 needs 2x A100 80GB": [],
}
# The same guide: speeds with memory.
GUIDE_SPEED = {
    "Qwen-72B BF16 on 2x A100, 8.48 tok/s, 145GB total": [],
    "Qwen-72B Int8 on 2x A100, 9.05 tok/s, 81GB total": [],
    "Qwen-72B Int4 on 1x A100, 11.32 tok/s, 49GB": [],
    "Qwen-72B BF16 on 2x A100, 17.60 tok/s": [],
}
# A hosting provider's page: memory, and the fewest cards of two sizes.
HOSTING_MODELS = {
    "Llama 3 70B FP16 needs ~140 GB": [],
    "Llama 3 70B FP16 needs 2x RTX 6000 Pro 96 GB": [],
    "Llama 3 70B FP16 needs 4x RTX 6000 Pro 48GB": [],
    "Mixtral 8x22B FP16 needs ~280 GB": [],
    "Mixtral 8x22B FP16 needs 4x RTX 6000 Pro 96 GB": [],
    "Mixtral 8x22B FP16 needs 8x RTX 6000 Pro 48GB": [],
    "DeepSeek-V3 FP16 needs ~640 GB": [TOO_LITTLE],
    "DeepSeek-V3 FP8 needs ~640 GB": [TOO_LITTLE],
    "DeepSeek-V3 FP16 needs 8x RTX 6000 Pro 96 GB": [TOO_LARGE],
    "DeepSeek-V3 FP8 needs 8x RTX 6000 Pro 96 GB": [],
    "DeepSeek-V3 FP8 on 8x RTX 6000 Pro 48GB": [TOO_LARGE],
    "DeepSeek-R1 FP16 needs ~640 GB": [TOO_LITTLE],
    "DeepSeek-R1 FP16 needs 8x RTX 6000 Pro 96 GB": [TOO_LARGE],
    "DeepSeek-R1 FP8 on 8x RTX 6000 Pro 48GB": [TOO_LARGE],
    "Llama 3 405B FP16 needs ~810 GB": [],
    "Llama 3 405B FP16 on 8x RTX 6000 Pro 96 GB": [TOO_LARGE],
    "Llama 3 405B FP16 on 8x RTX 6000 Pro 48GB": [TOO_LARGE],
}
# The same page: links.
HOSTING_LINKS = {
    "2x RTX 5090: PCIe 4.0, 32 GB/s per GPU": ["claim_other_pcie"],
    "2x RTX 6000 Pro: PCIe 4.0 + NVLink bridge, 112 GB/s": ["claim_no_nvlink"],
    "4x RTX 6000 Pro: NVLink + NVSwitch, 600 GB/s": ["claim_no_nvlink"],
    "8x RTX 6000 Pro: NVLink + NVSwitch, 600 GB/s": ["claim_no_nvlink"],
    "8x RTX 6000 Pro: NVLink 4.0, 900 GB/s": ["claim_no_nvlink"],
    "NVLink: 20-40 % higher throughput": [],
    "NVLink: +20-40 % for Llama 3 70B FP16 on 2x RTX 6000 Pro": ["claim_no_nvlink"],
    "NVLink: +20-40 % for DeepSeek-V3 FP8 on 8x H200": [],
    "NVLink: +300-400 % for Llama 3 70B FP16 on 4x A100": ["claim_gain"],
}
# Facts of cards that are right, beside wrong ones.
LINKS = {
    "RTX 5090: PCIe 5.0, 64 GB/s": [],
    "H100: NVLink, 900 GB/s": [],
    "A100: NVLink, 300 GB/s": [],
    "A100: NVLink, 900 GB/s": ["claim_other_nvlink"],
    "L40S: no NVLink": [],
    "H100: no NVLink": ["claim_has_nvlink"],
    "T4: PCIe, 32 GB/s": [],
    "T4: PCIe, 64 GB/s": ["claim_other_pcie_speed"],
}
# Requests as long as a model can go, and longer ones.
LENGTHS = {
    "gpt2 fp16 on 1xT4 at 1024 tokens": [],
    "gpt2 fp16 on 1xT4 at 4096 tokens": ["claim_too_long"],
    "Llama-3-70B fp16 on 4xA100 at 32k tokens": ["claim_too_long"],
}
ROWS = BOOK_MEMORY | BOOK_SPEED | GUIDE_MEMORY | GUIDE_SPEED | HOSTING_MODELS | HOSTING_LINKS | LINKS | LENGTHS


@pytest.mark.parametrize(("claim", "against"), ROWS.items())
def test_every_row_has_a_verdict(claim: str, against: list[str]) -> None:
    status, verdict = weft_json("plan", "--check", claim)
    assert verdict["reason_codes"] == against
    assert (status, verdict["possible"]) == ((3, False) if against else (0, True))


@pytest.mark.parametrize(
    ("claim", "fewest"),
    [
        ("Llama 3 70B FP16 needs 2x RTX 6000 Pro 96 GB", 2),
        ("Llama 3 70B FP16 needs 4x RTX 6000 Pro 48GB", 3),
        ("Mixtral 8x22B FP16 needs 8x RTX 6000 Pro 48GB", 6),
        ("DeepSeek-V3 FP8 needs 8x RTX 6000 Pro 96 GB", 7),
        ("Qwen-72B Int8 needs 2x A100 80GB", 1),
    ],
)
def test_the_fewest_cards_are_counted(claim: str, fewest: int) -> None:
    assert weft_json("plan", "--check", claim)[1]["fewest_gpus"] == fewest


def test_what_does_not_exist_is_said() -> None:
    assert "RTX 6000 Pro 48GB" in weft_json("plan", "--check", "Qwen3-8B on RTX 6000 Pro 48GB")[1]["remarks"][0]
    assert "Llama 3 405B" in weft_json("plan", "--check", "Llama 3 405B FP8 on 8xH100")[1]["remarks"][0]


def test_both_ends_of_a_range_are_judged() -> None:
    status, verdict = weft_json("plan", "--check", "Qwen2.5-72B int4 on 2x RTX 4090, 30-60 tok/s")
    assert status == 0 and 30 < verdict["bound_tok_s"] < 60
    assert "60" in verdict["remarks"][0]


def test_a_claim_far_above_the_prediction_says_so() -> None:
    words = ("plan", "--engine", "transformers", "--check")
    status, verdict = weft_json(*words, "Qwen-72B bf16 on 2x A100, 17.60 tok/s")
    assert status == 0 and verdict["as_predicted"] is False and verdict["remarks"]
    assert weft_json(*words, "Qwen-72B bf16 on 2x A100, 8.48 tok/s")[1]["as_predicted"] is True
