"""Routed experts: their parameters, the expert function, and the ways of applying experts to
tokens.

Whatever executes experts keeps each expert's output per (token, rank) and combines the ranks in
top-k order, so that the order of arithmetic, and with it every bit of the result, does not depend
on which expert ran when or from where.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moecore_jax.models.layers import gated_unit
from moecore_jax.models.router import Routing
from moecore_jax.quantization import formats
from moecore_jax.quantization.matmul import affine
from moecore_jax.specs import ActivationSpec, ExpertFormat, ExpertGroup

SWIGLU = ActivationSpec()

ExpertArrays = dict[str, jax.Array]
"""{"gate_up": [..., D, 2F or words], "down": [..., F, D or words]} as stored, one row an expert or
one expert alone.
"""


class HostExpert(nnx.Param):
  """Stored weights of routed experts: the parameters whose home is pinned host memory.

  Split them from a model before other parameters: `nnx.split(model, HostExpert, ...)`; a filter for
  nnx.Param takes them too.
  """


class RoutedExperts(nnx.Module):
  """The bank of one expert group: row = index of the layer within the group * num_experts +
  expert.
  """

  def __init__(self, group: ExpertGroup, fmt: ExpertFormat, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.group, self.format, self.dtype = group, fmt, dtype
    if fmt == "float32":
      init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)

      def make(shape, stored):
        return init(rngs.params(), shape, stored)
    else:
      make = jnp.zeros  # packed banks are filled by a checkpoint
    for name, (shape, stored) in bank_layout(group, fmt).items():
      setattr(self, name, HostExpert(make(shape, stored), memory_kind="pinned_host"))

  def layer_weights(self, index: int) -> tuple[jax.Array, jax.Array]:
    """Fetches all experts of one layer to the device: gate_up [N, D, 2F] and down [N, F, D] of the
    compute dtype.
    """
    start, count = index * self.group.num_experts, self.group.num_experts

    def fetch(rows: jax.Array) -> jax.Array:
      rows = jax.device_put(lax.slice_in_dim(rows, start, start + count), jax.memory.Space.Device)
      return formats.unpack(rows, self.format, self.dtype, self.group.has_bias)

    gate_up, down = (fetch(getattr(self, name)[...]) for name in ("gate_up", "down"))
    return gate_up, down


def bank_layout(
  group: ExpertGroup, fmt: ExpertFormat
) -> dict[str, tuple[tuple[int, int, int], jnp.dtype]]:
  """Returns {array name: (shape [rows, ..., ...], storage dtype)} of a group's bank; a pool
  differs only in its rows.
  """
  dtype = formats.storage_dtype(fmt)
  shapes = {
    "gate_up": (group.embed_dim, 2 * group.expert_dim),
    "down": (group.expert_dim, group.embed_dim),
  }
  return {
    name: ((group.num_rows, *formats.storage_shape(*shape, fmt, group.has_bias)), dtype)
    for name, shape in shapes.items()
  }


def expert_bytes(group: ExpertGroup, fmt: ExpertFormat) -> int:
  """Returns the stored bytes of one expert of a group."""
  layout = bank_layout(group, fmt).values()
  return sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in layout)


def expert_mlp(
  x: jax.Array,
  gate_up: jax.Array,
  down: jax.Array,
  activation: ActivationSpec = SWIGLU,
  fmt: ExpertFormat = "float32",
) -> jax.Array:
  """One expert, or a batch of them.

  Args:
    x: [..., T, D].
    gate_up: stored [..., D, 2F], or as the format and biases shape it.
    down: stored [..., F, D], likewise.
    activation: the gated unit.
    fmt: format of the two.

  Returns:
    [..., T, D].
  """
  gate, up = jnp.split(affine(x, gate_up, fmt), 2, axis=-1)
  return affine(gated_unit(gate, up, activation), down, fmt)


def combine(rank_outputs: jax.Array, topk_weights: jax.Array) -> jax.Array:
  """Adds a token's expert outputs in top-k order.

  Args:
    rank_outputs: [T, A, D], output of the expert of each (token, rank); unused entries must be
      finite.
    topk_weights: float32 [T, A].

  Returns:
    [T, D] of rank_outputs' dtype; the sum is taken in float32, rank after rank.
  """
  total = rank_outputs[:, 0].astype(jnp.float32) * topk_weights[:, 0, None]
  for rank in range(1, topk_weights.shape[1]):
    total = total + rank_outputs[:, rank].astype(jnp.float32) * topk_weights[:, rank, None]
  return total.astype(rank_outputs.dtype)


def run_on_all_rows(
  outputs: jax.Array,
  h: jax.Array,
  topk_ids: jax.Array,
  expert: jax.Array,
  apply: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Runs one expert on all tokens of a small step and keeps the rows that chose it.

  Args:
    outputs: [T, A, D], outputs so far.
    h: [T, D], expert inputs.
    topk_ids: int32 [T, A].
    expert: int32 scalar.
    apply: the expert, [T, D] to [T, D].

  Returns:
    outputs with the (token, rank) entries of this expert written.
  """
  return jnp.where((topk_ids == expert)[:, :, None], apply(h)[:, None, :], outputs)


