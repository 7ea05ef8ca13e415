"""Slot tables: plans, victims and maps against plain Python on made-up tables and streams."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax import residency
from tests.residency import driver

N, A, T = 6, 2, 3
SLOTS = (2, 1, 5, 3)  # K < k, and a last layer smaller than the largest
MAX_SLOTS = 5

ids_of_step = st.lists(st.permutations(range(N)).map(lambda p: p[:A]), min_size=T, max_size=T)
valid_of_step = st.lists(st.booleans(), min_size=T, max_size=T)
steps = st.lists(
  st.tuples(st.integers(0, len(SLOTS) - 1), ids_of_step, valid_of_step), min_size=1, max_size=12
)

jitted_plan = jax.jit(residency.plan_step, static_argnums=4)
jitted_choose = jax.jit(residency.choose_slot, static_argnums=4)
jitted_place = jax.jit(residency.place)


@functools.cache
def jitted_step(name):
  return jax.jit(functools.partial(driver.run_step, residency.make_policy(name), MAX_SLOTS))


def check_maps(tables):
  """Both maps say the same, layer by layer, within the layer's own rows; padding stays empty."""
  to_slot, to_expert = np.asarray(tables.expert_to_slot), np.asarray(tables.slot_to_expert)
  assert (to_expert[sum(SLOTS) :] == -1).all()
  for layer, num_slots in enumerate(SLOTS):
    first = sum(SLOTS[:layer])
    from_slots = {
      int(e): s for s, e in enumerate(to_expert[first : first + num_slots], first) if e >= 0
    }
    from_experts = {e: int(s) for e, s in enumerate(to_slot[layer]) if s >= 0}
    assert from_slots == from_experts


@pytest.mark.parametrize("name", ["rhac", "lru", "random", "static"])
@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_any_stream_keeps_the_tables_sound(name, steps):
  """Maps agree, no layer touches another, and no member leaves before it has executed."""
  policy = residency.make_policy(name)
  tables = residency.init_tables(N, SLOTS, MAX_SLOTS)
  states = [policy.init(N) for _ in SLOTS]
  for index, (layer, ids, valid) in enumerate(steps):
    before = tables
    tables, states[layer], log = jitted_step(name)(
      before,
      states[layer],
      layer,
      np.array(ids, np.int32),
      np.zeros((T, N), np.float32),
      np.array(valid),
      jax.random.key(index),
    )
    check_maps(tables)
    others = np.arange(len(SLOTS)) != layer
    np.testing.assert_array_equal(tables.expert_to_slot[others], before.expert_to_slot[others])
    union = {e for row, is_real in zip(ids, valid, strict=True) if is_real for e in row}
    plan, slots, evicted = jax.device_get(log)
    order = plan.order[: plan.num_experts].tolist()
    assert set(order) == union and len(order) == len(union)
    now = set(np.flatnonzero(np.asarray(before.expert_to_slot[layer]) >= 0).tolist())
    if not policy.evicts:
      assert now <= set(np.flatnonzero(np.asarray(tables.expert_to_slot[layer]) >= 0).tolist())
      continue
    waiting = list(order)
    for i, expert in enumerate(order):
      assert (slots[i] == -2) == (expert in now)
      if slots[i] >= 0:
        assert evicted[i] not in waiting
        now = now - {int(evicted[i])} | {expert}
      if i < plan.num_early:
        assert expert in now
        waiting.remove(expert)
    assert set(waiting) <= now  # whoever runs after the loads is there


@settings(max_examples=200, deadline=None)
@given(ids=ids_of_step, valid=valid_of_step, data=st.data(), evicts=st.booleans())
def test_plan_equals_plain_python(ids, valid, data, evicts):
  resident = data.draw(st.lists(st.booleans(), min_size=N, max_size=N))
  num_slots = data.draw(st.integers(1, N))
  plan = jax.device_get(
    jitted_plan(
      np.array(ids, np.int32), np.array(valid), np.array(resident), np.int32(num_slots), evicts
    )
  )
  union = list(
    dict.fromkeys(e for row, is_real in zip(ids, valid, strict=True) if is_real for e in row)
  )
  hits, misses = [e for e in union if resident[e]], [e for e in union if not resident[e]]
  order = hits + misses if evicts else misses + hits
  assert plan.order.tolist() == order + [N] * (min(T * A, N) - len(order))
  assert plan.position.tolist() == [order.index(e) if e in order else -1 for e in range(N)]
  assert plan.num_experts == len(union) and plan.num_resident == len(hits)
  assert plan.num_early == (max(0, len(union) - num_slots) if evicts else len(misses))


@pytest.mark.parametrize("evicts", [True, False])
def test_plan_of_padding_only_is_empty(evicts):
  plan = jitted_plan(
    jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, bool), jnp.ones(5, bool), jnp.int32(1), evicts
  )
  np.testing.assert_array_equal(plan.order, [5] * 5)
  np.testing.assert_array_equal(plan.position, [-1] * 5)
  assert [int(x) for x in plan[2:]] == [0, 0, 0]


