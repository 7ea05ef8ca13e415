"""gpt-oss: grouped-query attention with sinks, every other layer over a window; experts with
biases and a clamped gated unit.

Source: gpt-oss model card (2025) and the keys and config fields of the published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Bank, MoENames, Rules
from moecore_jax.specs import ActivationSpec, GQASpec, LayerSpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "gpt_oss"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("hidden_act", "silu")
  head_dim, has_bias = reader.head_dim(), reader.flag("attention_bias", True)
  full = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves", 150000.0),
    qkv_bias=has_bias,
    o_bias=has_bias,
    has_sinks=True,
  )
  attention = {
    "full_attention": full,
    "sliding_attention": dataclasses.replace(full, window=reader.whole("sliding_window")),
  }
  count = reader.layers("num_hidden_layers")
  kinds = reader.kinds("layer_types", list(attention), count) or list(reversed(attention)) * count
  router = RouterSpec(
    num_experts=reader.whole("num_local_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok", "experts_per_token"),
    scoring="softmax_topk",
    bias="logits",
  )
  moe = MoESpec(router, reader.whole("intermediate_size"), has_expert_bias=True)
  return ModelSpec(
    layers=tuple(LayerSpec(attention[kind], moe) for kind in kinds[:count]),
    activation=ActivationSpec(
      reader.number("swiglu_alpha", 1.702), 1.0, reader.number("swiglu_limit", 7.0, True)
    ),
    **reader.common(),
  )


class _Rules(Rules):
  names = MoENames(router="mlp.router.weight", bias="mlp.router.bias")

  def experts(self, prefix: str, moe: MoESpec, bank: Bank) -> None:
    dim, width, mlp = self.spec.embed_dim, moe.expert_dim, prefix + "mlp.experts."
    shapes = {
      mlp + "gate_up_proj": (dim, 2 * width),
      mlp + "gate_up_proj_bias": (2 * width,),
      mlp + "down_proj": (width, dim),
      mlp + "down_proj_bias": (dim,),
    }
    self.fused_experts(bank, moe.router.num_experts, shapes, _expert_arrays)


def _expert_arrays(
  gate_up: np.ndarray, gate_up_bias: np.ndarray, down: np.ndarray, down_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Even columns of the published [D, 2F] are the gate's, odd ones the linear half's."""
  gate_up = np.concatenate([gate_up, gate_up_bias[None]])
  return (
    np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], axis=1),
    np.concatenate([down, down_bias[None]]),
  )


key_map = _Rules.build_for
