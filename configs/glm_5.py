"""GLM-5, experts in W4A8 and 28 slots a layer, in shapes alone: its memory plan.

    moecore plan --config=configs/glm_5.py

28 of 256 slots in each layer and 37376 tokens of context, the longest that fits, need 79.75 GB of
79.80 GB: dense weights in int8 22.55, KV cache 4.48, expert slots 39.74, layer buffers 9.68. The
bank has 368.02 GB of host memory. With prefill_buckets=(4096,) alone the longest is 53248.
"""

from moecore_jax.config import (
  DeviceConfig,
  EngineConfig,
  ModelConfig,
  PrefetchConfig,
  ResidencyConfig,
  RunConfig,
  StagingConfig,
)

_PUBLISHED = {
  "model_type": "glm_moe_dsa",
  "vocab_size": 154880,
  "hidden_size": 6144,
  "num_hidden_layers": 78,
  "num_nextn_predict_layers": 1,
  "first_k_dense_replace": 3,
  "intermediate_size": 12288,
  "moe_intermediate_size": 2048,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "num_experts_per_tok": 8,
  "n_group": 1,
  "topk_group": 1,
  "norm_topk_prob": True,
  "scoring_func": "sigmoid",
  "routed_scaling_factor": 2.5,
  "num_attention_heads": 64,
  "q_lora_rank": 2048,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 192,
  "qk_rope_head_dim": 64,
  "v_head_dim": 256,
  "index_n_heads": 32,
  "index_head_dim": 128,
  "index_topk": 2048,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1000000,
  "max_position_embeddings": 202752,
  "tie_word_embeddings": False,
  "eos_token_id": [154820, 154827, 154829],
}


def get_config() -> RunConfig:
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=28,
      prefetch=PrefetchConfig(max_experts=1),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=37376,
      prefill_buckets=(4096, 32768),
      prefill_block_tokens=1024,
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="w4a8",
      dense_format="w8a8",
      layer_loop="scanned",
    ),
    device=DeviceConfig(memory_bytes=84_000_000_000),
  )
