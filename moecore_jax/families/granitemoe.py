"""Granite 3.0 MoE: grouped-query attention, softmax over the chosen experts, factors on embeddings,
residual additions, attention scores and logits.

Source: Granite 3.0 (2024) and the keys and config fields of the published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Bank, MoENames, Rules
from moecore_jax.specs import GQASpec, LayerSpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "granitemoe"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("hidden_act", "silu")
  head_dim, has_bias = reader.head_dim(), reader.flag("attention_bias", False)
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves"),
    qkv_bias=has_bias,
    o_bias=has_bias,
    scale=reader.number("attention_multiplier", 1.0),
  )
  router = RouterSpec(
    num_experts=reader.whole("num_local_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    scoring="softmax_topk",
    bias="none",
  )
  layer = LayerSpec(attention, MoESpec(router, reader.whole("intermediate_size")))
  return ModelSpec(
    layers=(layer,) * reader.layers("num_hidden_layers"),
    embedding_multiplier=reader.number("embedding_multiplier", 1.0),
    residual_multiplier=reader.number("residual_multiplier", 1.0),
    logits_divisor=reader.number("logits_scaling", 1.0, True),
    **reader.common(),
  )


class _Rules(Rules):
  names = MoENames(router="block_sparse_moe.router.layer.weight")

  def experts(self, prefix: str, moe: MoESpec, bank: Bank) -> None:
    dim, width, block = self.spec.embed_dim, moe.expert_dim, prefix + "block_sparse_moe."
    shapes = {
      block + "input_linear.weight": (2 * width, dim),
      block + "output_linear.weight": (dim, width),
    }
    self.fused_experts(bank, moe.router.num_experts, shapes, _expert_arrays)


def _expert_arrays(gate_up: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  return gate_up.T, down.T


key_map = _Rules.build_for
