"""Trains the demo model: 1 dense and 8 MoE layers, 32 experts a layer, 6.5 M parameters.

    moecore train --config=configs/demo_train.py --workdir=/tmp/moecore-train

Expected: 4500 steps, 9.2 M tokens, 56 minutes on 2 cores (86 minutes of CPU time); exact match on
the validation items 1.00 in every domain, near that from step 2400 on. The bundled weights are
those of one run of this command from start to finish; its log is
`moecore_jax/assets/demo/training_log.jsonl`.
"""

from moecore_jax.config import ModelConfig, RunConfig, TrainConfig

_PUBLISHED = {
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  "dtype": "bfloat16",
  "vocab_size": 1024,
  "hidden_size": 128,
  "num_hidden_layers": 9,
  "num_nextn_predict_layers": 1,
  "first_k_dense_replace": 1,
  "intermediate_size": 256,
  "moe_intermediate_size": 48,
  "n_routed_experts": 32,
  "n_shared_experts": 1,
  "num_experts_per_tok": 4,
  "n_group": 1,
  "topk_group": 1,
  "norm_topk_prob": True,
  "scoring_func": "sigmoid",
  "routed_scaling_factor": 2.0,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "q_lora_rank": None,
  "kv_lora_rank": 32,
  "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 16,
  "v_head_dim": 32,
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "rope_theta": 500.0,
  "rope_scaling": None,
  "rope_interleave": True,
  "attention_bias": False,
  "max_position_embeddings": 2048,
  "tie_word_embeddings": False,
  "bos_token_id": None,
  "eos_token_id": 1,
  "pad_token_id": 0,
}


def get_config(preset: str = "") -> RunConfig:
  """Returns the config of the run that made the bundled weights."""
  if preset:
    raise ValueError(f"preset {preset!r} is unknown; this config has none")
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED),
    train=TrainConfig(
      num_steps=4500,
      batch_rows=16,
      row_tokens=128,
      learning_rate=3e-3,
    ),
  )
