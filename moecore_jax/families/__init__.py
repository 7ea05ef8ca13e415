"""Model families: how each published config and key set maps to our specs and arrays."""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families import (
  deepseek_v2,
  deepseek_v3,
  deepseek_v4,
  deepseek_v32,
  glm4_moe,
  glm_moe_dsa,
  gpt_oss,
  granitemoe,
  mixtral,
  olmoe,
  qwen2_moe,
  qwen3_moe,
)
from moecore_jax.families.checks import check
from moecore_jax.families.config_reader import shown
from moecore_jax.families.keymap import KeyMap
from moecore_jax.specs import ModelSpec

_FAMILIES = {
  family.MODEL_TYPE: family
  for family in (
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    glm4_moe,
    glm_moe_dsa,
    gpt_oss,
    granitemoe,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
  )
}

NAMES = tuple(sorted(_FAMILIES))
"""Model types that are supported."""


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Returns the ModelSpec of a published config.json.

  Raises:
    ValueError: the model type is not supported, or a field is missing or wrong.
  """
  model_type = config.get("model_type")
  if model_type not in NAMES:
    raise ValueError(
      f"config.json: model_type {shown(model_type)} is not one of {', '.join(NAMES)}"
    )
  spec = _FAMILIES[model_type].model_spec(config)
  check(spec)
  return spec


def key_map(spec: ModelSpec) -> KeyMap:
  """Returns the rules from published keys to the arrays of `spec`."""
  return _FAMILIES[spec.family].key_map(spec)
