"""gpt-oss-20b in shapes alone: its memory plan.

    moecore plan --config=configs/gpt_oss_20b.py

12 of 32 slots in each layer and 131072 tokens of context on a device of 16 GB need 12.87 GB of
15.20 GB: dense weights 3.60, KV cache 3.22, expert slots 3.62, layer buffers 0.80. The bank has
9.61 GB of host memory.
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
  "model_type": "gpt_oss",
  "vocab_size": 201088,
  "hidden_size": 2880,
  "num_hidden_layers": 24,
  "intermediate_size": 2880,
  "num_local_experts": 32,
  "num_experts_per_tok": 4,
  "num_attention_heads": 64,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "sliding_window": 128,
  "layer_types": ["sliding_attention", "full_attention"] * 12,
  "swiglu_limit": 7.0,
  "rms_norm_eps": 1e-5,
  "rope_theta": 150000,
  "rope_scaling": {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
  },
  "max_position_embeddings": 131072,
  "tie_word_embeddings": False,
  "eos_token_id": 200002,
}


def get_config() -> RunConfig:
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=12,
      prefetch=PrefetchConfig(max_experts=1),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=131072,
      prefill_buckets=(2048,),
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="w4a8",
    ),
    device=DeviceConfig(memory_bytes=16_000_000_000),
  )
