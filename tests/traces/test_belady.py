"""Belady's policy is the best: exhaustive search over all victims on small streams."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moecore_jax.testing import routing
from moecore_jax.traces import Trace, replay
from moecore_jax.traces.belady import NEVER, next_uses

N, A, T = 5, 2, 8


def most_hits(tokens, num_slots, is_protected):
  """The most hits that any choice of victims gives."""
  steps = [tuple(t) for t in tokens] if is_protected else [(e,) for t in tokens for e in t]

  @functools.cache
  def best(index, resident):
    if index == len(steps):
      return 0
    chosen = steps[index]
    hits = sum(e in resident for e in chosen)
    caches = {resident}
    for expert in chosen:
      caches = {
        after
        for cache in caches
        for after in (
          [cache]
          if expert in cache
          else [cache | {expert}]
          if len(cache) < num_slots
          else [cache - {victim} | {expert} for victim in cache - set(chosen)]
        )
      }
    return hits + max(best(index + 1, cache) for cache in caches)

  return best(0, frozenset())


def trace_of(tokens) -> Trace:
  base = routing.random_trace(len(tokens), 1, N, A)
  base.experts[:, 0] = tokens
  return base


token = st.permutations(range(N)).map(lambda p: p[:A])


@pytest.mark.parametrize("counting", ["protected", "sequential"])
@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(token, min_size=T, max_size=T), num_slots=st.integers(A, N - 1))
def test_no_choice_of_victims_is_better(counting, tokens, num_slots):
  found = replay(trace_of(tokens), "belady", num_slots, counting=counting).hits[0]
  assert found == most_hits(tokens, num_slots, counting == "protected")


def test_bounds_every_policy():
  trace = routing.random_trace(150, 2, 12, 3, num_sequences=3)
  for settings_ in ({"counting": "sequential"}, {"reset_between_sequences": True}):
    bound = replay(trace, "belady", 6, **settings_).hits
    for policy in ("rhac", "lru"):
      assert (replay(trace, policy, 6, **settings_).hits < bound).all()


def test_next_uses():
  experts = np.array([[[3, 1]], [[65535, 3]], [[1, 0]]])
  following, first = next_uses(experts, 4, one_by_one=False)
  assert following[:, 0].tolist() == [[1, 2], [NEVER, NEVER], [NEVER, NEVER]]
  assert first.tolist() == [[2, 0, NEVER, 0]]
  following, first = next_uses(experts, 4, one_by_one=True)
  assert following[:, 0].tolist() == [[3, 4], [NEVER, NEVER], [NEVER, NEVER]]
  assert first.tolist() == [[5, 1, NEVER, 0]]
