"""The table: what each of mlx-lm's model modules needs in order to be built small.

Fragments hold the keys that many modules share, with one value for all; a row adds its own. A hidden size of
128 instead of 64 stands where a module derives head_dim from it, so that every K/V head has 32 channels or
more and can be packed in groups of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumina_cache.lab.tiny.spec import TinySpec
from lumina_cache.lab.tiny.weights import GAIN

__all__ = ["CHUNKING_MOVES_LOGITS", "NOT_MODELS", "SPECS", "UNBUILDABLE"]

WINDOW = 16
CHUNK = 16
FULL, SLIDING = "full_attention", "sliding_attention"

_Config = Mapping[str, Any]

DENSE: _Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
WIDE: _Config = {**DENSE, "hidden_size": 128}
MOE: _Config = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# K and V of a latent layer are the latent (64 wide, one head) and the rotated key part (32 wide)
LATENT: _Config = {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
LLAMA4_ROPE: _Config = {
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
YARN: _Config = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MAMBA2: _Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
DELTA: _Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def _spec(
    module: str,
    cache: str,
    *fragments: _Config,
    nested: str | None = None,
    vocab_size: int = 128,
    window: int | None = None,
    chunk: int | None = None,
    embedding_gain: float = GAIN,
    notes: str = "",
    **own: Any,
) -> TinySpec:
    config: dict[str, Any] = {"model_type": module, "vocab_size": vocab_size}
    for fragment in fragments:
        config |= fragment
    config |= own
    if nested is not None:
        config = {"model_type": module, "vocab_size": vocab_size, nested: config}
    return TinySpec(module, config, frozenset(own), cache, vocab_size, window, chunk, embedding_gain, notes)


_ROWS = [
    _spec("llama", "K K", DENSE),
    _spec("qwen2", "K K", WIDE, notes="bias on q, k and v"),
    _spec("qwen3", "K K", DENSE, notes="norm on q and k"),
    _spec("mistral3", "K K", DENSE, {"model_type": "ministral3"}, nested="text_config", window=WINDOW,
          notes="ministral3 inside, but no make_cache: the window is in the mask alone, also with N = 1",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW,
          rope_parameters=LLAMA4_ROPE),
    _spec("ministral3", "R K", DENSE, window=WINDOW, notes="attention scaled by position",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW,
          rope_parameters=LLAMA4_ROPE),
    _spec("phi3", "K K", WIDE, notes="fused q, k, v"),
    _spec("gemma2", "K K", DENSE, embedding_gain=0.5,
          notes="attention logits soft-capped, so attention is computed by hand; no window; embeddings always tied"),
    _spec("gemma3", "R R K", DENSE, nested="text_config", window=WINDOW, notes="gemma3_text inside",
          num_hidden_layers=3, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=32),
    _spec("gemma3_text", "R R K", DENSE, window=WINDOW,
          num_hidden_layers=3, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=32),
    _spec("gemma3n", "R R K", DENSE, nested="text_config", window=WINDOW,
          notes="six layers, three cache entries: the last three layers read K/V of earlier ones",
          num_hidden_layers=6, num_kv_shared_layers=3, layer_types=[SLIDING, SLIDING, FULL] * 2,
          vocab_size_per_layer_input=128, sliding_window=WINDOW, rope_local_base_freq=1e4,
          final_logit_softcapping=30.0, activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
          hidden_size_per_layer_input=16, altup_num_inputs=2, altup_coef_clip=120.0, altup_correct_scale=True,
          altup_active_idx=0, laurel_rank=16, intermediate_size=[96] * 6),
    _spec("gemma4_text", "R R K", DENSE, window=WINDOW,
          notes="six layers, three cache entries: the last three read K/V of earlier ones; full layers have "
                "another head_dim and V = K",
          num_hidden_layers=6, num_kv_shared_layers=3, layer_types=[SLIDING, SLIDING, FULL] * 2,
          global_head_dim=64, vocab_size_per_layer_input=128, hidden_size_per_layer_input=16,
          sliding_window=WINDOW, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
          num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    _spec("gpt_oss", "R K", DENSE, MOE, window=WINDOW, notes="attention sinks in every layer",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW),
    _spec("deepseek_v2", "K K", DENSE, MOE, LATENT, notes="latent attention", topk_method="greedy",
          rope_scaling=YARN),
    _spec("deepseek_v3", "K K", DENSE, MOE, LATENT, notes="latent attention"),
    _spec("deepseek_v32", "(KK) (KK)", DENSE, MOE, LATENT,
          notes="latent attention and an indexer that keeps the 16 best rows; its cache's V is zeros",
          index_head_dim=64, index_n_heads=2, index_topk=16),
    _spec("glm4_moe_lite", "K K", DENSE, MOE, LATENT, notes="latent attention"),
    _spec("cohere2", "R R R K", WIDE, window=WINDOW, notes="no RoPE in full layers; embeddings always tied",
          num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=4),
    _spec("llama4", "C C C K", DENSE, MOE, nested="text_config", chunk=CHUNK,
          notes="chunked attention; the front is trimmed by the model", num_hidden_layers=4,
          attention_chunk_size=CHUNK, interleave_moe_layer_step=2, intermediate_size_mlp=96,
          rope_scaling=None, use_qk_norm=True, num_experts_per_tok=1),
    _spec("mamba", "A A", DENSE, state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True,
          time_step_rank=8),
    _spec("mamba2", "A A", DENSE, num_heads=4, state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
          use_conv_bias=True, time_step_limit=(0.001, 100.0), time_step_rank=8, intermediate_size=128),
    _spec("jamba", "A K A K", WIDE, MOE, num_hidden_layers=4, attn_layer_offset=1, attn_layer_period=2,
          expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2),
    _spec("falcon_h1", "(AK) (AK)", DENSE, MAMBA2, notes="attention and mamba side by side in each layer",
          mamba_d_ssm=128),
    _spec("nemotron_h", "A K A", DENSE, MOE, notes="only mamba and attention blocks have a cache entry",
          hybrid_override_pattern=["M", "*", "-", "M", "E"], mamba_num_heads=4, mamba_head_dim=32,
          mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
          use_conv_bias=True, moe_shared_expert_intermediate_size=32),
    _spec("qwen3_next", "A A A K", DENSE, MOE, DELTA, notes="gated delta net and gated attention",
          num_hidden_layers=4, partial_rotary_factor=0.5, full_attention_interval=4),
    _spec("qwen3_5", "A A A K", DENSE, DELTA, nested="text_config", notes="gated delta net and attention",
          num_hidden_layers=4, full_attention_interval=4),
    _spec("lfm2", "A K", WIDE, notes="short convolution and attention; embeddings always tied",
          layer_types=["conv", FULL], conv_bias=False, conv_L_cache=3, block_dim=128, block_multiple_of=32,
          block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False),
    _spec("granitemoehybrid", "A K", WIDE, MOE, MAMBA2, layer_types=["mamba", "attention"],
          embedding_multiplier=1.0, attention_multiplier=0.2, logits_scaling=1.0, residual_multiplier=1.0),
    _spec("kimi_linear", "A A K", DENSE, MOE, LATENT, notes="delta attention and latent attention",
          num_hidden_layers=3, num_experts_per_token=2, model_max_length=512,
          linear_attn_config={"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4,
                              "kda_layers": [1, 2], "full_attn_layers": [3]}),
    _spec("recurrent_gemma", "A A R", WIDE, window=WINDOW, notes="embeddings always tied",
          num_hidden_layers=3, block_types=["recurrent", "recurrent", "attention"], conv1d_width=4,
          logits_soft_cap=30.0, attention_window_size=WINDOW, num_key_value_heads=1),
    _spec("rwkv7", "A A", DENSE, a_low_rank_dim=16, v_low_rank_dim=16, gate_low_rank_dim=16,
          decay_low_rank_dim=16),
    _spec("longcat_flash", "(KK) (KK)", DENSE, MOE, LATENT, notes="two latent attentions in each layer",
          attention_method="MLA", zero_expert_type="identity", ffn_hidden_size=96, moe_topk=2,
          expert_ffn_hidden_size=32, zero_expert_num=2, num_layers=2, mla_scale_q_lora=True,
          mla_scale_kv_lora=True),
    _spec("exaone4", "R R K", DENSE, window=WINDOW, notes="no RoPE in full layers", num_hidden_layers=3,
          rope_scaling=None, sliding_window=WINDOW, sliding_window_pattern="LLG"),
    _spec("olmo3", "R K", DENSE, window=WINDOW, layer_types=[SLIDING, FULL], sliding_window=WINDOW),
    _spec("plamo2", "A K A K", DENSE, notes="full attention whatever attention_window_size says",
          num_hidden_layers=4, hidden_size_per_head=32, attention_window_size=512, mamba_d_state=16,
          mamba_num_heads=4, mamba_step=2),
    _spec("baichuan_m1", "(AR) (AK)", WIDE, window=WINDOW, notes="convolution over K and V before the cache",
          sliding_window=WINDOW, sliding_window_layers=[0], conv_window=2),
    _spec("minicpm3", "K K", DENSE, LATENT, notes="latent projections, but K and V are cached expanded",
          dim_model_base=64, scale_depth=1.4, scale_emb=1.0,
          rope_scaling={"original_max_position_embeddings": 512, "long_factor": [1.0] * 16,
                        "short_factor": [1.0] * 16}),
    _spec("gpt2", "K K", notes="learned positions; one K/V head for each query head; embeddings always tied",
          n_ctx=512, n_embd=64, n_head=2, n_layer=2, n_positions=512, layer_norm_epsilon=1e-5),
    _spec("qwen3_moe", "K K", DENSE, MOE),
]  # fmt: skip

SPECS: Mapping[str, TinySpec] = {row.module: row for row in sorted(_ROWS, key=lambda row: row.module)}

UNBUILDABLE: Mapping[str, str] = {}

NOT_MODELS = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)

CHUNKING_MOVES_LOGITS: Mapping[str, float] = {}
