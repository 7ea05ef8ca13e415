"""Candidates of a prefetch, their score, and the rate that limits it."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.residency import prefetch

NUM_EXPERTS, RANKS = 8, 3


def _predict(scores, resident, count, valid=None, is_allowed=True):
  scores = np.asarray(scores, np.float32)
  topk_ids = np.argsort(-scores, axis=1, kind="stable")[:, :RANKS].astype(np.int32)
  valid = np.ones(len(scores), bool) if valid is None else valid
  arrays = map(jnp.asarray, (topk_ids, scores, valid, resident))
  return prefetch.predict(*arrays, count, jnp.asarray(is_allowed)), topk_ids


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, RANKS))
def test_candidates_are_the_best_predicted_absent_ones(seed, count):
  rng = np.random.default_rng(seed)
  scores = rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0], size=(2, NUM_EXPERTS))
  resident, valid = rng.random(NUM_EXPERTS) < 0.5, rng.random(2) < 0.8
  got, topk_ids = _predict(scores, resident, count, valid)
  chosen = {int(e) for t in range(2) if valid[t] for e in topk_ids[t]}
  best = {e: max(scores[t][e] for t in range(2) if valid[t]) for e in chosen if not resident[e]}
  ranked = sorted(best, key=lambda e: (-best[e], e))[:count]
  np.testing.assert_array_equal(got.experts, ranked + [-1] * (count - len(ranked)))
  assert bool(got.is_issued) == (len(ranked) == count)


def test_a_layer_that_may_not_issue_still_predicts():
  got, _ = _predict([[3, 2, 1, 0, 0, 0, 0, 0]], np.zeros(NUM_EXPERTS, bool), 2, is_allowed=False)
  np.testing.assert_array_equal(got.experts, [0, 1])
  assert not got.is_issued


def test_useful_and_predicted_are_counted():
  got, _ = _predict([[3, 2, 1, 0, 0, 0, 0, 0]], np.eye(NUM_EXPERTS)[1] > 0, 2)
  np.testing.assert_array_equal(got.experts, [0, 2])
  member = jnp.asarray(np.isin(np.arange(NUM_EXPERTS), [0, 1, 7]))
  assert int(prefetch.num_useful(got, member)) == 1
  true_ids = jnp.asarray([[0, 1, 7]], jnp.int32)
  assert int(prefetch.num_predicted(got, true_ids, NUM_EXPERTS)) == 2
  nothing = prefetch.no_prediction(true_ids, NUM_EXPERTS)
  padded = jnp.full_like(true_ids, NUM_EXPERTS)
  assert int(prefetch.num_predicted(nothing, padded, NUM_EXPERTS)) == 0


def test_the_useful_rate_follows_predictions_and_rests_without_candidates():
  rate = jnp.float32(1.0)
  got, _ = _predict([[3, 2, 1, 0, 0, 0, 0, 0]], np.zeros(NUM_EXPERTS, bool), 2)
  rate = prefetch.update_useful_rate(rate, got, jnp.int32(1), 0.5)
  assert float(rate) == 0.75
  none, _ = _predict([[3, 2, 1, 0, 0, 0, 0, 0]], np.ones(NUM_EXPERTS, bool), 2)
  assert float(prefetch.update_useful_rate(rate, none, jnp.int32(0), 0.5)) == 0.75


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(1, RANKS), st.integers(1, NUM_EXPERTS))
def test_a_warm_start_wants_the_hottest_that_are_absent(seed, count, num_slots):
  rng = np.random.default_rng(seed)
  rank, resident = rng.permutation(NUM_EXPERTS), rng.random(NUM_EXPERTS) < 0.5
  wanted = [int(e) for e in np.argsort(rank)[:num_slots] if not resident[e]][:count]
  arrays = jnp.asarray(rank, jnp.int32), jnp.asarray(resident), jnp.int32(num_slots)
  got = prefetch.warm_candidates(*arrays, count)
  np.testing.assert_array_equal(got, wanted + [-1] * (count - len(wanted)))
  none = prefetch.warm_candidates(jnp.zeros(NUM_EXPERTS, jnp.int32), *arrays[1:], count)
  np.testing.assert_array_equal(none, [-1] * count)
