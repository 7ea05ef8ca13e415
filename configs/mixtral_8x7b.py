"""Mixtral-8x7B in shapes alone: its memory plan.

    moecore plan --config=configs/mixtral_8x7b.py

4 of 8 slots in each layer and 32768 tokens of context on a device of 24 GB need 22.36 GB of 22.80
GB: dense weights 3.21, KV cache 4.29, expert slots 11.38, layer buffers 1.41. The bank has 22.58 GB
of host memory.
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
  "model_type": "mixtral",
  "vocab_size": 32000,
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "intermediate_size": 14336,
  "num_local_experts": 8,
  "num_experts_per_tok": 2,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1000000,
  "max_position_embeddings": 32768,
  "tie_word_embeddings": False,
  "eos_token_id": 2,
}


def get_config() -> RunConfig:
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=4,
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
    device=DeviceConfig(memory_bytes=24_000_000_000),
  )