def test_plan_ignores_ids_that_name_no_expert():
  ids = jnp.asarray([[-1, 2], [5, 4], [-7, 2]], jnp.int32)
  plan = jitted_plan(ids, jnp.ones(3, bool), jnp.zeros(5, bool), jnp.int32(2), True)
  np.testing.assert_array_equal(plan.order, [2, 4, 5, 5, 5])
  assert int(plan.num_experts) == 2


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_victim_equals_plain_python(data):
  """Lowest empty slot, else lowest (priority, colder, slot) of those not held; ties are common."""
  layer = data.draw(st.integers(0, len(SLOTS) - 1))
  occupants = data.draw(st.permutations(range(N)))[: SLOTS[layer]]
  filled = data.draw(st.lists(st.booleans(), min_size=SLOTS[layer], max_size=SLOTS[layer]))
  odd = st.sampled_from([0.0, 1.0, -1.0, -np.inf, np.inf])
  priority = data.draw(st.lists(odd, min_size=N, max_size=N))
  rank = data.draw(st.one_of(st.permutations(range(N)), st.just([0] * N)))
  held = data.draw(st.lists(st.booleans(), min_size=N, max_size=N))
  # The other layers' rows are full of the experts that this layer would like to evict most.
  to_expert = np.tile(np.argsort(priority), 3)[: sum(SLOTS)].astype(np.int32)
  first = sum(SLOTS[:layer])
  row = [e if is_filled else -1 for e, is_filled in zip(occupants, filled, strict=True)]
  to_expert[first : first + SLOTS[layer]] = row
  ranks = np.tile(np.arange(N, dtype=np.int32) - rank, (len(SLOTS), 1))
  ranks[layer] = rank
  empty = residency.init_tables(N, SLOTS, MAX_SLOTS)
  tables = dataclasses.replace(
    empty,
    slot_to_expert=np.concatenate([to_expert, np.full(MAX_SLOTS, -1, np.int32)]),
    warm_rank=ranks,
  )
  slot, evicted = jitted_choose(
    tables, layer, np.array(priority, np.float32), np.array(held), MAX_SLOTS
  )
  if -1 in row:
    expected = first + row.index(-1), -1
  else:
    leaving = [(priority[e], -rank[e], s, e) for s, e in enumerate(row) if not held[e]]
    expected = (first + min(leaving)[2], min(leaving)[3]) if leaving else (-1, -1)
  assert (int(slot), int(evicted)) == expected


def filled_tables(slots, rows, max_slots=None):
  """Returns tables whose layers hold the experts of `rows` from their first slot on."""
  tables = residency.init_tables(N, slots, max_slots)
  for layer, row in enumerate(rows):
    for i, expert in enumerate(row):
      slot = jnp.int32(sum(slots[:layer]) + i)
      tables = jitted_place(tables, layer, jnp.int32(expert), slot)
  return tables


def test_priority_that_is_no_number_is_the_lowest():
  """A poisoned signal costs a hit, never a step: some slot is always found."""
  tables = filled_tables((3,), [(0, 1, 2)])
  priority = jnp.asarray([1, jnp.nan, -5, 0, 0, 0], jnp.float32)
  held = jnp.zeros(N, bool)
  assert [int(x) for x in jitted_choose(tables, 0, priority, held, 3)] == [1, 1]
  everywhere = jnp.full(N, jnp.nan)
  assert [int(x) for x in jitted_choose(tables, 0, everywhere, held, 3)] == [0, 0]


def test_absent_and_padding_signals_do_not_matter():
  """Poison every expert that is not resident: the victim stays the same."""
  tables = filled_tables((2, 3), [(5, 3), (0, 1, 2)])
  held = jnp.zeros(N, bool)
  for poison in (jnp.nan, -jnp.inf, jnp.inf):
    priority = jnp.asarray([2, 1, 3, poison, poison, poison], jnp.float32)
    assert [int(x) for x in jitted_choose(tables, 1, priority, held, 3)] == [3, 1]


@pytest.mark.parametrize("name", ["rhac", "lru", "lfu", "fifo", "random"])
def test_a_miss_never_evicts_what_the_step_still_needs(name):
  """Slots {0, 1, 2}, each used 5 times; then one step needs {3, 4}: both present, 2 slots apart."""
  tables, state = residency.init_tables(N, SLOTS, MAX_SLOTS), residency.make_policy(name).init(N)
  layer, scores, key = SLOTS.index(3), np.zeros((T, N), np.float32), jax.random.key(0)
  only_first = np.arange(T) == 0

  def run(pair):
    ids = np.array([pair, (5, 5), (5, 5)], np.int32)
    return jitted_step(name)(tables, state, layer, ids, scores, only_first, key)

  for pair in 5 * ((0, 1), (1, 2), (2, 0)):
    tables, state, _ = run(pair)
  assert np.flatnonzero(residency.resident(tables, layer)).tolist() == [0, 1, 2]
  tables, state, log = run((3, 4))
  where = tables.expert_to_slot[layer, jnp.asarray([3, 4])].tolist()
  assert min(where) >= 0 and where[0] != where[1]
  assert int(log.plan.num_resident) == 0


