"""Qwen3-30B-A3B in shapes alone: its memory plan.

    moecore plan --config=configs/qwen3_30b_a3b.py

48 of 128 slots in each layer and 32768 tokens of context on a device of 16 GB need 13.33 GB of
15.20 GB: dense weights 3.11, KV cache 3.22, expert slots 5.47, layer buffers 0.61. The bank has
14.58 GB of host memory.
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
  "model_type": "qwen3_moe",
  "vocab_size": 151936,
  "hidden_size": 2048,
  "num_hidden_layers": 48,
  "intermediate_size": 6144,
  "moe_intermediate_size": 768,
  "num_experts": 128,
  "num_experts_per_tok": 8,
  "norm_topk_prob": True,
  "num_attention_heads": 32,
  "num_key_value_heads": 4,
  "head_dim": 128,
  "rms_norm_eps": 1e-6,
  "rope_theta": 1000000,
  "max_position_embeddings": 40960,
  "tie_word_embeddings": False,
  "eos_token_id": 151645,
}


def get_config() -> RunConfig:
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=48,
      prefetch=PrefetchConfig(max_experts=1),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=32768,
      prefill_buckets=(2048,),
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="w4a8",
    ),
    device=DeviceConfig(memory_bytes=16_000_000_000),
  )
