"""The table: what each of mlx-lm's model modules needs in order to be built small.

Fragments hold the keys that many modules share, with one value for all; a row adds its own. A hidden size of
128 instead of 64 stands where a module derives head_dim from it, so that every K/V head has 32 channels or
more and can be packed in groups of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lumina_cache.lab.tiny.spec import TinySpec
from lumina_cache.lab.tiny.weights import GAIN

__all__ = ["CHUNKING_MOVES_LOGITS", "NOT_MODELS", "SPECS", "UNBUILDABLE"]

VOCAB = 128
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
GRANITE: _Config = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}
GEMMA4: _Config = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "sliding_window": WINDOW,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
HADAMARD: _Config = {
    "schema_version": 1,
    "tensor_namespace": "mlx-lm-text",
    "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    "modules": [
        {"path": f"model.layers.{layer}.mlp.{name}_proj", "embedding": False, "dtype": "float16", "block": 0}
        for layer in (0, 3)
        for name in ("gate", "up")
    ],
}
INDEXER: _Config = {"index_head_dim": 64, "index_n_heads": 2, "index_topk": 16}
KIMI_LINEAR: _Config = {
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2],
    "full_attn_layers": [3],
}
LFM2: _Config = {
    "layer_types": ["conv", FULL],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
LONGROPE: _Config = {
    "original_max_position_embeddings": 512,
    "long_factor": [1.0] * 16,
    "short_factor": [1.0] * 16,
}
NAS_BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
]
LONGCAT: _Config = {
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
ROPE_BY_TYPE: _Config = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "default", "rope_theta": 1e5},
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
    outer: _Config = MappingProxyType({}),
    window: int | None = None,
    chunk: int | None = None,
    embedding_gain: float = GAIN,
    greedy_ok: bool = True,
    notes: str = "",
    **own: Any,
) -> TinySpec:
    config: dict[str, Any] = {"model_type": module, "vocab_size": VOCAB}
    for fragment in fragments:
        config |= fragment
    config |= own
    if nested is not None:
        config = {"model_type": module, "vocab_size": VOCAB, nested: config, **outer}
    return TinySpec(
        module=module,
        config=MappingProxyType(config),
        own_keys=frozenset(own),
        cache=cache,
        vocab_size=VOCAB,
        window=window,
        chunk=chunk,
        embedding_gain=embedding_gain,
        greedy_ok=greedy_ok,
        notes=notes,
    )


_ROWS = [
    _spec("afm7", "K K",
          notes="four layers, two cache entries: the last two layers read K/V of the second through "
                "keys_and_values(); K and V are rounded to 8 bits before the cache; embeddings always tied",
          hidden_dim=128, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2),
    _spec("afmoe", "R K", DENSE, MOE, window=WINDOW, notes="no RoPE in full layers; gated attention",
          layer_types=[SLIDING, FULL], num_dense_layers=1, sliding_window=WINDOW),
    _spec("apertus", "K K", WIDE, notes="norm on q and k",
          post_norm=False, qk_norm=True),
    _spec("baichuan_m1", "(AR) (AK)", WIDE, window=WINDOW, notes="convolution over K and V before the cache",
          sliding_window=WINDOW, sliding_window_layers=[0], conv_window=2),
    _spec("bailing_hybrid", "A K A K", DENSE, MOE, LATENT, notes="linear attention and latent attention",
          num_hidden_layers=4, layer_group_size=2, group_norm_size=2),
    _spec("bailing_moe", "K K", WIDE, MOE),
    _spec("bailing_moe_linear", "A K A K", DENSE, MOE, notes="linear attention and full attention",
          num_hidden_layers=4, layer_group_size=2, group_norm_size=2),
    _spec("bailing_moe_v3", "A K A K", DENSE, MOE, LATENT, notes="delta attention and latent attention",
          num_hidden_layers=4, layer_group_size=2, moe_shared_expert_intermediate_size=32),
    _spec("bitnet", "K K", WIDE, notes="dense matrices for the ternary ones, which need a Metal kernel"),
    _spec("cohere", "K K", WIDE, embedding_gain=0.5, notes="embeddings always tied",
          use_qk_norm=True, logit_scale=1.0),
    _spec("cohere2", "R R R K", WIDE, window=WINDOW, notes="no RoPE in full layers; embeddings always tied",
          num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=4, logit_scale=1.0),
    _spec("dbrx", "K K", d_model=128, n_layers=2, n_heads=4,
          ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
          attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}),
    _spec("deepseek", "K K", WIDE, MOE),
    _spec("deepseek_v2", "K K", DENSE, MOE, LATENT, notes="latent attention",
          topk_method="greedy", rope_scaling=YARN),
    _spec("deepseek_v3", "K K", DENSE, MOE, LATENT, notes="latent attention"),
    _spec("deepseek_v32", "(KK) (KK)", DENSE, MOE, LATENT, INDEXER,
          notes="latent attention and an indexer that keeps the 16 best rows; its cache's V is zeros"),
    _spec("deepseek_v41", "LayerCache LayerCache LayerCache LayerCache", DENSE, MOE, window=WINDOW,
          notes="a cache class of its own: a window of latent rows, and compressed rows that later layers "
                "share",
          num_hidden_layers=4, q_lora_rank=32, qk_rope_head_dim=16, o_groups=2, o_lora_rank=32,
          sliding_window=WINDOW, compress_ratios=[0, 4, 4, 4], kv_source_layer_ids=[1],
          index_source_layer_ids=[1, 3], candidate_source_layer_id=1, candidate_topk_blocks=4,
          candidate_block_size=2, index_n_heads=2, index_head_dim=32, index_topk=4, hc_mult=2),
    _spec("dots1", "K K", DENSE, MOE, notes="norm on q and k"),
    _spec("ernie4_5", "K K", DENSE, use_bias=False),
    _spec("ernie4_5_moe", "K K", DENSE, use_bias=False, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
          moe_intermediate_size=32, moe_num_shared_experts=1),
    _spec("exaone", "K K", WIDE, num_layers=2),
    _spec("exaone4", "R R K", DENSE, window=WINDOW, notes="no RoPE in full layers",
          num_hidden_layers=3, rope_scaling=None, sliding_window=WINDOW, sliding_window_pattern="LLG"),
    _spec("exaone_moe", "R K", DENSE, MOE, window=WINDOW, notes="no RoPE in full layers",
          layer_types=[SLIDING, FULL], is_moe_layer=[False, True], sliding_window=WINDOW),
    _spec("falcon_h1", "(AK) (AK)", DENSE, MAMBA2, notes="attention and mamba side by side in each layer",
          mamba_d_ssm=128),
    _spec("gear", "A R K", DENSE, window=WINDOW,
          notes="attention logits soft-capped, so attention is computed by hand; short convolution",
          num_hidden_layers=3, layer_types=["conv_mixer", SLIDING, FULL], sliding_window=WINDOW,
          attn_logit_softcapping=50.0),
    _spec("gemma", "K K", DENSE, embedding_gain=0.5, notes="embeddings always tied"),
    _spec("gemma2", "K K", DENSE, embedding_gain=0.5,
          notes="attention logits soft-capped, so attention is computed by hand; no window; embeddings "
                "always tied"),
    _spec("gemma3", "R R K", DENSE, nested="text_config", window=WINDOW, notes="gemma3_text inside",
          num_hidden_layers=3, sliding_window=WINDOW, sliding_window_pattern=3, query_pre_attn_scalar=32),
    _spec("gemma3_text", "R R K", DENSE, window=WINDOW, num_hidden_layers=3, sliding_window=WINDOW,
          sliding_window_pattern=3, query_pre_attn_scalar=32),
    _spec("gemma3n", "R R K", DENSE, nested="text_config", window=WINDOW,
          notes="six layers, three cache entries: the last three layers read K/V of earlier ones",
          num_hidden_layers=6, num_kv_shared_layers=3, layer_types=[SLIDING, SLIDING, FULL] * 2,
          vocab_size_per_layer_input=128, sliding_window=WINDOW, rope_local_base_freq=1e4,
          final_logit_softcapping=30.0, activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
          hidden_size_per_layer_input=16, altup_num_inputs=2, altup_coef_clip=120.0,
          altup_correct_scale=True, altup_active_idx=0, laurel_rank=16, intermediate_size=[96] * 6),
    _spec("gemma4", "R R K", DENSE, GEMMA4, nested="text_config", window=WINDOW, notes="gemma4_text inside"),
    _spec("gemma4_text", "R R K", DENSE, GEMMA4, window=WINDOW,
          notes="six layers, three cache entries: the last three read K/V of earlier ones; full layers have "
                "another head_dim and V = K"),
    _spec("glm", "K K", DENSE),
    _spec("glm4", "K K", DENSE, partial_rotary_factor=0.5),
    _spec("glm4_moe", "K K", DENSE, MOE, rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5),
    _spec("glm4_moe_lite", "K K", DENSE, MOE, LATENT, notes="latent attention"),
    _spec("glm_moe_dsa", "(KK) (KK)", DENSE, MOE, LATENT, INDEXER, notes="deepseek_v32 inside",
          rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
    _spec("gpt2", "K K", notes="learned positions; one K/V head for each query head; embeddings always tied",
          n_ctx=512, n_embd=64, n_head=2, n_layer=2, n_positions=512, layer_norm_epsilon=1e-05),
    _spec("gpt_bigcode", "K K", notes="one K/V head for all; learned positions",
          n_embd=64, n_layer=2, n_inner=96, n_head=2, n_positions=512, layer_norm_epsilon=1e-05,
          multi_query=True, tie_word_embeddings=False),
    _spec("gpt_neox", "K K", WIDE, rotary_emb_base=10000, rotary_pct=0.25, num_key_value_heads=None),
    _spec("gpt_oss", "R K", DENSE, MOE, window=WINDOW, notes="attention sinks in every layer",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW),
    _spec("gptj", "K K", n_embd=64, n_positions=512, n_head=2, rotary_dim=16, n_layer=2),
    _spec("granite", "K K", WIDE, GRANITE),
    _spec("granitemoe", "K K", WIDE, MOE, GRANITE),
    _spec("granitemoehybrid", "A K", WIDE, MOE, MAMBA2, GRANITE, layer_types=["mamba", "attention"]),
    _spec("helium", "K K", WIDE),
    _spec("hunyuan", "K K K K", WIDE, MOE,
          notes="odd layers take the projected K/V of the layer before; each caches its own copy",
          num_hidden_layers=4, moe_topk=2, num_shared_expert=1, use_mixed_mlp_moe=True, use_qk_norm=True,
          use_cla=True, cla_share_factor=2, rope_scaling={"alpha": 1.0, "factor": 1.0, "type": "dynamic"}),
    _spec("hunyuan_v1_dense", "K K", DENSE, notes="norm on q and k after RoPE"),
    _spec("internlm2", "K K", WIDE),
    _spec("internlm3", "K K", WIDE),
    _spec("iquestloopcoder", "K K R R", DENSE, window=WINDOW,
          notes="two layers, four cache entries: the second loop attends to K/V of the first and, in a "
                "window, to its own; both attention calls get the second loop's entry",
          loop_num=2, loop_window_size=WINDOW),
    _spec("jamba", "A K A K", WIDE, MOE, num_hidden_layers=4, attn_layer_offset=1, attn_layer_period=2,
          expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2),
    _spec("kimi_k25", "K K", DENSE, MOE, LATENT, nested="text_config", notes="deepseek_v3 inside"),
    _spec("kimi_k3", "A A K", DENSE, MOE, LATENT, nested="text_config",
          notes="delta attention and latent attention",
          num_hidden_layers=3, linear_attn_config=KIMI_LINEAR, num_experts_per_token=2,
          num_key_value_heads=4),
    _spec("kimi_linear", "A A K", DENSE, MOE, LATENT, notes="delta attention and latent attention",
          num_hidden_layers=3, num_experts_per_token=2, model_max_length=512, linear_attn_config=KIMI_LINEAR),
    _spec("kimi_vl", "K K", DENSE, MOE, LATENT, nested="text_config", notes="deepseek_v3 inside"),
    _spec("Klear", "K K", WIDE, MOE, notes="norm on q and k"),
    _spec("laguna", "R K", DENSE, MOE, window=WINDOW, layer_types=[SLIDING, FULL], sliding_window=WINDOW,
          num_attention_heads_per_layer=[4, 2]),
    _spec("lfm2", "A K", WIDE, LFM2, notes="short convolution and attention; embeddings always tied"),
    _spec("lfm2-vl", "A K", WIDE, LFM2, nested="text_config", notes="lfm2 inside"),
    _spec("lfm2_moe", "A K", WIDE, MOE, notes="short convolution and attention; embeddings always tied",
          layer_types=["conv", FULL], conv_bias=False, conv_L_cache=3, use_expert_bias=True,
          num_dense_layers=1),
    _spec("lille-130m", "K K", block_size=512, layer_norm_eps=1e-05, n_embd=128, n_head=4, n_kv_heads=2,
          n_layer=2, rope_theta=1e4, tie_word_embeddings=False),
    _spec("llama", "K K", DENSE),
    _spec("llama4", "C C C K", DENSE, MOE, nested="text_config", chunk=CHUNK,
          notes="chunked attention; the front is trimmed by the model",
          num_hidden_layers=4, attention_chunk_size=CHUNK, interleave_moe_layer_step=2,
          intermediate_size_mlp=96, rope_scaling=None, use_qk_norm=True, num_experts_per_tok=1),
    _spec("llama4_text", "K K", DENSE, notes="no RoPE in some layers",
          intermediate_size_mlp=96, no_rope_layers=[1, 0], use_qk_norm=True),
    _spec("longcat_flash", "(KK) (KK)", DENSE, MOE, LATENT, LONGCAT,
          notes="two latent attentions in each layer",
          attention_method="MLA", zero_expert_type="identity"),
    _spec("longcat_flash_ngram", "A (KK) (KK)", DENSE, MOE, LATENT, LONGCAT,
          notes="the first entry holds the last token ids",
          ngram_vocab_size_ratio=1, emb_neighbor_num=3, emb_split_num=2),
    _spec("mamba", "A A", DENSE, state_size=16, conv_kernel=4, use_bias=False, use_conv_bias=True,
          time_step_rank=8),
    _spec("mamba2", "A A", DENSE, num_heads=4, state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
          use_conv_bias=True, time_step_limit=(0.001, 100.0), time_step_rank=8, intermediate_size=128),
    _spec("mellum", "R K", DENSE, MOE, window=WINDOW, layer_types=[SLIDING, FULL], sliding_window=WINDOW,
          rope_parameters=ROPE_BY_TYPE),
    _spec("mimo", "K K", WIDE),
    _spec("mimo_v2_flash", "R K", DENSE, MOE, window=WINDOW,
          notes="attention sinks; K and V differ in width",
          hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 1], add_swa_attention_sink_bias=True,
          add_full_attention_sink_bias=False, sliding_window_size=WINDOW, layernorm_epsilon=1e-05,
          swa_rope_theta=1e4, swa_num_attention_heads=4, swa_num_key_value_heads=4, head_dim=64,
          v_head_dim=32, swa_head_dim=64, swa_v_head_dim=32, partial_rotary_factor=0.5),
    _spec("minicpm", "K K", WIDE, dim_model_base=128, scale_depth=1.4, scale_emb=1.0),
    _spec("minicpm3", "K K", WIDE, LATENT, notes="latent projections, but K and V are cached expanded",
          dim_model_base=64, scale_depth=1.4, scale_emb=1.0, rope_scaling=LONGROPE),
    _spec("minimax", "K K", DENSE, MOE, rotary_dim=16),
    _spec("minimax_m3_vl", "(K) (KK)", DENSE, MOE, nested="text_config",
          notes="block-sparse attention; the index cache's V has no channels",
          dense_intermediate_size=96, moe_layer_freq=[0, 1], layer_types=[FULL, "sparse_attention"],
          index_n_heads=2, index_head_dim=32, index_block_size=4, index_topk_blocks=3),
    _spec("ministral3", "R K", DENSE, window=WINDOW, notes="attention scaled by position",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW, rope_parameters=LLAMA4_ROPE),
    _spec("mistral3", "K K", DENSE, {"model_type": "ministral3"}, nested="text_config", window=WINDOW,
          notes="ministral3 inside, but no make_cache: the window is in the mask alone, also with N = 1",
          layer_types=[SLIDING, FULL], sliding_window=WINDOW, rope_parameters=LLAMA4_ROPE),
    _spec("mistral4", "K K", DENSE, MOE, LATENT, notes="latent attention scaled by position",
          rope_parameters={**YARN, **LLAMA4_ROPE}),
    _spec("mixtral", "K K", WIDE, MOE),
    _spec("muse_glimmer", "R K", DENSE, window=WINDOW, layer_types=[SLIDING, FULL], sliding_window=WINDOW,
          output_multiplier=1.0),
    _spec("nanbeige", "K K K K", DENSE, notes="two layers run twice, a cache entry for each run",
          num_loops=2),
    _spec("nanochat", "K K", WIDE),
    _spec("nemotron", "K K", DENSE, hidden_act="relu2"),
    _spec("nemotron-nas", "K K", WIDE,
          notes="heads differ by layer; a layer without attention has no cache entry",
          num_hidden_layers=3, num_attention_heads=4, block_configs=NAS_BLOCKS),
    _spec("nemotron_h", "A K A", DENSE, MOE, notes="only mamba and attention blocks have a cache entry",
          hybrid_override_pattern=["M", "*", "-", "M", "E"], mamba_num_heads=4, mamba_head_dim=32,
          mamba_proj_bias=False, ssm_state_size=16, conv_kernel=4, n_groups=1, use_bias=False,
          use_conv_bias=True, moe_shared_expert_intermediate_size=32),
    _spec("olmo2", "K K", DENSE, notes="norm on q and k"),
    _spec("olmo3", "R K", DENSE, window=WINDOW, layer_types=[SLIDING, FULL], sliding_window=WINDOW),
    _spec("olmo_hybrid", "A A K", DENSE, DELTA, notes="gated delta net and attention",
          num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", FULL],
          linear_allow_neg_eigval=True),
    _spec("olmoe", "K K", DENSE, MOE, notes="norm on q and k"),
    _spec("openelm", "K K", notes="heads differ by layer",
          head_dim=32, num_transformer_layers=2, model_dim=64, ffn_dim_divisor=32, num_query_heads=[4, 2],
          num_kv_heads=[2, 1], ffn_multipliers=[1.0, 2.0], share_input_output_layers=False),
    _spec("phi", "K K", WIDE, partial_rotary_factor=0.5),
    _spec("phi3", "K K", WIDE, notes="fused q, k, v"),
    _spec("phi3small", "K K", greedy_ok=False,
          notes="block-sparse attention in even layers, which adds the boolean mask to the scores and so "
                "sees later tokens of its block; needs logits for 100352 tokens, some of them always -inf",
          vocab_size=100352, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
          num_key_value_heads=1, layer_norm_epsilon=1e-05, mup_embedding_multiplier=1.0,
          mup_width_multiplier=1.0, dense_attention_every_n_layers=2, ff_intermediate_size=96,
          gegelu_limit=20.0, blocksparse_block_size=32, blocksparse_num_local_blocks=1,
          blocksparse_vert_stride=2),
    _spec("phimoe", "K K", WIDE, MOE),
    _spec("phixtral", "K K", num_vocab=128, model_dim=128, num_heads=4, num_layers=2, rotary_dim=16,
          num_experts_per_tok=2, num_local_experts=4),
    _spec("pixtral", "K K", DENSE, nested="text_config", notes="llama inside"),
    _spec("plamo", "K K", WIDE, n_shared_head=2),
    _spec("plamo2", "A K A K", DENSE, notes="full attention whatever attention_window_size says",
          num_hidden_layers=4, hidden_size_per_head=32, attention_window_size=512, mamba_d_state=16,
          mamba_num_heads=4, mamba_step=2),
    _spec("plamo3", "R K", DENSE, window=WINDOW, window_size=WINDOW, sliding_window_pattern=2),
    _spec("prism_hadamard_qwen35", "A A A K", DENSE, DELTA, nested="text_config", outer=HADAMARD,
          notes="qwen3_5 inside, some matrices in two bits, none rotated",
          hidden_size=128, num_hidden_layers=4),
    _spec("qwen", "K K", WIDE, notes="one K/V head for each query head",
          kv_channels=32),
    _spec("qwen2", "K K", WIDE, notes="bias on q, k and v"),
    _spec("qwen2_moe", "K K", WIDE, MOE),
    _spec("qwen2_vl", "K K", WIDE, nested="text_config", notes="qwen2 inside"),
    _spec("qwen3", "K K", DENSE, notes="norm on q and k"),
    _spec("qwen3_5", "A A A K", DENSE, DELTA, nested="text_config", notes="gated delta net and attention",
          num_hidden_layers=4, full_attention_interval=4),
    _spec("qwen3_5_moe", "A A A K", DENSE, MOE, DELTA, nested="text_config", notes="qwen3_5 inside",
          num_hidden_layers=4, full_attention_interval=4),
    _spec("qwen3_moe", "K K", DENSE, MOE),
    _spec("qwen3_next", "A A A K", DENSE, MOE, DELTA, notes="gated delta net and gated attention",
          num_hidden_layers=4, partial_rotary_factor=0.5, full_attention_interval=4),
    _spec("qwen3_vl", "K K", DENSE, nested="text_config", notes="qwen3 inside"),
    _spec("qwen3_vl_moe", "K K", DENSE, MOE, nested="text_config", notes="qwen3_moe inside"),
    _spec("recurrent_gemma", "A A R", WIDE, window=WINDOW, notes="embeddings always tied",
          num_hidden_layers=3, block_types=["recurrent", "recurrent", "attention"], conv1d_width=4,
          logits_soft_cap=30.0, attention_window_size=WINDOW, num_key_value_heads=1),
    _spec("rwkv7", "A A", DENSE, a_low_rank_dim=16, v_low_rank_dim=16, gate_low_rank_dim=16,
          decay_low_rank_dim=16),
    _spec("seed_oss", "K K", DENSE),
    _spec("smollm3", "K K", DENSE, notes="no RoPE in some layers",
          no_rope_layer_interval=2),
    _spec("solar_open", "K K", DENSE, MOE, notes="glm4_moe inside",
          partial_rotary_factor=1.0),
    _spec("spark2_5", "R K", DENSE, window=WINDOW, notes="attention gated by head",
          sliding_window=WINDOW, rope_parameters=ROPE_BY_TYPE, layer_types=[SLIDING, FULL]),
    _spec("stablelm", "K K", WIDE, use_qkv_bias=False, partial_rotary_factor=0.5, qk_layernorm=True),
    _spec("starcoder2", "K K", WIDE),
    _spec("step3p5", "R K", DENSE, window=WINDOW, notes="heads differ between sliding and full layers",
          num_attention_groups=2, sliding_window=WINDOW, layer_types=[SLIDING, FULL],
          attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 4}, moe_num_experts=4,
          moe_top_k=2, moe_intermediate_size=32, share_expert_dim=32, moe_layers_enum="1"),
    _spec("talkie", "K K", WIDE, notes="one K/V head for each query head"),
    _spec("telechat3", "K K", DENSE),
    _spec("youtu_llm", "K K", DENSE, LATENT, notes="latent attention"),
]  # fmt: skip

SPECS: Mapping[str, TinySpec] = {row.module: row for row in sorted(_ROWS, key=lambda row: row.module)}

UNBUILDABLE: Mapping[str, str] = {
    "muse_spark": "its attention, router and norms call kernels of mlx_lm.kernels that exist for Metal alone "
    "(RuntimeError: [metal_kernel] No Metal back-end.)",
    "olmo": "it ends the process on import unless ai2-olmo is installed, and any prompt chunk above one "
    "token fails (ValueError: Cannot perform inplace addition on an mlx.core.array and str)",
}
"""Modules that cannot be built and run on every device, with the reason or the exception."""

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

CHUNKING_MOVES_LOGITS: Mapping[str, str] = {
    "phi3small": "adds the boolean mask to the scores of its block-sparse layers, so a token sees the later "
    "tokens of its block as far as they are in the same prompt chunk",
    "plamo3": "its mask lets a sliding layer see window_size + 1 tokens and its cache keeps window_size, so "
    "a token sees the one more as far as it is in the same prompt chunk",
}
"""Modules whose logits, with mlx-lm's own cache, depend on how the prompt is cut into chunks, and why. Every
other module gives the same logits to 1e-4 for any cut of 40 tokens."""
