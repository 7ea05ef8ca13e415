"""Runs the routed experts of one layer through the slot pool.

`prepare` does all that changes residency: signals, arrivals of the prefetch, substitution, plan,
the early members of a union that does not fit (one at a time), loads of what is still absent.
`execute` then runs the rest. Between the two, copies for the next layer may start. Every product
and sum is the same whatever is resident.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from moecore_jax.models import experts as experts_lib
from moecore_jax.models.experts import ExpertArrays
from moecore_jax.models.hyper import Mix
from moecore_jax.models.router import Routing
from moecore_jax.residency import prefetch as prefetch_lib
from moecore_jax.residency import slots as slots_lib
from moecore_jax.residency.base import Policy, PolicyState, matches
from moecore_jax.residency.prefetch import Prediction
from moecore_jax.residency.substitution import substitute
from moecore_jax.runtime import state as state_lib
from moecore_jax.runtime.program import Program
from moecore_jax.runtime.state import GroupState

MAX_DENSE_ROWS = 16
"""Up to this many tokens an expert runs on all of them; beyond, on blocks of its own tokens."""


class Inputs(NamedTuple):
  """A layer that has routed.

  Attributes:
    h: [T, D], expert inputs.
    routing: of the T tokens.
    valid: bool [T]; other tokens route nothing, load nothing and change no signal.
    prediction: what was foreseen for this layer; its issued copies lie in the in-flight rows.
    mix: how the output enters the streams; None: it is added to the one.
  """

  h: jax.Array
  routing: Routing
  valid: jax.Array
  prediction: Prediction
  mix: Mix | None = None


class Prepared(NamedTuple):
  """A layer whose experts are in place.

  Attributes:
    topk_ids: int32 [T, A], the expert that computes each (token, rank), N where none does.
    order: int32 [U], distinct experts.
    rows: int32 [U], their pool rows.
    start: int32 [], the first of `order` that has not run.
    end: int32 [], number of experts in `order`.
    outputs: [T, A, D], outputs of those before `start`.
    counts: int32 [len(state.COUNTERS)].
    hits: int32 [T], invocations of each token that count as hits.
  """

  topk_ids: jax.Array
  order: jax.Array
  rows: jax.Array
  start: jax.Array
  end: jax.Array
  outputs: jax.Array
  counts: jax.Array
  hits: jax.Array


class Residency(NamedTuple):
  """Loop carry of loads and placements: what they change in one layer.

  Attributes:
    pool: of the group.
    tables: of the group.
    signals: policy state of the layer.
    evictions: int32 [].
  """

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


def write_row(pool: ExpertArrays, stored: ExpertArrays, row: jax.Array) -> ExpertArrays:
  """Returns the pool with one expert written into a row."""
  return {
    name: lax.dynamic_update_index_in_dim(pool[name], stored[name], row, 0) for name in stored
  }


def signals_of(group: GroupState, index: jax.Array) -> PolicyState:
  """Returns the policy's signals of one layer of a group."""
  return jax.tree.map(lambda s: lax.dynamic_index_in_dim(s, index, 0, keepdims=False), group.policy)


def with_signals(group: GroupState, index: jax.Array, signals: PolicyState) -> PolicyState:
  """Returns the policy's signals of a group, those of one layer replaced."""
  return jax.tree.map(
    lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, index, 0), group.policy, signals
  )


def transient_row(program: Program, pool: ExpertArrays) -> int:
  """Returns the pool row of an expert that has no slot; the in-flight rows follow it."""
  return pool["down"].shape[0] - 1 - program.prefetch.max_experts


def run_expert(program: Program, pool: ExpertArrays, row: jax.Array, x: jax.Array) -> jax.Array:
  """Applies the expert in pool row `row` to x [T, D]; only this one expert is unpacked."""
  # Row-major, or XLA would copy the whole pool to give it the layout of an integer product.
  stored = with_layout_constraint(read_row(pool, row), Layout((0, 1)))
  return experts_lib.expert_mlp(
    x, stored["gate_up"], stored["down"], program.model.activation, program.engine.expert_format
  )


def read_row(pool: ExpertArrays, row: jax.Array) -> ExpertArrays:
  """Returns the stored arrays of the expert in a pool row."""
  return {
    name: lax.dynamic_index_in_dim(rows, row, 0, keepdims=False) for name, rows in pool.items()
  }


