"""DeepSeek-V3: multi-head latent attention, sigmoid routing with a selection bias, shared expert,
MTP layers.

Source: DeepSeek-V3 technical report (2024) and the keys and config fields of its published
checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from moecore_jax.families.config_reader import ConfigReader
from moecore_jax.families.rules import Rules
from moecore_jax.specs import DenseSpec, LayerSpec, MLASpec, ModelSpec, MoESpec, RouterSpec

MODEL_TYPE = "deepseek_v3"


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
  """Reads a published config.json.

  Args:
    config: the parsed file.

  Raises:
    ValueError: a field is missing or has a value that this family does not have.
  """
  reader = ConfigReader(config, MODEL_TYPE)
  reader.expect("scoring_func", "sigmoid")
  reader.expect("rope_interleave", True)
  router = sigmoid_router(reader)
  moe = LayerSpec(latent_attention(reader), moe_block(reader, router))
  return ModelSpec(
    layers=with_dense_first(reader, moe),
    mtp_layers=(moe,) * reader.layers("num_nextn_predict_layers", 0),
    **reader.common(),
  )


key_map = Rules.build_for


def latent_attention(reader: ConfigReader) -> MLASpec:
  """Reads latent attention as the DeepSeek families spell it."""
  reader.expect("attention_bias", False)
  rope_dim = reader.whole("qk_rope_head_dim")
  return MLASpec(
    num_heads=reader.whole("num_attention_heads"),
    q_lora_rank=reader.whole("q_lora_rank") if reader.has("q_lora_rank") else None,
    kv_lora_rank=reader.whole("kv_lora_rank"),
    qk_nope_head_dim=reader.whole("qk_nope_head_dim"),
    qk_rope_head_dim=rope_dim,
    v_head_dim=reader.whole("v_head_dim"),
    rope=reader.rope(rope_dim, "interleaved"),
  )


def sigmoid_router(reader: ConfigReader) -> RouterSpec:
  """Reads a sigmoid router with selection bias and groups."""
  return RouterSpec(
    num_experts=reader.whole("n_routed_experts"),
    num_experts_per_tok=reader.whole("num_experts_per_tok"),
    num_groups=reader.whole("n_group", default=1),
    topk_groups=reader.whole("topk_group", default=1),
    norm_topk=reader.flag("norm_topk_prob", True),
    scale=reader.number("routed_scaling_factor", 1.0),
  )


def moe_block(reader: ConfigReader, router: RouterSpec) -> MoESpec:
  """Reads a MoE block whose shared expert is several routed ones wide."""
  width = reader.whole("moe_intermediate_size")
  return MoESpec(router, width, width * reader.whole("n_shared_experts", default=0, least=0))


def with_dense_first(reader: ConfigReader, moe: LayerSpec) -> tuple[LayerSpec, ...]:
  """Returns all layers, the first `first_k_dense_replace` of them dense."""
  num_layers = reader.layers("num_hidden_layers")
  num_dense = reader.layers("first_k_dense_replace", 0)
  dense = moe
  if num_dense:
    dense = LayerSpec(moe.attention, DenseSpec(reader.whole("intermediate_size")))
  return tuple(dense if i < num_dense else moe for i in range(num_layers))
