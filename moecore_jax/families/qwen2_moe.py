"""Qwen2-MoE and Qwen1.5-MoE: grouped-query attention with biases, softmax routing, a shared expert
behind a gate of its own.

Source: the keys and config fields of the published checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import MoENames, Rules
from moecore_jax.specs import DenseSpec, GQASpec, LayerSpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "qwen2_moe"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  head_dim = reader.head_dim()
  attention = GQASpec(
    num_heads=reader.whole("num_attention_heads"),
    num_kv_heads=reader.whole("num_key_value_heads"),
    head_dim=head_dim,
    rope=reader.rope(head_dim, "halves"),
    qkv_bias=reader.flag("qkv_bias", True),
  )
  moe = MoESpec(
    softmax_router(reader),
    reader.whole("moe_intermediate_size"),
    reader.whole("shared_expert_intermediate_size"),
    has_shared_gate=True,
  )
  return ModelSpec(layers=sparse_layers(reader, attention, moe), **reader.common())


def softmax_router(reader: ConfigReader) -> RouterSpec:
  """Reads a softmax router."""
  return RouterSpec(
    num_experts=reader.whole("num_experts", "num_local_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    norm_topk=reader.flag("norm_topk_prob", False),
    scoring="softmax",
    bias="none",
  )


def sparse_layers(reader: ConfigReader, attention: GQASpec, moe: MoESpec) -> tuple[LayerSpec, ...]:
  """Returns all layers: every `decoder_sparse_step`-th has experts, but not `mlp_only_layers`."""
  reader.expect("hidden_act", "silu")
  reader.expect("use_sliding_window", False)
  step, dense = reader.whole("decoder_sparse_step", default=1), _dense_layers(reader)
  count = reader.layers("num_hidden_layers")
  is_moe = [i not in dense and (i + 1) % step == 0 for i in range(count)]
  hidden = 0 if all(is_moe) else reader.whole("intermediate_size")
  return tuple(LayerSpec(attention, moe if sparse else DenseSpec(hidden)) for sparse in is_moe)


def _dense_layers(reader: ConfigReader) -> list[int]:
  value = reader.config.get("mlp_only_layers")
  if value is not None and (not isinstance(value, list) or any(type(i) is not int for i in value)):
    reader.refuse("mlp_only_layers", "a list of whole numbers")
  return value or []


class _Rules(Rules):
  names = MoENames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate.weight")


key_map = _Rules.build_for
