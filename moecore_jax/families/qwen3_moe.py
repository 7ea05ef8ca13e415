"""Qwen3-MoE: grouped-query attention with norms of each query and key head, softmax routing.

Source: Qwen3 technical report (2025) and the keys and config fields of the published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.qwen2_moe import softmax_router, sparse_layers
from moecore_jax.families.rules import Rules
from moecore_jax.specs import GQASpec, ModelSpec, MoESpec

MODEL_TYPE = "qwen3_moe"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  head_dim, has_bias = reader.head_dim(), reader.flag("attention_bias", False)
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves"),
    qkv_bias=has_bias,
    o_bias=has_bias,
    qk_norm="head",
  )
  moe = MoESpec(softmax_router(reader), reader.whole("moe_intermediate_size"))
  return ModelSpec(layers=sparse_layers(reader, attention, moe), **reader.common())


key_map = Rules.build_for
