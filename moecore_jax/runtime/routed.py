"""Runs the routed experts of one layer through the slot pool: residency, loads from the bank,
execution.

Order within a layer: signals, plan, the early members of a union that does not fit (one at a time),
loads of what is still absent, execution of the rest. Every product and sum is the same whatever is
resident.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.models import experts as experts_lib
from moecore_jax.models.experts import ExpertArrays
from moecore_jax.models.router import Routing
from moecore_jax.quantization import formats
from moecore_jax.residency import slots as slots_lib
from moecore_jax.runtime import state as state_lib
from moecore_jax.runtime.program import Program
from moecore_jax.runtime.state import GroupState

MAX_DENSE_ROWS = 16
"""Up to this many tokens an expert runs on all of them; beyond, on blocks of its own tokens."""


class RoutedOut(NamedTuple):
  """What the routed experts of one layer give.

  Attributes:
    y: [T, D], combined expert outputs, zero for tokens that are not valid.
    group: the group's state after the step.
    counts: int32 [4], see state.COUNTERS.
    hits: int32 [T], invocations of each token whose expert was resident when the layer routed.
  """

  y: jax.Array
  group: GroupState
  counts: jax.Array
  hits: jax.Array


class _Residency(NamedTuple):
  """Loop carry of the loads: what a load changes."""

  pool: ExpertArrays
  tables: slots_lib.SlotTables
  signals: object
  evictions: jax.Array


def fetch(bank: ExpertArrays, row: jax.Array) -> ExpertArrays:
  """Copies one expert to the device: the slice of a host array, then device_put, becomes one
  asynchronous copy an array.

  Args:
    bank: stored arrays [rows, ...], pinned host memory.
    row: int32 scalar.

  Returns:
    Stored arrays [...] of one expert, device memory.
  """
  return {
    name: jax.device_put(
      lax.dynamic_index_in_dim(rows, row, 0, keepdims=False), jax.memory.Space.Device
    )
    for name, rows in bank.items()
  }


def run_expert(program: Program, pool: ExpertArrays, row: jax.Array, x: jax.Array) -> jax.Array:
  """Applies the expert in pool row `row` to x [T, D]; only this one expert is unpacked."""
  stored = {
    name: lax.dynamic_index_in_dim(rows, row, 0, keepdims=False) for name, rows in pool.items()
  }
  fmt = program.engine.expert_format
  weights = {name: formats.unpack(value, fmt, x.dtype) for name, value in stored.items()}
  return experts_lib.expert_mlp(x, weights["gate_up"], weights["down"])


def block_rows(num_tokens: int, num_experts_per_tok: int, num_experts: int) -> int:
  """Returns the rows of an expert block: the mean tokens of an expert, rounded up to a power of
  two within 8..128.
  """
  mean = max(1, num_tokens * num_experts_per_tok // num_experts)
  return min(128, max(8, 1 << (mean - 1).bit_length()))


def run_routed(
  program: Program,
  phase: int,
  group_index: int,
  bank: ExpertArrays,
  group: GroupState,
  index: jax.Array,
  h: jax.Array,
  routing: Routing,
  valid: jax.Array,
  key: jax.Array,
) -> RoutedOut:
  """Runs the routed experts of one layer.

  Args:
    program: static settings.
    phase: state.DECODE (the policy observes and decides) or state.PREFILL (signals rest; eviction
      by warm rank or recency).
    group_index: index of the expert group.
    bank: the group's stored experts, pinned host memory.
    group: the group's residency.
    index: int32 scalar, the layer within the group.
    h: [T, D], expert inputs.
    routing: of the T tokens.
    valid: bool [T]; other tokens route nothing, load nothing and change no signal.
    key: random key of this layer and step.

  Source: SPEC sections 5 and 8.
  """
  policy = program.make_policy()
  tables = group.tables
  num_experts = tables.expert_to_slot.shape[1]
  max_slots = program.max_slots[group_index]
  transient_row = group.pool["down"].shape[0] - 1
  topk_ids = jnp.where(valid[:, None], routing.topk_ids, num_experts)

  signals = jax.tree.map(
    lambda s: lax.dynamic_index_in_dim(s, index, 0, keepdims=False), group.policy
  )
  if phase == state_lib.DECODE:
    signals = policy.observe(signals, topk_ids, routing.selection_scores, valid)
  resident = slots_lib.resident(tables, index)
  plan = slots_lib.plan_step(topk_ids, valid, resident, tables.num_slots[index], policy.evicts)
  hits = jnp.sum(
    resident[jnp.minimum(topk_ids, num_experts - 1)] & valid[:, None], axis=1, dtype=jnp.int32
  )

  def load(i: jax.Array, carry: _Residency) -> _Residency:
    expert = plan.order[i]
    if phase == state_lib.DECODE:
      priority = policy.priority(carry.signals, jax.random.fold_in(key, i))
    else:
      priority = slots_lib.prefill_priority(carry.tables, index)
    held = slots_lib.protected(plan) if policy.evicts else jnp.ones(num_experts, bool)
    slot, evicted = slots_lib.choose_slot(carry.tables, index, priority, held, max_slots)
    row = jnp.where(slot < 0, transient_row, slot)
    stored = fetch(bank, index * num_experts + expert)
    pool: ExpertArrays = {
      name: lax.dynamic_update_index_in_dim(carry.pool[name], stored[name], row, 0)
      for name in stored
    }
    signals = policy.placed(carry.signals, expert)
    return _Residency(
      pool,
      slots_lib.place(carry.tables, index, expert, slot),
      jax.tree.map(lambda new, old: jnp.where(slot < 0, old, new), signals, carry.signals),
      carry.evictions + (evicted >= 0).astype(jnp.int32),
    )

  if h.shape[0] <= MAX_DENSE_ROWS:

    def apply(expert, pool, row, outputs):
      return experts_lib.run_on_all_rows(
        outputs, h, topk_ids, expert, lambda x: run_expert(program, pool, row, x)
      )
  else:
    num_tokens, fan_out = topk_ids.shape
    rows = block_rows(num_tokens, fan_out, num_experts)
    dispatch = experts_lib.sort_by_expert(topk_ids, valid, num_experts, rows)

    def apply(expert, pool, row, outputs):
      return experts_lib.run_on_blocks(
        outputs, h, dispatch, rows, expert, lambda x: run_expert(program, pool, row, x)
      )

  def run(
    i: jax.Array, pool: ExpertArrays, tables: slots_lib.SlotTables, outputs: jax.Array
  ) -> jax.Array:
    expert = plan.order[i]
    slot = tables.expert_to_slot[index, expert]
    return apply(expert, pool, jnp.where(slot < 0, transient_row, slot), outputs)

  def run_early(i, carry):
    residency, outputs = carry
    absent = residency.tables.expert_to_slot[index, plan.order[i]] < 0
    # i + j, for XLA moves what does not depend on j, the read of the bank, out of the inner loop.
    residency = lax.fori_loop(0, absent.astype(jnp.int32), lambda j, c: load(i + j, c), residency)
    return residency, run(i, residency.pool, residency.tables, outputs)

  outputs = jnp.zeros((*topk_ids.shape, h.shape[1]), h.dtype)
  residency = _Residency(group.pool, tables, signals, jnp.int32(0))
  with jax.named_scope("early_experts"):
    residency, outputs = lax.fori_loop(0, plan.num_early, run_early, (residency, outputs))
  with jax.named_scope("residual_loads"):
    first = jnp.maximum(plan.num_early, plan.num_resident)
    end = plan.num_experts if policy.evicts else first  # static: what is absent ran early
    residency = lax.fori_loop(first, end, load, residency)
  with jax.named_scope("experts"):
    outputs = lax.fori_loop(
      plan.num_early,
      plan.num_experts,
      lambda i, out: run(i, residency.pool, residency.tables, out),
      outputs,
    )
  tables = slots_lib.touch(residency.tables, index, plan.order)
  signals = jax.tree.map(
    lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0),
    group.policy,
    residency.signals,
  )
  counts = jnp.stack(
    [
      jnp.sum(valid, dtype=jnp.int32) * topk_ids.shape[1],
      jnp.sum(hits, dtype=jnp.int32),
      plan.num_experts - plan.num_resident,
      residency.evictions,
    ]
  )
  y = experts_lib.combine(outputs, routing.topk_weights)
  return RoutedOut(y, GroupState(residency.pool, tables, signals), counts, hits)
