"""Approximate substitution against a reference in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.residency.substitution import substitute

TOKENS, NUM_EXPERTS, RANKS = 3, 10, 3

_substitute = jax.jit(substitute, static_argnums=4)


def reference(topk_ids, scores, valid, available, alpha):
  """SPEC section 7 and its choices, token by token."""
  tokens = [t for t in range(len(topk_ids)) if valid[t]]
  result = [list(map(int, row)) for row in topk_ids]
  substituted = [[False] * len(row) for row in topk_ids]

  def missing(t):
    return [int(e) for e in topk_ids[t] if not available[e]]

  low, boundary = {}, {}
  for t in tokens:
    rest = [scores[t][e] for e in range(NUM_EXPERTS) if e not in topk_ids[t]]
    boundary[t] = max(rest)
    if np.isinf(boundary[t]):  # nothing but the selected experts is left
      low[t] = []
      continue
    limit = boundary[t] + np.float32(alpha) * abs(boundary[t])
    low[t] = [int(e) for e in topk_ids[t] if scores[t][e] < limit]
  loaded = {e for t in tokens for e in missing(t) if e not in low[t]}
  pairs = {}
  for t in tokens:
    if np.isinf(boundary[t]):
      pairs[t] = {}
      continue
    by_score = sorted(range(NUM_EXPERTS), key=lambda e, t=t: (-scores[t][e], e))
    replaceable = [e for e in by_score if e in low[t] and e in missing(t) and e not in loaded]
    least = boundary[t] - np.float32(alpha) * abs(boundary[t])
    candidates = [
      e
      for e in by_score
      if e not in topk_ids[t]
      and available[e]
      and np.isfinite(scores[t][e])
      and scores[t][e] >= least
    ]
    pairs[t] = dict(zip(replaceable, candidates, strict=False))
    pairs[t] |= {e: None for e in replaceable if e not in pairs[t]}
  loaded |= {e for found in pairs.values() for e, partner in found.items() if partner is None}
  for t in tokens:
    for rank, e in enumerate(map(int, topk_ids[t])):
      if e not in loaded and pairs[t].get(e) is not None:
        result[t][rank], substituted[t][rank] = pairs[t][e], True
  return result, substituted


@st.composite
def cases(draw):
  # Few distinct values: ties and negative scores are common.
  value = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.05, 1.1])
  rows = draw(st.lists(st.lists(value, min_size=10, max_size=10), min_size=3, max_size=3))
  scores = np.array(rows, np.float32)
  masked = draw(st.lists(st.booleans(), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS))
  if sum(masked) <= NUM_EXPERTS - RANKS:
    scores[:, masked] = -np.inf
  topk_ids = np.argsort(-scores, axis=1, kind="stable")[:, :RANKS].astype(np.int32)
  flags = st.lists(st.booleans(), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
  valid = np.array(draw(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS)))
  alpha = draw(st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.9]))
  return topk_ids, scores, valid, np.array(draw(flags)), alpha


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equals_the_reference(case):
  topk_ids, scores, valid, available, alpha = case
  got = _substitute(*map(jnp.asarray, (topk_ids, scores, valid, available)), alpha)
  ids, substituted = reference(topk_ids, scores, valid, available, alpha)
  np.testing.assert_array_equal(got.is_substituted, substituted)
  np.testing.assert_array_equal(got.topk_ids, ids)


def test_best_missing_gets_the_best_resident():
  scores = jnp.asarray([[1.0, 0.99, 0.98, 0.97, 0.96, 0.95]], jnp.float32)
  topk_ids, valid = jnp.asarray([[0, 1, 2]], jnp.int32), jnp.asarray([True])
  available = jnp.asarray([True, False, False, False, True, True])
  got = _substitute(topk_ids, scores, valid, available, 0.1)
  np.testing.assert_array_equal(got.topk_ids, [[0, 4, 5]])
  np.testing.assert_array_equal(got.is_substituted, [[False, True, True]])


def test_an_expert_that_one_token_must_load_serves_all():
  # Expert 1 is far above the boundary for the second token: it is loaded, so the first uses it too.
  scores = jnp.asarray([[1.0, 0.99, 0.98, 0.97], [0.1, 9.0, 0.1, 8.0]], jnp.float32)
  topk_ids = jnp.asarray([[0, 1], [1, 3]], jnp.int32)
  available = jnp.asarray([True, False, True, True])
  got = _substitute(topk_ids, scores, jnp.asarray([True, True]), available, 0.1)
  np.testing.assert_array_equal(got.topk_ids, topk_ids)


@pytest.mark.parametrize(("ranks", "alpha"), [(3, 0.0), (4, 0.9)])
def test_nothing_is_substituted_without_a_band_or_a_boundary(ranks, alpha):
  scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0]], jnp.float32)
  topk_ids = jnp.arange(ranks, dtype=jnp.int32)[None]
  got = _substitute(topk_ids, scores, jnp.asarray([True]), jnp.zeros(4, bool), alpha)
  np.testing.assert_array_equal(got.topk_ids, topk_ids)
  assert not got.is_substituted.any()
