"""Projections from latents to keys and values as newer GGUF files store them: keys and values apart.

attn_k_b is [heads, rank, nope_dim], each head's matrix transposed, attn_v_b is [heads, v_dim, rank]. Older files have
both in attn_kv_b, as Hugging Face's checkpoints do. Source: DeepseekV2Model of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from weft.checkpoint.files.tensor import TensorInfo

KEYS, VALUES, BOTH = "k_b_proj.weight", "v_b_proj.weight", "kv_b_proj.weight"


class SplitHeads(TensorInfo, frozen=True, kw_only=True):
    """A matrix [heads * (nope_dim + v_dim), rank], stored as `keys` [heads * rank, nope_dim] and `values`
    [heads * v_dim, rank]."""

    heads: int
    keys: TensorInfo
    values: TensorInfo


def join_heads(index: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Replace each pair of keys and values whose dims fit together by one `SplitHeads`."""
    joined = dict(index)
    for name in index:
        values = index.get(name.replace(KEYS, VALUES))
        if not name.endswith(KEYS) or values is None or not _fit(index[name], values):
            continue
        keys = joined.pop(name)
        del joined[name.replace(KEYS, VALUES)]
        heads, rank, nope_dim = keys.dims
        v_dim = values.dims[1]
        joined[name.replace(KEYS, BOTH)] = SplitHeads(
            file=keys.file,
            type=values.type,
            dims=(heads * (nope_dim + v_dim), rank),
            offset=keys.offset,
            nbytes=keys.nbytes + values.nbytes,
            heads=heads,
            keys=replace(keys, dims=(heads * rank, nope_dim)),
            values=replace(values, dims=(heads * v_dim, rank)),
        )
    return joined


def _fit(keys: TensorInfo, values: TensorInfo) -> bool:
    return len(keys.dims) == len(values.dims) == 3 and keys.dims[:2] == (values.dims[0], values.dims[2])
