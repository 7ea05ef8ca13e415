"""The table of signals: bounds and weights that are what they say."""

import dataclasses
import json

import numpy as np

from bench import signals
from moecore_jax import traces
from moecore_jax.testing import routing


def test_rows_and_bounds(tmp_path, capsys):
  trace = routing.random_trace(60, 1, 16, 2)
  rng = np.random.default_rng(0)
  scores = rng.random((60, 1, 16), np.float32)
  traces.save(dataclasses.replace(trace, scores=scores), tmp_path / "t.npz")
  out = tmp_path / "rows.json"
  assert signals.main([f"--trace={tmp_path / 't.npz'}", f"--json={out}"]) == 0
  rows = {row["signals"]: row for row in json.loads(out.read_text())}
  assert set(rows) == {"LRU", "Belady", *signals.WEIGHTS}
  assert (rows["LRU"]["gap_closed_frac"], rows["Belady"]["gap_closed_frac"]) == (0, 1)
  default = traces.hit_rates(trace, [4, 6, 8], "rhac").mean(0)
  np.testing.assert_allclose(list(rows["the defaults"]["hit_rate"].values()), default, atol=1e-4)
  assert "the defaults and current score" in capsys.readouterr().out


def test_a_trace_without_scores_is_refused(tmp_path, capsys):
  traces.save(routing.random_trace(50, 1, 16, 2), tmp_path / "t.npz")
  assert signals.main([f"--trace={tmp_path / 't.npz'}"]) == 2
  assert "scores" in capsys.readouterr().err
