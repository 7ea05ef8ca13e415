"""Writes random checkpoints in the published DeepSeek-V3 format, tiny ones and large ones."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from moecore_jax import families
from moecore_jax.checkpoint.published import INDEX_FILE, SINGLE_FILE

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(**overrides: Any) -> dict[str, Any]:
  """Returns a published config of one dense layer, two MoE layers of 8 experts and an MTP layer."""
  config = {
    "model_type": "deepseek_v3",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "tie_word_embeddings": False,
  }
  return config | overrides


def write_checkpoint(
  folder: str | pathlib.Path,
  config: dict[str, Any] | None = None,
  *,
  dtype: str = "float32",
  shard_bytes: int = 0,
  seed: int = 0,
) -> pathlib.Path:
  """Writes config.json and random weights.

  Args:
    folder: created.
    config: published config; None: `tiny_config()`.
    dtype: of the weights; the router biases are float32, as published.
    shard_bytes: start a new shard at about this size and write an index; 0: one file.
    seed: seed of the weights.

  Returns:
    The folder.
  """
  folder, config = pathlib.Path(folder), config or tiny_config()
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(config))
  tensors = _random_tensors(config, dtype, seed)
  if not shard_bytes:
    safetensors.numpy.save_file(dict(tensors), folder / SINGLE_FILE)
    return folder
  weight_map: dict[str, str] = {}
  shard: dict[str, np.ndarray] = {}
  for key, tensor in tensors:
    shard[key] = tensor
    if sum(t.nbytes for t in shard.values()) >= shard_bytes:
      _write_shard(folder, shard, weight_map)
      shard = {}
  if shard:
    _write_shard(folder, shard, weight_map)
  (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
  return folder


def _write_shard(
  folder: pathlib.Path, shard: dict[str, np.ndarray], weight_map: dict[str, str]
) -> None:
  name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
  safetensors.numpy.save_file(shard, folder / name)
  weight_map.update(dict.fromkeys(shard, name))


def _random_tensors(
  config: dict[str, Any], dtype: str, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields every key that the family consumes, and the copies that published MTP layers carry."""
  spec = families.model_spec(config)
  keymap = families.key_map(spec)
  rng = np.random.default_rng(seed)
  copy_shape = (spec.vocab_size, spec.embed_dim)
  copies = {key: copy_shape for key in keymap.skipped if key != "lm_head.weight"}
  for key, shape in {**keymap.shapes, **copies}.items():
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
    values = rng.standard_normal(shape, np.float32) * np.float32(scale)
    if key.endswith("norm.weight"):
      values += 1
    is_bias = key.endswith("e_score_correction_bias")
    yield key, values.astype(np.float32 if is_bias else DTYPES[dtype])
