"""Signatures of the package's functions that we call, without annotations: one text for the emulator and the
package."""

from __future__ import annotations

KVCACHE = (
    "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)"
)
V3_VARLEN = (
    "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False)"
)
V2_VARLEN = (
    "(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None)"
)

LATER_LINE = {
    "flash_attn_npu_3:flash_attn_with_kvcache": KVCACHE,
    "flash_attn_npu_3:flash_attn_varlen_func": V3_VARLEN,
    "flash_attn_npu:flash_attn_varlen_func": V2_VARLEN,
}
"""0.4.2.post1, read from the installed package"""
TRAIN_INFER_LINE = {
    "flash_attn_npu_v3:flash_attn_with_kvcache": KVCACHE,
    "flash_attn_npu:flash_attn_varlen_func": V2_VARLEN,
}
"""0.2.0b1, from its source; the package itself is on no registry"""
