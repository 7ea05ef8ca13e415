"""Comparisons tell the same as the replays they are made of."""

import numpy as np
import pytest

from moecore_jax.testing import routing
from moecore_jax.traces import compare, replay


def test_comparison():
  trace = routing.random_trace(300, 2, 16, 3)
  found = compare(trace, "rhac", (4, 16))
  rates = {name: replay(trace, name, 4).mean_hit_rate for name in ("rhac", "lru", "belady")}
  for name in ("lru", "belady"):
    assert found.mean(getattr(found, name))[0] == pytest.approx(rates[name])
  assert found.mean(found.policy)[0] == pytest.approx(rates["rhac"])
  assert found.regret[0] == pytest.approx(rates["belady"] - rates["rhac"])
  gap = (rates["rhac"] - rates["lru"]) / (rates["belady"] - rates["lru"])
  assert found.gap_closed_frac[0] == pytest.approx(gap)
  assert np.isnan(found.gap_closed_frac[1])  # all resident: nothing to close
  assert found.regret[1] == 0


def test_lru_and_belady_are_the_ends():
  trace = routing.random_trace(200, 2, 16, 3)
  for name, frac in (("lru", 0), ("belady", 1)):
    assert compare(trace, name, (5,)).gap_closed_frac[0] == pytest.approx(frac)
