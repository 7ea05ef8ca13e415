"""OLMoE: attention with norms of queries and keys over all heads together, softmax routing.

Source: OLMoE (2024) and the keys and config fields of its published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Rules
from moecore_jax.specs import GQASpec, LayerSpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "olmoe"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("hidden_act", "silu")
  reader.expect("attention_bias", False)
  reader.expect("clip_qkv", None)
  head_dim = reader.head_dim()
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves"),
    qk_norm="full",
  )
  router = RouterSpec(
    num_experts=reader.whole("num_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    norm_topk=reader.flag("norm_topk_prob", False),
    scoring="softmax",
    bias="none",
  )
  layer = LayerSpec(attention, MoESpec(router, reader.whole("intermediate_size")))
  return ModelSpec(layers=(layer,) * reader.layers("num_hidden_layers"), **reader.common())


key_map = Rules.build_for
