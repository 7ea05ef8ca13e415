"""The comparison of allocators: one row, whose second half was not seen by the allocation."""

import json

from bench import allocators
from moecore_jax.testing.routing import random_trace
from moecore_jax.traces import save


def test_a_row_keeps_the_budget_and_the_order_on_the_curve():
  trace = random_trace(200, num_layers=4, num_experts=16, top_k=2, skew=2.0)
  trace.experts[:, 0] = (0, 1)  # a layer that needs two slots
  row = allocators.measure(trace, 4, "lru")
  assert row["tokens"] == [100, 100]
  assert all(sum(slots) <= 16 for slots in row["allocations"].values())
  on_curve, held_out = row["hit_rate_on_curve"], row["hit_rate"]
  assert on_curve["exact"] >= on_curve["heuristic"] >= on_curve["uniform"] > 0
  assert held_out["exact"] > held_out["uniform"] > 0


def test_rows_on_the_command_line(tmp_path, capsys):
  save(random_trace(100, num_layers=2, num_experts=8, top_k=2), tmp_path / "a.npz")
  file = tmp_path / "rows.json"
  argv = [f"--trace={tmp_path / 'a.npz'}", f"--json={file}", "--policy=lru"]
  assert allocators.main(argv) == 0
  assert [row["slots"] for row in json.loads(file.read_text())] == [3, 4]
  assert "heuristic" in capsys.readouterr().out
  for wrong, words in (([], "--trace"), (["--trace=/nowhere"], "/nowhere"), (["--x=1"], "'x'")):
    assert allocators.main(wrong) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.allocators: ") and words in error and error.count("\n") == 1
