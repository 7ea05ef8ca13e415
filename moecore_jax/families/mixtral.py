"""Mixtral: grouped-query attention, softmax routing with normalised weights.

Source: Mixtral of Experts (2024) and the keys and config fields of its published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import MoENames, Rules
from moecore_jax.specs import GQASpec, LayerSpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "mixtral"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("hidden_act", "silu")
  head_dim = reader.head_dim()
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves", 1e6),
    window=reader.whole("sliding_window") if reader.has("sliding_window") else None,
  )
  router = RouterSpec(
    num_experts=reader.whole("num_local_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    scoring="softmax",
    bias="none",
  )
  layer = LayerSpec(attention, MoESpec(router, reader.whole("intermediate_size")))
  return ModelSpec(layers=(layer,) * reader.layers("num_hidden_layers"), **reader.common())


class _Rules(Rules):
  names = MoENames(
    router="block_sparse_moe.gate.weight",
    experts=(
      "block_sparse_moe.experts.{}.w1.weight",
      "block_sparse_moe.experts.{}.w3.weight",
      "block_sparse_moe.experts.{}.w2.weight",
    ),
  )


key_map = _Rules.build_for
