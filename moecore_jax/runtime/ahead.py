"""Copies for the next MoE layer while the present one computes: which experts, and around what.

In decode the next layer's own router says what to copy. In a prefill that loads on demand nothing
has to be guessed, and the link is idle while a layer computes: there the copies are what the warm
start of the request's domain still lacks. Either way none or the layer's fixed number is copied.

A copy that may be absent takes two loops of which exactly one turns once, {copy; experts; approach}
and {experts; approach}: a condition would copy the pool, and a loop around the copy alone would
wait for it.

Source: SPEC sections 4 and 6.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.models.experts import ExpertArrays
from moecore_jax.models.router import Routing
from moecore_jax.residency import prefetch as prefetch_lib
from moecore_jax.residency import slots as slots_lib
from moecore_jax.runtime import routed as routed_lib
from moecore_jax.runtime.program import Program, Segment
from moecore_jax.runtime.state import GroupState

Pools = dict[int, ExpertArrays]
"""Pools by expert group: those that a part of the step reads or writes."""


class Ahead(NamedTuple):
  """Copies for the next layer.

  Attributes:
    group: its expert group.
    moe_index: int32 scalar, its index among the MoE layers.
    prediction: of its experts.
    bank_rows: int32 scalar each, where the copies come from.
    pool_rows: int32 scalar each, where they go.
    evictions: int32 scalar, experts that they displaced already.
  """

  group: int
  moe_index: jax.Array
  prediction: prefetch_lib.Prediction
  bank_rows: list[jax.Array]
  pool_rows: list[jax.Array]
  evictions: jax.Array


def look_ahead(
  program: Program,
  segment: Segment,
  offset: jax.Array,
  group: GroupState,
  routing: Routing,
  valid: jax.Array,
  step_key: jax.Array,
) -> tuple[GroupState, Ahead]:
  """Predicts what the layer at `offset` of a segment needs.

  Args:
    program: static settings.
    segment: of the next MoE layer.
    offset: int32 scalar, its place in the segment.
    group: residency of its expert group.
    routing: what its router says of the present layer's input.
    valid: bool [T], tokens that count.
    step_key: random key of the step.

  Returns:
    The group's residency, changed where copies displace experts at once; and the copies.
  """
  settings, tables = program.prefetch, group.tables
  index, count = segment.group_index(offset), segment.prefetch_count
  is_allowed = group.useful_rate[index] >= settings.min_useful_frac
  if settings.placement == "slot":
    is_allowed &= tables.num_slots[index] >= count
  prediction = prefetch_lib.predict(
    routing.topk_ids,
    routing.selection_scores,
    valid,
    slots_lib.resident(tables, index),
    count,
    is_allowed,
  )
  if settings.placement == "in_flight":
    return group, _in_flight(program, segment, offset, group, prediction)
  key = jax.random.fold_in(step_key, len(program.model.layers) + segment.moe_index(offset))
  ahead = _in_flight(program, segment, offset, group, prediction)
  group, rows, evictions = routed_lib.claim_slots(
    program, segment.group, group, index, prediction, key
  )
  return group, ahead._replace(pool_rows=rows, evictions=evictions)


def warm_ahead(
  program: Program,
  segment: Segment,
  offset: jax.Array,
  group: GroupState,
  valid: jax.Array,
  is_busy: jax.Array,
) -> Ahead:
  """Names what the warm start of the layer at `offset` of a segment lacks.

  Args:
    program, segment, offset, group, valid: as of `look_ahead`.
    is_busy: other requests decode: their residents stay, only empty slots are filled.
  """
  index, tables, count = segment.group_index(offset), group.tables, segment.prefetch_count
  spec = program.model.expert_groups[segment.group]
  resident, num_slots = slots_lib.resident(tables, index), tables.num_slots[index]
  candidates = prefetch_lib.warm_candidates(tables.warm_rank[index], resident, num_slots, count)
  nothing = jnp.full((valid.shape[0], spec.num_experts_per_tok), spec.num_experts, jnp.int32)
  is_room = ~is_busy | (num_slots - jnp.sum(resident, dtype=jnp.int32) >= count)
  is_issued = jnp.all(candidates >= 0) & jnp.any(valid) & is_room
  prediction = prefetch_lib.Prediction(candidates, is_issued, nothing)
  return _in_flight(program, segment, offset, group, prediction)


def _in_flight(
  program: Program,
  segment: Segment,
  offset: jax.Array,
  group: GroupState,
  prediction: prefetch_lib.Prediction,
) -> Ahead:
  """Returns copies into the in-flight rows."""
  num_experts = group.tables.expert_to_slot.shape[1]
  first_bank_row = segment.group_index(offset) * num_experts
  first_pool_row = routed_lib.transient_row(program, group.pool) + 1
  places = range(segment.prefetch_count)
  return Ahead(
    segment.group,
    segment.moe_index(offset),
    prediction,
    [first_bank_row + prediction.experts[j] for j in places],
    [jnp.int32(first_pool_row + j) for j in places],
    jnp.int32(0),
  )


def advance_with_copies(
  banks: tuple[ExpertArrays, ...], ahead: Ahead, advance: Callable, pools: Pools, carried: Any
) -> tuple[Pools, Any]:
  """Runs `advance` with the copies on the way if they are issued, else without.

  Args:
    banks: stored experts of each group, pinned host memory.
    ahead: the copies.
    advance: (int32 [] that is 0, pools, carried) -> (int32 [] that is 0 when the experts have run,
      (carried, *others)).
    pools: those that `advance` reads, and the one that the copies go to.
    carried: what `advance` takes and gives back.

  Returns:
    The pools, and (carried, *others).
  """

  def with_copies(turn, carry):
    pools, (carried, *_rest) = carry
    # + turn, for XLA moves what does not depend on it, the reads of the bank, out of the loop.
    after, result = advance(turn, pools, carried)
    waits = [turn, *[turn + _before_second_copy(after)] * (len(ahead.bank_rows) - 1)]
    with jax.named_scope("prefetch"):
      copies = [
        routed_lib.fetch(banks[ahead.group], row + wait)
        for row, wait in zip(ahead.bank_rows, waits, strict=True)
      ]
    pool = pools[ahead.group]
    for stored, row in zip(copies, ahead.pool_rows, strict=True):
      # + after: if the experts might still read the pool, XLA would write into a copy of it.
      pool = routed_lib.write_row(pool, stored, row + after)
    return pools | {ahead.group: pool}, result

  def without_copies(turn, carry):
    pools, (carried, *_rest) = carry
    return pools, advance(turn, pools, carried)[1]

  _, (_, *rest) = jax.eval_shape(advance, jnp.int32(0), pools, carried)
  blank = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), rest)
  count = ahead.prediction.is_issued.astype(jnp.int32)
  carry = lax.fori_loop(0, count, with_copies, (pools, (carried, *blank)))
  return lax.fori_loop(0, 1 - count, without_copies, carry)


def _before_second_copy(after: jax.Array) -> jax.Array:
  """Returns int32 [], 0, known when the second copy may start.

  A GPU has at most two slices on the way at a time, those of one expert: a second expert beside it
  would make the experts wait for the first. There it follows when they have run (`after`).
  """
  return lax.platform_dependent(after, cuda=lambda x: x, default=jnp.zeros_like)