def block_rows(num_tokens: int, num_experts_per_tok: int, num_experts: int) -> int:
  """Returns the rows of an expert block: the mean tokens of an expert, rounded up to a power of
  two within 8..128.
  """
  mean = max(1, num_tokens * num_experts_per_tok // num_experts)
  return min(128, max(8, 1 << (mean - 1).bit_length()))


class RunExpert:
  """Applies one expert after the other to a layer's tokens: calls are (expert, pool, row, outputs)
  -> outputs."""

  def __init__(self, program: Program, inputs: Inputs, topk_ids: jax.Array):
    self.program, self.h, self.topk_ids = program, inputs.h, topk_ids
    (num_tokens, fan_out), num_experts = topk_ids.shape, inputs.routing.selection_scores.shape[1]
    self.is_dense = num_tokens <= MAX_DENSE_ROWS
    if not self.is_dense:
      self.rows = block_rows(num_tokens, fan_out, num_experts)
      self.dispatch = experts_lib.sort_by_expert(topk_ids, inputs.valid, num_experts, self.rows)

  def __call__(
    self, expert: jax.Array, pool: ExpertArrays, row: jax.Array, outputs: jax.Array
  ) -> jax.Array:
    def apply(x):
      return run_expert(self.program, pool, row, x)

    if self.is_dense:
      return experts_lib.run_on_all_rows(outputs, self.h, self.topk_ids, expert, apply)
    return experts_lib.run_on_blocks(outputs, self.h, self.dispatch, self.rows, expert, apply)


def prepare(
  program: Program,
  phase: int,
  group_index: int,
  bank: ExpertArrays,
  group: GroupState,
  index: jax.Array,
  inputs: Inputs,
  key: jax.Array,
) -> tuple[GroupState, Prepared]:
  """Brings the experts of one layer into the pool.

  Args:
    program: static settings.
    phase: state.DECODE (the policy observes and decides) or state.PREFILL (signals rest, eviction
      by warm rank or recency, nothing is substituted).
    group_index: index of the expert group.
    bank: the group's stored experts, pinned host memory.
    group: the group's residency.
    index: int32 scalar, the layer within the group.
    inputs: the layer's tokens and their routing.
    key: random key of this layer and step.

  Returns:
    The group's residency after the step, and what is left to run.

  Source: SPEC sections 5 to 8.
  """
  policy, is_decode = program.make_policy(), phase == state_lib.DECODE
  routing, valid = inputs.routing, inputs.valid
  tables = group.tables
  num_experts = tables.expert_to_slot.shape[1]
  max_slots = program.max_slots[group_index]
  topk_ids = jnp.where(valid[:, None], routing.topk_ids, num_experts)
  member = jnp.zeros(num_experts, bool).at[topk_ids].set(True, mode="drop")

  signals = signals_of(group, index)
  if is_decode:
    signals = policy.observe(signals, topk_ids, routing.selection_scores, valid)
  residency = Residency(group.pool, tables, signals, jnp.int32(0))
  prediction = inputs.prediction
  num_copies = prediction.experts.shape[0]
  arrived = jnp.full(num_copies, -1, jnp.int32)
  if num_copies and (program.prefetch.placement == "in_flight" or not is_decode):
    residency, arrived = _place_arrivals(
      program, phase, policy, residency, index, max_slots, prediction, member, key
    )
  in_flight = jnp.any(matches(arrived, num_experts), axis=0)
  available = slots_lib.resident(residency.tables, index) | in_flight
  hits = jnp.sum(
    available[jnp.minimum(topk_ids, num_experts - 1)] & valid[:, None], axis=1, dtype=jnp.int32
  )
  threshold = program.substitution_threshold if is_decode else 0.0
  run = substitute(topk_ids, routing.selection_scores, valid, available, threshold)
  num_slots = tables.num_slots[index]
  plan = slots_lib.plan_step(run.topk_ids, valid, available, num_slots, policy.evicts)
  apply = RunExpert(program, inputs, run.topk_ids)
  spare = transient_row(program, group.pool)

  def row_of(tables: slots_lib.SlotTables, expert: jax.Array) -> jax.Array:
    slot = tables.expert_to_slot[index, expert]
    place = jnp.arange(1, 1 + num_copies, dtype=jnp.int32)
    in_flight = jnp.sum(jnp.where(arrived == expert, place, 0), dtype=jnp.int32)
    return jnp.where(slot < 0, spare + in_flight, slot)

  def load(i: jax.Array, carry: Residency) -> Residency:
    expert = plan.order[i]
    if is_decode:
      priority = policy.priority(carry.signals, jax.random.fold_in(key, i))
    else:
      priority = slots_lib.prefill_priority(carry.tables, index)
    held = slots_lib.protected(plan) if policy.evicts else jnp.ones(num_experts, bool)
    slot, evicted = slots_lib.choose_slot(carry.tables, index, priority, held, max_slots)
    stored = fetch(bank, index * num_experts + expert)
    pool = write_row(carry.pool, stored, jnp.where(slot < 0, spare, slot))
    return enter(policy, carry._replace(pool=pool), index, expert, slot, evicted)

  def run_early(i, carry):
    residency, outputs = carry
    expert = plan.order[i]
    absent = (residency.tables.expert_to_slot[index, expert] < 0) & ~in_flight[expert]
    # i + j, for XLA moves what does not depend on j, the read of the bank, out of the inner loop.
    residency = lax.fori_loop(0, absent.astype(jnp.int32), lambda j, c: load(i + j, c), residency)
    return residency, apply(expert, residency.pool, row_of(residency.tables, expert), outputs)

  outputs = jnp.zeros((*topk_ids.shape, inputs.h.shape[1]), inputs.h.dtype)
  with jax.named_scope("early_experts"):
    residency, outputs = lax.fori_loop(0, plan.num_early, run_early, (residency, outputs))
  with jax.named_scope("residual_loads"):
    first = jnp.maximum(plan.num_early, plan.num_resident)
    end = plan.num_experts if policy.evicts else first  # static: what is absent ran early
    residency = lax.fori_loop(first, end, load, residency)
  rows = jax.vmap(lambda expert: row_of(residency.tables, expert))(plan.order)
  useful_rate, ahead = group.useful_rate, {}
  if num_copies:
    useful = prefetch_lib.num_useful(prediction, member)
    ahead = {
      "prefetches": jnp.where(prediction.is_issued, num_copies, 0),
      "useful_prefetches": jnp.where(prediction.is_issued, useful, 0),
    }
    if is_decode:
      ahead["predicted"] = prefetch_lib.num_predicted(prediction, topk_ids, num_experts)
      rate = prefetch_lib.update_useful_rate(
        useful_rate[index], prediction, useful, program.prefetch.useful_decay
      )
      useful_rate = useful_rate.at[index].set(rate)
  counts = {
    "invocations": jnp.sum(valid, dtype=jnp.int32) * topk_ids.shape[1],
    "hits": jnp.sum(hits, dtype=jnp.int32),
    "misses": plan.num_experts - plan.num_resident,
    "evictions": residency.evictions,
    "substitutions": jnp.sum(run.is_substituted, dtype=jnp.int32),
  } | ahead
  signals = with_signals(group, index, residency.signals)
  tables = slots_lib.touch(residency.tables, index, plan.order)
  return GroupState(residency.pool, tables, signals, useful_rate), Prepared(
    run.topk_ids,
    plan.order,
    rows,
    plan.num_early,
    plan.num_experts,
    outputs,
    state_lib.stack_counts(counts),
    hits,
  )


def enter(
  policy: Policy,
  residency: Residency,
  index: jax.Array,
  expert: jax.Array,
  slot: jax.Array,
  evicted: jax.Array,
) -> Residency:
  """Enters an expert in the tables and tells the policy; a negative slot changes nothing."""
  signals = policy.placed(residency.signals, expert)
  return Residency(
    residency.pool,
    slots_lib.place(residency.tables, index, expert, slot),
    jax.tree.map(lambda new, old: jnp.where(slot < 0, old, new), signals, residency.signals),
    residency.evictions + (evicted >= 0).astype(jnp.int32),
  )


def _place_arrivals(
  program: Program,
  phase: int,
  policy: Policy,
  residency: Residency,
  index: jax.Array,
  max_slots: int,
  prediction: Prediction,
  member: jax.Array,
  key: jax.Array,
) -> tuple[Residency, jax.Array]:
  """Moves arrivals from their in-flight rows into slots.

  A right one (`member`) takes the place of the coldest resident that this step does not need; where
  there is none it runs from its in-flight row. A wrong one needs a free slot or a colder resident,
  else it is dropped.

  Returns:
    The residency, and int32 [n_l], experts that run from their in-flight rows, -1 for none.
  """
  num_experts = member.shape[0]
  first_row = transient_row(program, residency.pool) + 1

  def place(j, carry):
    residency, arrived = carry
    expert = prediction.experts[j]
    if phase == state_lib.DECODE:
      priority = policy.priority(residency.signals, jax.random.fold_in(key, num_experts + j))
    else:
      priority = slots_lib.prefill_priority(residency.tables, index)
    held = member if policy.evicts else jnp.ones(num_experts, bool)
    slot, evicted = slots_lib.choose_slot(residency.tables, index, priority, held, max_slots)
    is_warmer = (evicted < 0) | (priority[expert] > priority[jnp.maximum(evicted, 0)])
    slot = jnp.where(member[expert] | is_warmer, slot, -1)
    row = first_row + j
    pool = write_row(residency.pool, read_row(residency.pool, row), jnp.where(slot < 0, row, slot))
    stays = member[expert] & (slot < 0)
    return (
      enter(
        policy, residency._replace(pool=pool), index, expert, slot, jnp.where(slot < 0, -1, evicted)
      ),
      arrived.at[j].set(jnp.where(stays, expert, -1)),
    )

  num_copies = prediction.experts.shape[0]
  arrived = jnp.full(num_copies, -1, jnp.int32)
  count = jnp.where(prediction.is_issued, num_copies, 0)
  with jax.named_scope("arrivals"):
    return lax.fori_loop(0, count, place, (residency, arrived))


def claim_slots(
  program: Program,
  group_index: int,
  group: GroupState,
  index: jax.Array,
  prediction: Prediction,
  key: jax.Array,
) -> tuple[GroupState, list[jax.Array], jax.Array]:
  """Gives each issued copy a slot before the layer has routed: placement "slot".

  Returns:
    The group, the pool row of each copy, and int32 [], experts that were displaced; nothing changes
    where none is issued.
  """
  policy, num_experts = program.make_policy(), group.tables.expert_to_slot.shape[1]
  signals = signals_of(group, index)
  residency = Residency(group.pool, group.tables, signals, jnp.int32(0))
  spare, rows = transient_row(program, group.pool), []
  held = jnp.zeros(num_experts, bool) if policy.evicts else jnp.ones(num_experts, bool)
  for j in range(prediction.experts.shape[0]):
    expert = prediction.experts[j]
    priority = policy.priority(residency.signals, jax.random.fold_in(key, j))
    slot, evicted = slots_lib.choose_slot(
      residency.tables, index, priority, held, program.max_slots[group_index]
    )
    slot, evicted = (jnp.where(prediction.is_issued, x, -1) for x in (slot, evicted))
    residency = enter(policy, residency, index, expert, slot, evicted)
    held |= matches(expert, num_experts)
    rows.append(jnp.where(slot < 0, spare, slot))
  signals = with_signals(group, index, residency.signals)
  group = dataclasses.replace(group, tables=residency.tables, policy=signals)
  return group, rows, residency.evictions


def execute(
  program: Program, pool: ExpertArrays, inputs: Inputs, prepared: Prepared
) -> tuple[jax.Array, jax.Array]:
  """Runs the experts that have not run yet and combines all outputs.

  Returns:
    [T, D], zero for tokens that are not valid; and int32 [], always 0, but known only when the
    experts have run: what must come after them adds it to something that it needs.
  """
  apply = RunExpert(program, inputs, prepared.topk_ids)

  def run(i, carry):
    outputs, left = carry
    return apply(prepared.order[i], pool, prepared.rows[i], outputs), left - 1

  with jax.named_scope("experts"):
    left = prepared.end - prepared.start
    outputs, left = lax.fori_loop(prepared.start, prepared.end, run, (prepared.outputs, left))
  return experts_lib.combine(outputs, inputs.routing.topk_weights), left
