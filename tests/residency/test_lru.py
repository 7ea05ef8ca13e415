"""LRU: the order of uses within a step, and stamps that never overflow."""

import jax.numpy as jnp
import numpy as np

from moecore_jax import residency


def observe(state, ids, valid=None):
  num_tokens = len(ids)
  scores = jnp.zeros((num_tokens, state.shape[0]))
  policy = residency.make_policy("lru")
  return policy.observe(
    state, jnp.asarray(ids, jnp.int32), scores, jnp.asarray(valid or [True] * num_tokens)
  )


def order(state):
  """Experts from the least to the most recently used."""
  return np.argsort(state, kind="stable").tolist()


def test_last_occurrence_counts():
  """Position, then row, then rank; an expert that a later token selects again moves up."""
  policy = residency.make_policy("lru")
  state = observe(policy.init(5), [[4, 2], [0, 4]])
  assert order(state) == [1, 3, 2, 0, 4]
  assert len(set(np.asarray(state).tolist())) == 4  # only the two unused ones share a stamp


def test_padding_between_tokens_is_no_use():
  start = residency.make_policy("lru").init(5)
  state = observe(start, [[4, 2], [1, 3], [0, 4], [3, 1]], [True, False, True, False])
  np.testing.assert_array_equal(state, observe(start, [[4, 2], [0, 4]]))


def test_placed_is_the_newest_use():
  policy = residency.make_policy("lru")
  state = policy.placed(observe(policy.init(4), [[3, 2]]), jnp.int32(3))
  assert order(state) == [0, 1, 2, 3]


def test_stamps_saturate():
  state = observe(jnp.asarray([-(2.0**24), -(2.0**24) + 1, 0.0], jnp.float32), [[2, 1]])
  np.testing.assert_array_equal(state, [-(2**24), 0, -1])
  state = observe(jnp.asarray([0, -(2.0**24) + 1, -(2.0**24)], jnp.float32), [[0, 0]])
  np.testing.assert_array_equal(state, [0, -(2**24), -(2**24)])
