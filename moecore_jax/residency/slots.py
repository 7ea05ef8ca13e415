"""Slot tables: which expert lies in which row of the slot pool, and where the next one goes.

Layer l of an expert group owns the pool rows `first_slot[l] .. first_slot[l] + num_slots[l]`.
Allocations are traced arrays, so that one compiled program serves every allocation of the same
total. All arrays are int32 on the device.

A decode step plans a layer once (`plan_step`), then walks `StepPlan.order`; before an absent member
runs, `choose_slot` names its row, the copy goes there, and `place` enters it in both maps.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from moecore_jax.residency import base

_LOWEST = float(jnp.finfo(jnp.float32).min)
_MAX_EXPERTS = 1024  # of a layer: `choose_slot` packs (expert, slot, expert) in 31 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotTables:
  """Residency of one expert group of L layers with N experts and C = sum of K_l pool rows.

  Attributes:
    expert_to_slot: int32 [L, N], pool row of each expert, -1 where it is absent.
    slot_to_expert: int32 [C + K_max], expert in each pool row, -1 where empty. The last K_max
      entries are padding, always -1: a slice of K_max rows from any layer's first row stays inside
      the array.
    first_slot: int32 [L], first pool row of each layer.
    num_slots: int32 [L], K_l, pool rows of each layer.
    warm_rank: int32 [L, N], place in the warm-start order, 0 is the hottest; all 0 where a layer
      has no profile.
    last_used: int32 [L, N], 0 is the newest use, -n lies n uses back; kept by `touch` for whoever
      runs experts without policy signals.
  """

  expert_to_slot: Int32[Array, "L N"]
  slot_to_expert: Int32[Array, "C"]
  first_slot: Int32[Array, "L"]
  num_slots: Int32[Array, "L"]
  warm_rank: Int32[Array, "L N"]
  last_used: Int32[Array, "L N"]


class StepPlan(NamedTuple):
  """The distinct experts that one layer executes in one step, in order of execution.

  Attributes:
    order: int32 [U], U = min(T * A, N), experts; N beyond the first `num_experts`.
    position: int32 [N], index of each expert in `order`, -1 where it is not a member.
    num_experts: int32 [], members of the union.
    num_resident: int32 [], members that were resident when the plan was made: the hits.
    num_early: int32 [], leading members that are executed one at a time, {load if absent; execute},
      before the loads of the rest begin.
  """

  order: Int32[Array, "U"]
  position: Int32[Array, "N"]
  num_experts: Int32[Array, ""]
  num_resident: Int32[Array, ""]
  num_early: Int32[Array, ""]


def init_tables(num_experts: int, slots: Sequence[int], max_slots: int | None = None) -> SlotTables:
  """Returns the tables of an empty pool.

  Args:
    num_experts: experts of each layer (N).
    slots: K_l of each layer of the group, 0..N; no expert of a layer without slots is loaded by
      itself.
    max_slots: K_max, width of a layer's slice; the largest of `slots` by default. Programs that
      serve several allocations need the largest of them all.

  Raises:
    ValueError: N is outside 1..1024, `slots` is empty, a K_l is outside 0..N, or `max_slots` is
      smaller than one of them or larger than N.
  """
  if not 1 <= num_experts <= _MAX_EXPERTS:
    raise ValueError(f"num_experts is {num_experts}, expected 1..{_MAX_EXPERTS}")
  if not slots:
    raise ValueError("slots is empty, expected one number for each layer of the group")
  for layer, count in enumerate(slots):
    if not 0 <= count <= num_experts:
      raise ValueError(f"slots[{layer}] is {count}, expected 0..{num_experts}, the layer's experts")
  max_slots = max(slots) if max_slots is None else max_slots
  if not max(slots) <= max_slots <= num_experts:
    raise ValueError(f"max_slots is {max_slots}, expected {max(slots)}..{num_experts}")
  first_slot = np.cumsum([0, *slots[:-1]])
  per_expert = (len(slots), num_experts)
  return SlotTables(
    expert_to_slot=jnp.full(per_expert, -1, jnp.int32),
    slot_to_expert=jnp.full(sum(slots) + max_slots, -1, jnp.int32),
    first_slot=jnp.asarray(first_slot, jnp.int32),
    num_slots=jnp.asarray(slots, jnp.int32),
    warm_rank=jnp.zeros(per_expert, jnp.int32),
    last_used=jnp.zeros(per_expert, jnp.int32),
  )


def resident(tables: SlotTables, layer: Int32[Array, ""]) -> Bool[Array, "N"]:
  """Returns which experts of `layer` lie in a slot."""
  return tables.expert_to_slot[layer] >= 0


def plan_step(
  topk_ids: Int32[Array, "T A"],
  valid: Bool[Array, "T"],
  resident: Bool[Array, "N"],
  num_slots: Int32[Array, ""],
  evicts: bool,
) -> StepPlan:
  """Plans the union of a step's selections.

  Args:
    topk_ids: selected experts of the step's tokens, in order (position, row); entries outside
      0..N-1 select nothing.
    valid: False for padding, which selects nothing.
    resident: the layer's experts that lie in a slot.
    num_slots: K_l.
    evicts: `Policy.evicts`. True: residents first, then misses, each in order of first occurrence;
      a union larger than K_l runs its first members early, so that the rest fits. False: misses
      first, all early, as they run from a transient row.
  """
  num_experts = resident.shape[0]
  ids = topk_ids.reshape(-1)  # [M]
  count = ids.shape[0]
  expert = jnp.arange(num_experts, dtype=jnp.int32)
  index = jnp.arange(count, dtype=jnp.int32)
  chosen = jnp.repeat(valid, topk_ids.shape[1], total_repeat_length=count)  # [M]
  hits = chosen[:, None] & base.matches(ids, num_experts)  # [M, N]
  first = jnp.min(jnp.where(hits, index[:, None], count), axis=0)  # [N]
  member = first < count
  # Execution order as a number: the occurrence, behind all others for the class that goes last.
  last_class = ~resident if evicts else resident
  key = first + jnp.where(last_class, count, 0)  # [N]
  is_first = chosen & (first[ids] == index)  # [M]
  keys = jnp.where(is_first, key[ids], 2 * count)  # [M]
  ahead = jnp.sum(keys[:, None] < key[None], axis=0, dtype=jnp.int32)  # [N]
  position = jnp.where(member, ahead, -1)
  turn = jnp.arange(min(count, num_experts), dtype=jnp.int32)
  order = jnp.min(
    jnp.where(position[None] == turn[:, None], expert[None], num_experts), axis=1
  )  # [U]
  total = jnp.sum(member, dtype=jnp.int32)
  hit = jnp.sum(member & resident, dtype=jnp.int32)
  early = jnp.maximum(total - num_slots, 0) if evicts else total - hit
  return StepPlan(order, position, total, hit, early)


def protected(plan: StepPlan) -> Bool[Array, "N"]:
  """Returns the experts that a load of this step must not evict: all but the early members.

  An early member needs no protection: it leaves only for one behind it in the order, and has run by
  then if it was there. The others, at most K_l, are held until all of them have run.
  """
  return plan.position >= plan.num_early


def choose_slot(
  tables: SlotTables,
  layer: Int32[Array, ""],
  priority: Float32[Array, "N"],
  protected: Bool[Array, "N"],
  max_slots: int,
) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
  """Chooses where the next expert of a layer goes: the lowest empty slot, else that of a victim.

  The victim is the resident that is not protected and has the lowest priority; ties go to the
  colder one (larger `warm_rank`), then to the lower slot. A priority that is not a number counts as
  the lowest.

  Args:
    tables: slot tables of the layer's group.
    layer: index within the group, may be traced.
    priority: `Policy.priority` of the layer.
    protected: experts that must stay.
    max_slots: K_max of `init_tables`.

  Returns:
    (pool row, expert that leaves it or -1). (-1, -1) if every slot holds a protected expert.
  """
  num_experts = priority.shape[0]
  first = tables.first_slot[layer]
  row = lax.dynamic_slice(tables.slot_to_expert, (first,), (max_slots,))
  index = jnp.arange(max_slots, dtype=jnp.int32)
  expert = jnp.maximum(row, 0)
  empty = row < 0
  usable = (index < tables.num_slots[layer]) & (empty | ~protected[expert])  # [K_max]
  value = priority[expert]
  value = jnp.where(~empty & (value > _LOWEST), value, _LOWEST)
  lowest = jnp.min(jnp.where(usable, value, jnp.inf))
  # (coldness, lower slot, expert) as one number: a single reduction gives all, and the table is not
  # read again after `place` writes it, which would make XLA copy it.
  coldness = jnp.where(empty, num_experts, tables.warm_rank[layer, expert])
  code = (coldness * max_slots + (max_slots - 1 - index)) * num_experts + expert
  code = jnp.max(jnp.where(usable & (value == lowest), code, -1))
  slot = first + max_slots - 1 - code // num_experts % max_slots
  is_eviction = (code >= 0) & (code < num_experts * max_slots * num_experts)
  return jnp.where(code >= 0, slot, -1), jnp.where(is_eviction, code % num_experts, -1)


def place(
  tables: SlotTables, layer: Int32[Array, ""], expert: Int32[Array, ""], slot: Int32[Array, ""]
) -> SlotTables:
  """Enters an absent expert in pool row `slot` of `layer`, in both maps.

  The row's old occupant becomes absent. A negative `slot` changes nothing.
  """
  is_placed = slot >= 0
  row = tables.expert_to_slot[layer]
  is_expert = base.matches(expert, row.shape[0])
  row = jnp.where(is_expert & is_placed, slot, jnp.where(row == slot, -1, row))
  padding = tables.slot_to_expert.shape[0] - 1
  return dataclasses.replace(
    tables,
    expert_to_slot=lax.dynamic_update_index_in_dim(tables.expert_to_slot, row, layer, 0),
    slot_to_expert=lax.dynamic_update_index_in_dim(
      tables.slot_to_expert,
      jnp.where(is_placed, expert, -1),
      jnp.where(is_placed, slot, padding),
      0,
    ),
  )


def touch(tables: SlotTables, layer: Int32[Array, ""], experts: Int32[Array, "U"]) -> SlotTables:
  """Stamps experts that were just used, in order of use; entries outside 0..N-1 are no use."""
  count = experts.shape[0]
  num_experts = tables.last_used.shape[1]
  index = jnp.arange(count, dtype=jnp.int32)
  is_use = (experts >= 0) & (experts < num_experts)
  end = jnp.max(jnp.where(is_use, index, -1)) + 1
  last = jnp.max(jnp.where(base.matches(experts, num_experts), index[:, None] + 1, -1), axis=0)
  old = jnp.maximum(tables.last_used[layer] - end, -int(base.MAX_COUNT))
  row = jnp.where(last >= 0, last - end, old)
  return dataclasses.replace(
    tables, last_used=lax.dynamic_update_index_in_dim(tables.last_used, row, layer, 0)
  )


def prefill_priority(tables: SlotTables, layer: Int32[Array, ""]) -> Float32[Array, "N"]:
  """Returns what a prefill, which has no signals, evicts by: warm rank, else least recent use."""
  rank = tables.warm_rank[layer]
  return jnp.where(jnp.any(rank > 0), -rank, tables.last_used[layer]).astype(jnp.float32)
