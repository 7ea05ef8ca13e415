"""Static: what lies in the slots stays; misses run first, from a transient row."""

import jax.numpy as jnp
import numpy as np

from moecore_jax import residency


def test_misses_are_planned_first_and_nobody_leaves():
  policy = residency.make_policy("static")
  tables = residency.init_tables(6, (2,))
  for slot, expert in enumerate((5, 1)):
    tables = residency.place(tables, 0, jnp.int32(expert), jnp.int32(slot))
  ids = jnp.asarray([[1, 3], [0, 5]], jnp.int32)
  plan = residency.plan_step(
    ids, jnp.ones(2, bool), residency.resident(tables, 0), tables.num_slots[0], policy.evicts
  )
  np.testing.assert_array_equal(plan.order, [3, 0, 1, 5])
  assert (int(plan.num_early), int(plan.num_resident)) == (2, 2)
  priority = policy.priority(policy.init(6), None)
  slot, evicted = residency.choose_slot(tables, 0, priority, jnp.ones(6, bool), 2)
  assert (int(slot), int(evicted)) == (-1, -1)
