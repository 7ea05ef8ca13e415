"""OLMoE-1B-7B in shapes alone: its memory plan.

    moecore plan --config=configs/olmoe.py

16 of 64 slots in each layer and 4096 tokens of context on a device of 8 GB need 7.02 GB of 7.60 GB:
dense weights 0.96, KV cache 0.54, expert slots 3.23, layer buffers 1.61. The bank has 12.88 GB of
host memory.
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
  "model_type": "olmoe",
  "vocab_size": 50304,
  "hidden_size": 2048,
  "num_hidden_layers": 16,
  "intermediate_size": 1024,
  "num_experts": 64,
  "num_experts_per_tok": 8,
  "norm_topk_prob": False,
  "num_attention_heads": 16,
  "num_key_value_heads": 16,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000,
  "max_position_embeddings": 4096,
  "tie_word_embeddings": False,
  "eos_token_id": 50279,
}


def get_config() -> RunConfig:
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=16,
      prefetch=PrefetchConfig(max_experts=1),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=4096,
      prefill_buckets=(1024,),
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="bfloat16",
    ),
    device=DeviceConfig(memory_bytes=8_000_000_000),
  )
