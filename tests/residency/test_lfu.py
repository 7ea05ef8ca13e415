"""LFU: counts begin anew with each stay in a slot."""

import jax.numpy as jnp
import numpy as np

from moecore_jax import residency


def test_counts_tokens_and_restarts_when_placed():
  policy = residency.make_policy("lfu")
  ids = jnp.asarray([[0, 1], [1, 2], [1, 0]], jnp.int32)
  state = policy.observe(policy.init(4), ids, jnp.zeros((3, 4)), jnp.asarray([True, True, False]))
  np.testing.assert_array_equal(policy.priority(state, None), [1, 2, 1, 0])
  state = policy.placed(state, jnp.int32(1))
  np.testing.assert_array_equal(policy.priority(state, None), [1, 1, 1, 0])


def test_counts_saturate():
  policy = residency.make_policy("lfu")
  full = jnp.full(2, 2.0**24, jnp.float32)
  ids = jnp.zeros((3, 1), jnp.int32)
  state = policy.observe(full, ids, jnp.zeros((3, 2)), jnp.ones(3, bool))
  np.testing.assert_array_equal(state, full)
