"""GLM-5, 5.1 and 5.2: latent attention with a sparse indexer that several layers may share, sigmoid
routing, shared expert, MTP layer.

Source: the keys and config fields of the published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moecore_jax.families import deepseek_v3
from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.deepseek_v32 import read_indexer
from moecore_jax.families.rules import Rules
from moecore_jax.specs import LayerSpec, ModelSpec

MODEL_TYPE = "glm_moe_dsa"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("scoring_func", "sigmoid")
  indexer = read_indexer(reader, "interleaved")
  full = dataclasses.replace(deepseek_v3.latent_attention(reader), indexer=indexer)
  shared = dataclasses.replace(full, indexer=dataclasses.replace(indexer, is_shared=True))
  router = deepseek_v3.sigmoid_router(reader)
  moe = LayerSpec(full, deepseek_v3.moe_block(reader, router))
  layers = tuple(
    dataclasses.replace(layer, attention=shared if is_shared else full)
    for layer, is_shared in zip(
      deepseek_v3.with_dense_first(reader, moe), _shared(reader), strict=True
    )
  )
  return ModelSpec(
    layers=layers,
    mtp_layers=(moe,) * reader.layers("num_nextn_predict_layers", 0),
    **reader.common(),
  )


def _shared(reader: ConfigReader) -> list[bool]:
  """Returns for each layer whether it takes the choice of an earlier one's indexer."""
  count = reader.layers("num_hidden_layers")
  kinds = reader.kinds("indexer_types", ("full", "shared"), count)
  if kinds is None:
    every = reader.whole("index_topk_freq", default=1)
    kinds = ["full" if i % every == 0 else "shared" for i in range(count)]
  if len(kinds) != count or kinds[0] != "full":
    reader.refuse("indexer_types", f"one for each of {count} layers, the first 'full'")
  return [kind == "shared" for kind in kinds]


key_map = Rules.build_for
