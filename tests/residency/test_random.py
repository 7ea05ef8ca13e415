"""Random: every unprotected resident leaves equally often, and the key alone decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax import residency


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_victims_are_uniform(make_key):
  policy = residency.make_policy("random")
  tables = residency.init_tables(8, (8, 5))
  for slot, expert in enumerate((6, 1, 4, 0, 7)):
    tables = residency.place(tables, 1, jnp.int32(expert), jnp.int32(8 + slot))
  held = jnp.zeros(8, bool).at[4].set(True)

  @jax.jit
  @jax.vmap
  def victims(key):
    return residency.choose_slot(tables, 1, policy.priority(policy.init(8), key), held, 8)[1]

  keys = jax.random.split(make_key(0), 2000)
  chosen, counts = np.unique(victims(keys), return_counts=True)
  assert chosen.tolist() == [0, 1, 6, 7]
  assert counts.min() > 400 and counts.max() < 600
  np.testing.assert_array_equal(victims(keys), victims(keys))
