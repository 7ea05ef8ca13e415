"""DeepSeek-V2 and V2-Lite: multi-head latent attention, softmax routing, shared experts.

Source: DeepSeek-V2 (2024) and the keys and config fields of its published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moecore_jax.families import deepseek_v3
from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Rules
from moecore_jax.specs import LayerSpec, ModelSpec

MODEL_TYPE = "deepseek_v2"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  The published config says `norm_topk_prob` false; the weights are never normalised.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("scoring_func", "softmax")
  reader.expect("topk_method", "greedy", "group_limited_greedy")
  reader.expect("norm_topk_prob", False)
  is_grouped = config.get("topk_method") == "group_limited_greedy"
  router = dataclasses.replace(
    deepseek_v3.sigmoid_router(reader),
    scoring="softmax",
    bias="none",
    norm_topk=False,
    group_score="max",
  )
  if not is_grouped:
    router = dataclasses.replace(router, num_groups=1, topk_groups=1)
  moe = LayerSpec(deepseek_v3.latent_attention(reader), deepseek_v3.moe_block(reader, router))
  return ModelSpec(layers=deepseek_v3.with_dense_first(reader, moe), **reader.common())


key_map = Rules.build_for
