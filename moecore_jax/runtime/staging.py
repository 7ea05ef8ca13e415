"""Complete layer staging in prefill: a layer that many tokens route to is copied whole, while the
layer before it computes, and leaves the decode cache alone.

Two layers' experts are on the device at a time: the one that computes and the one that arrives.
While a layer is there, the experts that its warm start wants may be copied into its slots, device
to device.

Source: SPEC section 8.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.models.experts import ExpertArrays
from moecore_jax.residency import slots as slots_lib
from moecore_jax.runtime import routed, state
from moecore_jax.runtime.program import Program
from moecore_jax.runtime.state import GroupState


def fetch_layer(
  bank: ExpertArrays, index: jax.Array, num_experts: int, after: jax.Array
) -> ExpertArrays:
  """Copies all experts of one layer to the device, one asynchronous copy an array.

  Args:
    bank: stored arrays [rows, ...] of the layer's group, pinned host memory.
    index: int32 scalar, the layer within the group.
    num_experts: N.
    after: int32 scalar, 0, known when the copy may start: else the copies of all layers would.

  Returns:
    Stored arrays [N, ...], device memory.
  """
  start = index * num_experts + after
  with jax.named_scope("staging"):
    return {
      name: jax.device_put(
        lax.dynamic_slice_in_dim(rows, start, num_experts, 0), jax.memory.Space.Device
      )
      for name, rows in bank.items()
    }


def gather_layer(
  bank: ExpertArrays, group: GroupState, index: jax.Array, after: jax.Array
) -> ExpertArrays:
  """Likewise, but residents are copied from their slots; the copies follow one another."""
  num_experts = group.tables.expert_to_slot.shape[1]
  slots = group.tables.expert_to_slot[index]
  start = index * num_experts + after
  buffer = {
    name: jnp.zeros((num_experts, *rows.shape[1:]), rows.dtype) for name, rows in bank.items()
  }

  def copy(expert, buffer):
    def load(j, buffer):
      return routed.write_row(buffer, routed.fetch(bank, start + expert + j), expert)

    buffer = routed.write_row(
      buffer, routed.read_row(group.pool, jnp.maximum(slots[expert], 0)), expert
    )
    return lax.fori_loop(0, (slots[expert] < 0).astype(jnp.int32), load, buffer)

  return lax.fori_loop(0, num_experts, copy, buffer)


def num_streamed(
  tables: slots_lib.SlotTables, index: jax.Array, reuses_residents: bool
) -> jax.Array:
  """Returns int32 [], the experts that the staging of a layer copies from the bank."""
  num_experts = jnp.int32(tables.expert_to_slot.shape[1])
  if not reuses_residents:
    return num_experts
  return num_experts - jnp.sum(slots_lib.resident(tables, index), dtype=jnp.int32)


def prepare(
  tables: slots_lib.SlotTables, index: jax.Array, inputs: routed.Inputs, after: jax.Array
) -> routed.Prepared:
  """Returns what tokens run of a staged layer: row e of its buffer is expert e.

  Args:
    tables: slot tables before the layer was staged, for the hits.
    index: int32 scalar, the layer within the group.
    inputs: the tokens and their routing.
    after: int32 scalar, 0, known when the experts may run.
  """
  num_experts = tables.expert_to_slot.shape[1]
  valid = inputs.valid
  topk_ids = jnp.where(valid[:, None], inputs.routing.topk_ids, num_experts)
  member = jnp.zeros(num_experts, bool).at[topk_ids].set(True, mode="drop")
  size = min(topk_ids.size, num_experts)
  order = jnp.nonzero(member, size=size, fill_value=num_experts)[0].astype(jnp.int32)
  resident = slots_lib.resident(tables, index)
  hits = jnp.sum(
    resident[jnp.minimum(topk_ids, num_experts - 1)] & valid[:, None], axis=1, dtype=jnp.int32
  )
  counts = {
    "invocations": jnp.sum(valid, dtype=jnp.int32) * topk_ids.shape[1],
    "hits": jnp.sum(hits, dtype=jnp.int32),
  }
  return routed.Prepared(
    topk_ids,
    order,
    order,
    after,
    jnp.sum(member, dtype=jnp.int32),
    jnp.zeros((*topk_ids.shape, inputs.h.shape[1]), inputs.h.dtype),
    state.stack_counts(counts),
    hits,
  )


def warm_order(
  program: Program, group: GroupState, index: jax.Array, inputs: routed.Inputs
) -> jax.Array:
  """Returns int32 [N], the place of each expert in the order in which slots are filled, 0 first.

  It follows the domain's profile (`warm_rank`), the mean of the prompt's own selection scores, or
  the sum of both places, as `staging.fill` says; without a profile, "both" follows the prompt's
  alone. Where there is nothing to follow, no profile or no token, all places are N.
  """
  fill, rank = program.staging.fill, group.tables.warm_rank[index]
  scores, valid = inputs.routing.selection_scores, inputs.valid[:, None]
  lowest = jnp.min(jnp.where(jnp.isfinite(scores), scores, jnp.inf), axis=1, keepdims=True)
  scores = jnp.where(jnp.isfinite(scores), scores, lowest)
  own = _places(-jnp.sum(jnp.where(valid, scores, 0.0), axis=0))
  places = {"profile": rank, "prompt": own, "both": own + rank}[fill]
  is_known = jnp.any(valid)
  if fill == "profile":
    is_known &= jnp.any(rank > 0)
  return jnp.where(is_known, _places(places.astype(jnp.float32)), rank.shape[0])


def fill_slots(
  program: Program,
  group_index: int,
  group: GroupState,
  index: jax.Array,
  buffer: ExpertArrays,
  order: jax.Array,
  is_busy: jax.Array,
) -> tuple[GroupState, jax.Array]:
  """Fills a layer's slots with the first experts of an order, device to device, and starts its
  signals anew.

  Args:
    program: static settings.
    group_index: index of the expert group.
    group: its residency.
    index: int32 scalar, the layer within the group.
    buffer: stored arrays [N, ...] of the layer, row e is expert e.
    order: int32 [N], place of each expert; all N: nothing changes.
    is_busy: other requests decode: their residents and signals stay, only empty slots are filled.

  Returns:
    The group, and int32 [], experts that were displaced.
  """
  policy, max_slots = program.make_policy(), program.max_slots[group_index]
  num_experts = order.shape[0]
  wanted = order < group.tables.num_slots[index]
  num_wanted = jnp.sum(wanted, dtype=jnp.int32)
  held, stays = wanted | is_busy, is_busy | (num_wanted == 0)
  by_place = jnp.argsort(order).astype(jnp.int32)
  signals = jax.tree.map(
    lambda kept, fresh: jnp.where(stays, kept, fresh),
    routed.signals_of(group, index),
    policy.init(num_experts),
  )
  start = routed.Residency(group.pool, group.tables, signals, jnp.int32(0))

  def fill(i, residency):
    expert = by_place[num_wanted - 1 - i]  # the hottest last: it is the newest where recency counts
    slot, evicted = slots_lib.choose_slot(
      residency.tables, index, -order.astype(jnp.float32), held, max_slots
    )
    is_absent = residency.tables.expert_to_slot[index, expert] < 0

    def copy(j, residency):
      pool = routed.write_row(residency.pool, routed.read_row(buffer, expert + j), slot)
      return routed.enter(policy, residency._replace(pool=pool), index, expert, slot, evicted)

    return lax.fori_loop(0, (is_absent & (slot >= 0)).astype(jnp.int32), copy, residency)

  with jax.named_scope("fill_slots"):
    filled = lax.fori_loop(0, num_wanted, fill, start)
  signals = routed.with_signals(group, index, filled.signals)
  group = dataclasses.replace(group, pool=filled.pool, tables=filled.tables, policy=signals)
  return group, filled.evictions


def _places(values: jax.Array) -> jax.Array:
  """Returns the place of each value in ascending order, ties to the lower index: int32 [N]."""
  place = jnp.argsort(jnp.argsort(values, stable=True), stable=True)
  return place.astype(jnp.int32)