@pytest.mark.parametrize("name", ["rhac", "lru", "lfu", "fifo", "random"])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_every_expert_in_one_step_runs_in_waves(name, num_slots):
  """Six misses, fewer slots: each is loaded once, and the last `num_slots` stay."""
  layer = SLOTS.index(num_slots)
  ids = np.array([(5, 4), (3, 2), (1, 0)], np.int32)
  scores, valid = np.zeros((T, N), np.float32), np.ones(T, bool)
  tables = residency.init_tables(N, SLOTS, MAX_SLOTS)
  state = residency.make_policy(name).init(N)
  tables, _, log = jitted_step(name)(tables, state, layer, ids, scores, valid, jax.random.key(0))
  assert log.plan.order.tolist() == [5, 4, 3, 2, 1, 0]
  assert (log.slots >= 0).all()
  assert int(log.plan.num_early) == N - num_slots
  assert np.flatnonzero(residency.resident(tables, layer)).tolist() == list(range(num_slots))


def test_last_layer_with_few_slots_reads_its_own():
  """The slice of K_max rows starts at the last layer's first row, not clamped into the one before.

  Layer 0 holds the expert that would leave first; layer 1 has one slot at the end of the table.
  """
  tables = filled_tables((4, 1), [(3, 2, 1, 0), (5,)])
  priority = jnp.asarray([0, 1, 2, 3, 4, 5], jnp.float32)
  held = jnp.zeros(N, bool)
  for layer, expected in ((0, [3, 0]), (1, [4, 5])):
    chosen = jitted_choose(tables, jnp.int32(layer), priority, held, 4)
    assert [int(x) for x in chosen] == expected
  only_resident_held = held.at[5].set(True)
  chosen = jitted_choose(tables, jnp.int32(1), priority, only_resident_held, 4)
  assert [int(x) for x in chosen] == [-1, -1]


def test_place_nowhere_changes_nothing():
  tables = filled_tables((2, 3), [(5, 3), (0, 1, 2)])
  for expert in (3, 4):
    after = jitted_place(tables, 0, jnp.int32(expert), jnp.int32(-1))
    jax.tree.map(np.testing.assert_array_equal, after, tables)


def test_touch_orders_uses_and_forgets_none():
  tables = residency.init_tables(N, (2, 2))
  for layer, experts in ((1, (4, 2, N, N)), (1, (N, 0, -1, N)), (0, (3, 1)), (1, (4, N))):
    tables = jax.jit(residency.touch)(tables, layer, jnp.asarray(experts, jnp.int32))
  np.testing.assert_array_equal(tables.last_used[1], [-1, -5, -3, -5, 0, -5])
  np.testing.assert_array_equal(tables.last_used[0], [-2, 0, -2, -1, -2, -2])
  same = residency.touch(tables, 1, jnp.full(3, N, jnp.int32))
  np.testing.assert_array_equal(same.last_used, tables.last_used)


def test_prefill_priority_follows_the_profile_else_recency():
  tables = residency.init_tables(3, (1, 1))
  tables = dataclasses.replace(tables, warm_rank=jnp.asarray([[2, 0, 1], [0, 0, 0]], jnp.int32))
  tables = residency.touch(tables, 0, jnp.asarray([0, 2], jnp.int32))
  tables = residency.touch(tables, 1, jnp.asarray([0, 2], jnp.int32))
  np.testing.assert_array_equal(residency.prefill_priority(tables, 0), [-2, 0, -1])
  np.testing.assert_array_equal(residency.prefill_priority(tables, jnp.int32(1)), [-1, -2, 0])


@pytest.mark.parametrize(
  ("num_experts", "slots", "max_slots", "message"),
  [
    (4, (), None, "slots is empty"),
    (4, (2, -1), None, r"slots\[1\] is -1, expected 0..4"),
    (4, (5,), None, r"slots\[0\] is 5, expected 0..4"),
    (4, (2, 3), 2, "max_slots is 2, expected 3..4"),
    (4, (2, 3), 5, "max_slots is 5, expected 3..4"),
    (2000, (2,), None, "num_experts is 2000, expected 1..1024"),
  ],
)
def test_impossible_tables_are_refused(num_experts, slots, max_slots, message):
  with pytest.raises(ValueError, match=message):
    residency.init_tables(num_experts, slots, max_slots)


def test_largest_layer_that_a_code_can_hold():
  """1024 experts in 1024 slots: the packed victim number stays below 2**31."""
  tables = residency.init_tables(1024, (1024,))
  held = jnp.zeros(1024, bool)
  priority = jnp.zeros(1024)
  assert [int(x) for x in jitted_choose(tables, 0, priority, held, 1024)] == [0, -1]
  experts = jnp.arange(1024, dtype=jnp.int32)[::-1]
  tables = dataclasses.replace(
    tables,
    slot_to_expert=tables.slot_to_expert.at[:1024].set(experts),
    warm_rank=experts[None],
  )
  assert [int(x) for x in jitted_choose(tables, 0, priority, held, 1024)] == [1023, 0]
