"""What a compiled program may need: the bound on temporary device bytes, in a formula, and on
compile time."""

import dataclasses

import jax
import jax.numpy as jnp

from moecore_jax import memory
from moecore_jax.checkpoint.template import dense_template
from moecore_jax.models.attention.blockwise import padded_row_dim
from moecore_jax.models.experts import bank_layout
from moecore_jax.specs import DenseSpec, EngineSpec, LayerSpec, ModelSpec

EXPERTS_IN_FLIGHT = 4
"""Experts that may lie in temporary memory beside what a prefetch brings."""

_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class TempBound:
  """Most temporary bytes that a program may need; none of its terms knows slots or context
  capacity.

  Attributes:
    expert_bytes: the largest stored expert.
    dense_matrix_bytes: the largest dense matrix of a layer.
    activation_bytes: see `activation_bytes`.
  """

  expert_bytes: int
  dense_matrix_bytes: int
  activation_bytes: int

  @property
  def total_bytes(self) -> int:
    return EXPERTS_IN_FLIGHT * self.expert_bytes + self.dense_matrix_bytes + self.activation_bytes


def temp_bound(model: ModelSpec, engine: EngineSpec, tokens: int, head_tokens: int) -> TempBound:
  """Returns the bound of a program.

  Args:
    model: the model.
    engine: shapes and formats.
    tokens: tokens that a step computes.
    head_tokens: tokens whose logits it computes.
  """
  experts = [
    sum(memory.num_bytes(shape[1:], dtype) for shape, dtype in layout.values())
    for layout in (bank_layout(group, engine.expert_format) for group in model.expert_groups)
  ]
  layers = jax.tree.leaves(dense_template(model, jnp.dtype(engine.dtype))["layers"])
  return TempBound(
    expert_bytes=max(experts, default=0),
    dense_matrix_bytes=max(memory.num_bytes(leaf.shape, leaf.dtype) for leaf in layers),
    activation_bytes=activation_bytes(model, engine, tokens, head_tokens),
  )


def activation_bytes(model: ModelSpec, engine: EngineSpec, tokens: int, head_tokens: int) -> int:
  """Returns the bytes of one layer's activations and of the head's, all taken as live together, 4
  bytes a number.

  tokens * (8 D + widest layer) + block rows + 4 * head_tokens * V numbers, where a layer takes
  attention 4 H (R + block), experts 2 A D, the dense block's or an expert's hidden 4 F, routing 8
  N; R is the padded latent row.
  """
  widest = max(_layer_numbers(layer, model.embed_dim, engine) for layer in model.layers)
  row_dims = [padded_row_dim(layer.attention.latent_dim) for layer in model.layers]
  block = engine.batch_size * engine.kv_block_tokens * max(row_dims)
  numbers = tokens * (8 * model.embed_dim + widest) + block + 4 * head_tokens * model.vocab_size
  return _FLOAT_BYTES * numbers


def _layer_numbers(layer: LayerSpec, embed_dim: int, engine: EngineSpec) -> int:
  row = padded_row_dim(layer.attention.latent_dim)
  attention = 4 * layer.attention.num_heads * (row + engine.kv_block_tokens)
  if isinstance(layer.mlp, DenseSpec):
    return attention + 4 * layer.mlp.hidden_dim
  router = layer.mlp.router
  experts = 2 * router.num_experts_per_tok * embed_dim + 4 * layer.mlp.expert_dim
  return attention + experts + 4 * layer.mlp.shared_dim + 8 * router.num_experts
