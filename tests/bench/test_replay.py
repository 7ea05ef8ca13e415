"""bench.replay measures what it says, and tells wrong flags."""

import json

import numpy as np
import pytest

from bench import replay as bench_replay
from moecore_jax import traces
from moecore_jax.testing import routing


def test_speed_row():
  case = bench_replay.Case("lru", 2, 12, 3)
  row = bench_replay.measure_speed(case, 150, rounds=1)
  assert row["requests"] == 150 * 2 * 3
  assert row["requests_per_s"] > 0
  expected = traces.replay(routing.random_trace(150, 2, 12, 3), "lru", 3).mean_hit_rate
  assert row["hit_rate"] == pytest.approx(expected, abs=1e-4)


def test_gaps_of_given_traces(tmp_path, capsys):
  """K = 6 and 8 of 16, not 2 and 4: no more than the fan-out; prefill tokens are left out."""
  trace = routing.random_trace(150, 1, 16, 5)
  traces.save(trace, tmp_path / "one.npz")
  result = tmp_path / "rows.json"
  argv = [f"--trace={tmp_path / 'one.npz'}", f"--json={result}"]
  assert bench_replay.main(argv) == 0
  rows = json.loads(result.read_text())
  assert [row["slots"] for row in rows] == [6, 8]
  found = traces.compare(trace, "rhac", (6, 8))
  for i, row in enumerate(rows):
    for name, rates in (("lru", found.lru), ("rhac", found.policy), ("belady", found.belady)):
      assert row[name] == pytest.approx(found.mean(rates)[i], abs=1e-4)
    assert row["gap_closed_frac"] == pytest.approx(found.gap_closed_frac[i], abs=1e-4)
  mean = np.mean([row["gap_closed_frac"] for row in rows])
  assert f"mean closed, all rows: {mean:.3f}" in capsys.readouterr().out


def test_wrong_flags(capsys):
  assert bench_replay.main(["--rounds=0"]) == 2
  assert "rounds" in capsys.readouterr().err
