"""Flags of `vllm serve` that Weft knows and does not have: taken with their values, and warned about."""

from __future__ import annotations

import re

# What is done anyway, or cannot matter here, has its own word.
REASONS = {
    "trust-remote-code": "no code of a model is ever run: architectures are written in Weft",
    "enable-chunked-prefill": "prompts are always cut to --max-num-batched-tokens",
}

SWITCHES = """
aggregate-engine-logging allow-credentials calculate-kv-scales cohere-is-reasoning-model
cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
dcp-q-replicate disable-async-output-proc disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
disable-fastapi-docs disable-frontend-multiprocessing disable-hybrid-kv-cache-manager disable-log-requests
disable-mm-preprocessor-cache disable-nccl-for-dp-synchronization disable-sliding-window
disable-uvicorn-access-log enable-auto-tool-choice enable-batch-sharded-sampling enable-bf16x3-router-gemm
enable-chunked-prefill enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
enable-logging-iteration-details enable-lora enable-lora-bias enable-mfu-metrics enable-mixed-moe-lora-format
enable-mm-embeds enable-moe-shared-loras enable-offline-docs enable-per-request-metrics enable-prompt-adapter
enable-prompt-embeds enable-prompt-tokens-details enable-server-load-tracking enable-sleep-mode
enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora
exclude-tools-when-tool-choice-none fail-on-environ-validation fully-sharded-loras headless interleave-mm-strings
jit-monitor-verbose kv-cache-metrics kv-sharing-fast-prefill language-model-only log-error-stack mm-encoder-only
per-request-spec-decode-metrics ray-workers-use-nsight return-tokens-as-token-ids scheduler-reserve-full-isl
skip-mm-profiling specialize-active-lora tokens-only trust-remote-code trust-request-chat-template
use-replayssm use-tqdm-on-load use-v2-block-manager
"""

VALUED = """
additional-config all2all-backend allowed-headers allowed-local-media-path allowed-methods api-server-count
attention-config chat-template-content-format code-revision cohere-format collect-detailed-traces
compilation-config config-format convert cp-kv-cache-interleave-size cpu-offload-gb data-parallel-address
data-parallel-backend data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold dbo-prefill-token-threshold
dcp-comm-backend dcp-kv-cache-interleave-size decode-context-parallel-size default-mm-loras diffusion-config
disable-access-log-for-endpoints dp-sync-interval ec-manager-config ec-transfer-config eplb-config
expert-placement-strategy fault-tolerance-config fingerprint-mode fingerprint-value gdn-prefill-backend
guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size hf-config-path hf-overrides
ignore-patterns io-processor-plugin ir-op-priority jit-monitor-mode kda-prefill-backend kernel-config
kv-cache-metrics-sample kv-events-config kv-offloading-backend kv-offloading-size
kv-transfer-config limit-mm-per-prompt linear-backend log-config-file logits-processor-pattern logprobs-mode
long-prefill-token-threshold lora-dtype lora-extra-vocab-size mamba-block-size mamba-cache-dtype
mamba-cache-mode mamba-ssm-cache-dtype master-addr master-port max-cpu-loras max-cudagraph-capture-size
max-log-len max-logprobs max-long-partial-prefills max-lora-rank max-loras max-num-partial-prefills
max-num-queued-tokens max-num-scheduled-tokens max-parallel-loading-workers max-seq-len-to-capture
media-io-kwargs middleware mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype
mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model-impl model-loader-extra-config
moe-backend nnodes node-rank num-gpu-blocks-override num-lookahead-slots num-scheduler-steps
num-speculative-tokens offload-backend offload-group-size offload-num-in-group offload-prefetch-step
optimization-level otlp-traces-endpoint override-attention-dtype override-generation-config
override-pooler-config performance-mode pooler-config preemption-mode prefill-context-parallel-size
prefill-schedule-interval prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit
profiler-config pt-load-map-location reasoning-config reasoning-parser replayssm-buffer-len
rope-scaling rope-theta runner safetensors-load-strategy scheduler-cls scheduler-delay-factor
show-hidden-metrics-for-version spec-method spec-model spec-tokens speculative-model
ssl-ca-certs ssl-cert-reqs ssl-ciphers stream-interval structured-outputs-config swap-space task
tokenizer-mode tokenizer-revision tool-call-parser tool-parser-plugin tool-server ubatch-size
uvicorn-log-level video-pruning-method video-pruning-rate watermark weight-transfer-config worker-cls
worker-extension-cls
"""

# These take values up to the next flag.
LISTS = """
cpu-offload-params cudagraph-capture-sizes kv-cache-dtype-skip-layers logits-processors lora-modules
lora-target-modules offload-params
"""

SHORT = {
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-ep": "enable-expert-parallel",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-dc": "diffusion-config",
    "-O": "optimization-level",
}

ARITY = dict.fromkeys(SWITCHES.split(), 0) | dict.fromkeys(VALUED.split(), 1) | dict.fromkeys(LISTS.split(), -1)


def strip(argv: list[str], own: frozenset[str]) -> tuple[list[str], list[str]]:
    """`argv` without the flags that vLLM has and we do not, and a warning for each. `own` are our options,
    which come first; a short form or `--flag.key` counts as its flag."""
    kept: list[str] = []
    warnings: list[str] = []
    rest = iter(range(len(argv)))
    for at in rest:
        written, glued, _ = argv[at].partition("=")
        name = _name(written)
        positive = name.removeprefix("no-") if ARITY.get(name.removeprefix("no-")) == 0 else name
        if written in own or positive not in ARITY:
            kept.append(argv[at])
            continue
        arity = 0 if glued or re.fullmatch(r"-O\d", written) else ARITY[positive]
        while arity and at + 1 < len(argv) and not argv[at + 1].startswith("--"):
            at = next(rest)
            arity -= 1
        reason = REASONS.get(name, "Weft does not have it; it is ignored")
        warnings.append(f"{written}: {reason}")
    return kept, warnings


def _name(option: str) -> str:
    """The long name of an option, without what selects a part of it (--config.key, -O3)."""
    stem = option.partition(".")[0]
    if re.fullmatch(r"-O\d", stem):
        stem = "-O"
    return SHORT.get(stem, "") if not stem.startswith("--") else stem[2:]
