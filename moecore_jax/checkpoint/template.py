"""Abstract trees of a model's parameters, with memory kinds: what loading has to produce."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax import memory
from moecore_jax.models.experts import HostExpert, bank_layout
from moecore_jax.models.quantized import quantize_module
from moecore_jax.models.transformer import Transformer
from moecore_jax.specs import DenseFormat, ExpertFormat, ExpertGroup, ModelSpec

BANK_NAMES = ("experts", "mtp_experts")
"""Names of the model's two lists of banks: of the main stack, and of the MTP layers."""


def dense_template(
  spec: ModelSpec, dtype: jnp.dtype, dense_format: DenseFormat = "float"
) -> dict[str, Any]:
  """Returns the dense parameters as a nested dict of ShapeDtypeStruct in device memory.

  Args:
    spec: the model.
    dtype: dense parameters; what the model keeps in float32 (the routers) is float32 here too.
    dense_format: storage of the linear maps of decoder layers.
  """
  kinds = tuple(dict.fromkeys(spec.layers))  # equal layers are traced once
  distinct = dataclasses.replace(spec, layers=kinds)

  def make() -> Transformer:
    model = Transformer(distinct, dtype=dtype, rngs=nnx.Rngs(0))
    if dense_format != "float":
      for layer in model.layers:
        quantize_module(layer)
    return model

  model = nnx.eval_shape(make)
  _, _, dense = nnx.split(model, HostExpert, ...)
  at = memory.placement("device")
  tree = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), nnx.to_pure_dict(dense)
  )
  of_kind = {kind: tree["layers"][i] for i, kind in enumerate(kinds)}
  return tree | {"layers": {i: of_kind[layer] for i, layer in enumerate(spec.layers)}}


def expert_groups(spec: ModelSpec, bank: str) -> tuple[ExpertGroup, ...]:
  """Returns the expert groups whose banks are listed under one of BANK_NAMES."""
  return {"experts": spec.expert_groups, "mtp_experts": spec.mtp_expert_groups}[bank]


def bank_template(
  spec: ModelSpec, fmt: ExpertFormat
) -> dict[str, tuple[dict[str, jax.ShapeDtypeStruct], ...]]:
  """Returns for each bank name one {"gate_up", "down"} in pinned host memory per expert group."""
  at = memory.placement("pinned_host")
  return {
    name: tuple(
      {
        key: jax.ShapeDtypeStruct(shape, dtype, sharding=at)
        for key, (shape, dtype) in bank_layout(group, fmt).items()
      }
      for group in expert_groups(spec, name)
    )
    for name in BANK_NAMES
  }


def total_bytes(tree: Any) -> int:
  """Returns the bytes of all leaves of an abstract or concrete tree."""
  return sum(memory.num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def check_against(tree: Any, template: Any) -> None:
  """Checks structure, shapes, dtypes and memory kinds: a wrong kind would move a bank silently.

  Raises:
    AssertionError: a leaf differs; names it.
  """
  wanted, got = (dict(jax.tree_util.tree_leaves_with_path(t)) for t in (template, tree))
  assert wanted.keys() == got.keys(), (
    f"leaves differ: {sorted(map(str, wanted.keys() ^ got.keys()))[:5]}"
  )
  for path, leaf in wanted.items():
    have = got[path]
    found = (have.shape, have.dtype, have.sharding.memory_kind)
    expected = (leaf.shape, leaf.dtype, leaf.sharding.memory_kind)
    assert found == expected, f"{jax.tree_util.keystr(path)} is {found}, expected {expected}"
