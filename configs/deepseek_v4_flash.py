"""DeepSeek-V4-Flash in shapes alone, experts in W4A8, 84 slots a layer: its memory plan, and what
its programs need on a device.

    moecore plan --config=configs/deepseek_v4_flash.py
    python -m bench.aot --config=configs/deepseek_v4_flash.py --target=h200 --json=/tmp/v4.json

84 of 256 slots in each layer and 376832 tokens of context need 75.62 GB of 79.80 GB: dense weights
14.78, KV cache 2.60, expert slots 45.58, layer buffers 6.46. The bank has 142.10 GB of host memory.

Layers are scanned: the step compiles in 34 s for an H200 and in 35 s for a v5p. Before a product, a
GPU copies the scanned layer's matrix (0.25 to 0.27 GB a layer in all); with
`--config.engine.layer_loop=unrolled` it does not, and the step compiles in about 5 minutes.

Presets: none (84 GB, 84 slots in every layer), `nonuniform` (78, 84 or 120 slots, the same 3612 in
  all), `gib` (84 GiB).
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
  "model_type": "deepseek_v4",
  "vocab_size": 129280,
  "hidden_size": 4096,
  "num_hidden_layers": 43,
  "num_nextn_predict_layers": 1,
  "num_hash_layers": 3,
  "moe_intermediate_size": 2048,
  "n_routed_experts": 256,
  "n_shared_experts": 1,
  "num_experts_per_tok": 6,
  "norm_topk_prob": True,
  "scoring_func": "sqrtsoftplus",
  "routed_scaling_factor": 1.5,
  "swiglu_limit": 10.0,
  "num_attention_heads": 64,
  "num_key_value_heads": 1,
  "head_dim": 512,
  "qk_rope_head_dim": 64,
  "q_lora_rank": 1024,
  "o_groups": 8,
  "o_lora_rank": 1024,
  "sliding_window": 128,
  "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
  "index_n_heads": 64,
  "index_head_dim": 128,
  "index_topk": 512,
  "hc_mult": 4,
  "hc_sinkhorn_iters": 20,
  "hc_eps": 1e-6,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000,
  "compress_rope_theta": 160000,
  "rope_scaling": {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
  },
  "max_position_embeddings": 1048576,
  "tie_word_embeddings": False,
  "eos_token_id": 1,
}


_LARGE, _NUM_LAYERS, _UNIFORM = (7, 9, 19, 31, 37), 43, 84


def get_config(preset: str = "") -> RunConfig:
  """Returns the config of a preset."""
  if preset not in ("", "nonuniform", "gib"):
    raise ValueError(f"preset {preset!r} is unknown; leave it out or use nonuniform or gib")
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    residency=ResidencyConfig(
      slots_per_layer=_UNIFORM,
      slots=_nonuniform_slots() if preset == "nonuniform" else (),
      prefetch=PrefetchConfig(max_experts=1),
      staging=StagingConfig(enabled=True),
    ),
    engine=EngineConfig(
      batch_size=1,
      context_tokens=376832,
      prefill_buckets=(4096, 32768),
      kv_block_tokens=512,
      dtype="bfloat16",
      expert_format="w4a8",
      layer_loop="scanned",
    ),
    device=DeviceConfig(memory_bytes=84 << 30 if preset == "gib" else 84_000_000_000),
  )


def _nonuniform_slots() -> tuple[int, ...]:
  """Five layers have 120 slots and 30 give six each for them; which eight keep theirs is not
  published: here the last eight of the others.
  """
  others = [i for i in range(_NUM_LAYERS) if i not in _LARGE]
  kept = set(others[30:])
  return tuple(120 if i in _LARGE else _UNIFORM if i in kept else 78 for i in range(_NUM_LAYERS))
