"""DeepSeek-V3 in shapes alone: what its programs would need on a device, without its weights.

    python -m bench.aot --config=configs/deepseek_v3.py --target=h200 --json=/tmp/deepseek_v3.json

Expected: every program fits the cap of 84 GB, temporary bytes of the decode step stay below some
experts and one dense matrix, and the bank (1.3 TB) stays in host memory.

Presets: none (layers unrolled: fast steps), `scanned` (fast compilation).
"""

from moecore_jax.config import DeviceConfig, EngineConfig, ModelConfig, ResidencyConfig, RunConfig

_PUBLISHED = {
  "model_type": "deepseek_v3",
  "vocab_size": 129280,
  "hidden_size": 7168,
  "num_hidden_layers": 61,
  "num_nextn_predict_layers": 1,
  "first_k_dense_replace": 3,
  "intermediate_size": 18432,
  "moe_intermediate_size": 2048,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "num_experts_per_tok": 8,
  "n_group": 8,
  "topk_group": 4,
  "norm_topk_prob": True,
  "scoring_func": "sigmoid",
  "routed_scaling_factor": 2.5,
  "num_attention_heads": 128,
  "q_lora_rank": 1536,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64,
  "v_head_dim": 128,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000,
  "rope_scaling": {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
  },
  "max_position_embeddings": 163840,
  "tie_word_embeddings": False,
  "eos_token_id": 1,
}


def get_config(preset: str = "") -> RunConfig:
  """Returns the config, with the layers in a scan for the preset `scanned`."""
  if preset not in ("", "scanned"):
    raise ValueError(f"preset {preset!r} is unknown; leave it out or use scanned")
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(slots_per_layer=8),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=32768,
      prefill_buckets=(512,),
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="bfloat16",
      layer_loop="scanned" if preset else "unrolled",
    ),
    device=DeviceConfig(memory_bytes=84_000_000_000),
  )
