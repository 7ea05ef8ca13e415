"""FIFO: only entering a slot counts."""

import jax.numpy as jnp
import numpy as np

from moecore_jax import residency


def test_uses_do_not_matter():
  policy = residency.make_policy("fifo")
  state = policy.init(4)
  for expert in (2, 0, 3):
    state = policy.placed(state, jnp.int32(expert))
  before = policy.priority(state, None)
  np.testing.assert_array_equal(np.argsort(before), [1, 2, 0, 3])
  ids = jnp.asarray([[2, 1]], jnp.int32)
  state = policy.observe(state, ids, jnp.ones((1, 4)), jnp.ones(1, bool))
  np.testing.assert_array_equal(policy.priority(state, None), before)
