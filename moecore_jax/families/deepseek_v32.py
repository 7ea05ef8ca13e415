"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention.

Source: DeepSeek-V3.2 (2025) and the keys and config fields of its published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moecore_jax.families import deepseek_v3
from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Rules
from moecore_jax.specs import IndexerSpec, LayerSpec, ModelSpec, RopePairs

MODEL_TYPE = "deepseek_v32"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("scoring_func", "sigmoid")
  indexer = read_indexer(reader, "halves")
  attention = dataclasses.replace(deepseek_v3.latent_attention(reader), indexer=indexer)
  router = deepseek_v3.sigmoid_router(reader)
  moe = LayerSpec(attention, deepseek_v3.moe_block(reader, router))
  return ModelSpec(
    layers=deepseek_v3.with_dense_first(reader, moe),
    mtp_layers=(moe,) * reader.layers("num_nextn_predict_layers", 0),
    **reader.common(),
  )


def read_indexer(reader: ConfigReader, pairs: RopePairs) -> IndexerSpec:
  """Reads the indexer; it rotates as many components as the attention."""
  return IndexerSpec(
    num_heads=reader.whole("index_n_heads"),
    head_dim=reader.whole("index_head_dim"),
    topk=reader.whole("index_topk"),
    rope=reader.rope(reader.whole("qk_rope_head_dim"), pairs),
  )


key_map = Rules.build_for