class Dispatch(NamedTuple):
  """Tokens sorted by expert, for steps with many tokens.

  Attributes:
    flat: int32 [T * A + block], (token, rank) entries as token * A + rank, sorted by expert; T * A
      in the padding.
    starts: int32 [N + 1], where each expert's entries begin.
  """

  flat: jax.Array
  starts: jax.Array


def sort_by_expert(
  topk_ids: jax.Array, valid: jax.Array, num_experts: int, block_rows: int
) -> Dispatch:
  """Sorts the (token, rank) entries of T tokens by expert; entries of invalid tokens come last and
  belong to none.

  Args:
    topk_ids: int32 [T, A].
    valid: bool [T].
    num_experts: N.
    block_rows: rows that one application of an expert takes.
  """
  flat_ids = jnp.where(valid[:, None], topk_ids, num_experts).reshape(-1)
  order = jnp.argsort(flat_ids, stable=True).astype(jnp.int32)
  starts = jnp.searchsorted(flat_ids[order], jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(
    jnp.int32
  )
  padding = jnp.full((block_rows,), flat_ids.shape[0], jnp.int32)
  return Dispatch(jnp.concatenate([order, padding]), starts)


def run_on_blocks(
  outputs: jax.Array,
  h: jax.Array,
  dispatch: Dispatch,
  block_rows: int,
  expert: jax.Array,
  apply: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """Runs one expert on its own tokens, block after block.

  Args:
    outputs: [T, A, D], outputs so far.
    h: [T, D], expert inputs.
    dispatch: of sort_by_expert with the same block_rows.
    block_rows: rows of a block; the shape that every application of every expert has.
    expert: int32 scalar.
    apply: the expert, [block_rows, D] to [block_rows, D].

  Returns:
    outputs with the (token, rank) entries of this expert written.
  """
  tokens, ranks, width = outputs.shape
  first, end = dispatch.starts[expert], dispatch.starts[expert + 1]
  lane = jnp.arange(block_rows, dtype=jnp.int32)

  def run_block(i, flat_outputs):
    at = first + i * block_rows
    flat = lax.dynamic_slice_in_dim(dispatch.flat, at, block_rows)
    flat = jnp.where(at + lane < end, flat, tokens * ranks)
    x = jnp.take(h, flat // ranks, axis=0, mode="fill", fill_value=0)
    return flat_outputs.at[flat].set(apply(x), mode="drop")

  num_blocks = (end - first + block_rows - 1) // block_rows
  flat_outputs = lax.fori_loop(0, num_blocks, run_block, outputs.reshape(-1, width))
  return flat_outputs.reshape(outputs.shape)


def run_all_at_once(
  h: jax.Array,
  routing: Routing,
  gate_up: jax.Array,
  down: jax.Array,
  capacity: int,
  activation: ActivationSpec = SWIGLU,
) -> tuple[jax.Array, jax.Array]:
  """Runs all experts of a layer as batched products: the differentiable form, for training and for
  whole-sequence calls.

  Args:
    h: [T, D], expert inputs.
    routing: of the T tokens.
    gate_up: [N, D, 2F] float, biases as one more row.
    down: [N, F, D].
    capacity: tokens that one expert takes, 1..T; entries beyond it are dropped (none at capacity
      T).
    activation: the gated unit.

  Returns:
    The combined outputs [T, D], and int32 [N], the tokens that chose each expert.
  """
  (tokens, ranks), num_experts = routing.topk_ids.shape, gate_up.shape[0]
  flat_ids = routing.topk_ids.reshape(-1)
  order = jnp.argsort(flat_ids, stable=True).astype(jnp.int32)
  load = jnp.zeros((num_experts,), jnp.int32).at[flat_ids].add(1)
  starts = jnp.cumsum(load) - load
  place = jnp.arange(tokens * ranks, dtype=jnp.int32) - starts[flat_ids[order]]  # within the expert
  slot = jnp.where(place < capacity, flat_ids[order] * capacity + place, num_experts * capacity)
  token_of_slot = (
    jnp.full((num_experts * capacity,), tokens, jnp.int32).at[slot].set(order // ranks, mode="drop")
  )
  x = jnp.take(h, token_of_slot, axis=0, mode="fill", fill_value=0).reshape(
    num_experts, capacity, -1
  )
  y = expert_mlp(x, gate_up, down, activation).reshape(num_experts * capacity, -1)
  slot_of_entry = jnp.zeros((tokens * ranks,), jnp.int32).at[order].set(slot)
  rank_outputs = jnp.take(y, slot_of_entry, axis=0, mode="fill", fill_value=0)
  return combine(rank_outputs.reshape(tokens, ranks, -1), routing.topk_weights), load
