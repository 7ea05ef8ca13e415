"""Comparisons tell the same as the replays they are made of."""

import numpy as np
import pytest

from moecore_jax.testing import routing
from moecore_jax.traces import compare, replay

TRACE = routing.random_trace(150, 2, 12, 3)


def test_comparison():
  found = compare(TRACE, "rhac", (5,))
  rates = {name: replay(TRACE, name, 5).mean_hit_rate for name in ("rhac", "lru", "belady")}
  for name in ("lru", "belady"):
    assert found.mean(getattr(found, name))[0] == pytest.approx(rates[name])
  assert found.mean(found.policy)[0] == pytest.approx(rates["rhac"])
  assert found.regret[0] == pytest.approx(rates["belady"] - rates["rhac"])
  gap = (rates["rhac"] - rates["lru"]) / (rates["belady"] - rates["lru"])
  assert found.gap_closed_frac[0] == pytest.approx(gap)


def test_lru_and_belady_are_the_ends():
  for name, frac in (("lru", 0), ("belady", 1)):
    assert compare(TRACE, name, (5,)).gap_closed_frac[0] == pytest.approx(frac)


def test_nothing_to_close_where_all_are_resident():
  found = compare(TRACE, "rhac", (12,))
  assert np.isnan(found.gap_closed_frac[0])
  assert found.regret[0] == 0
