"""GLM-4.5, 4.5-Air, 4.6 and 4.7: grouped-query attention with a half rotation, sigmoid routing with
a selection bias, shared expert, MTP layer.

Source: GLM-4.5 (2025) and the keys and config fields of the published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families import deepseek_v3
from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Rules
from moecore_jax.specs import GQASpec, LayerSpec, ModelSpec

MODEL_TYPE = "glm4_moe"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("hidden_act", "silu")
  head_dim = reader.whole("head_dim")
  share = reader.nested("rope_parameters").number(
    "partial_rotary_factor", reader.number("partial_rotary_factor", 0.5, True), True
  )
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(int(head_dim * share), "halves"),
    qkv_bias=reader.flag("attention_bias", False),
    qk_norm="head" if reader.flag("use_qk_norm", False) else "none",
  )
  router = deepseek_v3.sigmoid_router(reader)
  moe = LayerSpec(attention, deepseek_v3.moe_block(reader, router))
  return ModelSpec(
    layers=deepseek_v3.with_dense_first(reader, moe),
    mtp_layers=(moe,) * reader.layers("num_nextn_predict_layers", 0),
    **reader.common(),
  )


key_map = Rules.build_for
