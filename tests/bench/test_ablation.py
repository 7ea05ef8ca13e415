"""Rows of a finished evaluation: one a system, over all tasks."""

import json

from bench import ablation

TOTAL = {
  "task": "all",
  "system": "lru",
  "n": 8,
  "accuracy": 0.87612,
  "hit_rate": 0.5,
  "availability_frac": 0.75,
  "recall_frac": None,
  "misses_per_token": 3.25,
  "loads_per_token": 4.0,
  "moved_mb_per_token": 0.3,
  "ttft_ms": {"mean": 3.0, "p50": 2.0, "p95": 9.0},
  "tpot_ms": None,
}


def test_a_row_for_each_system(tmp_path, capsys):
  (tmp_path / "metrics.json").write_text(json.dumps({"totals": [TOTAL, TOTAL | {"system": "x"}]}))
  path = tmp_path / "rows.json"
  assert ablation.main([f"--workdir={tmp_path}", f"--json={path}"]) == 0
  first, second = json.loads(path.read_text())
  assert (first["system"], second["system"]) == ("lru", "x")
  assert (first["accuracy"], first["ttft_ms"], first["tpot_ms"]) == (0.8761, 2.0, None)
  assert first["versions"]["jax"] and first["machine"]
  line = capsys.readouterr().out.splitlines()[2].split()
  assert line == ["lru", "0.876", "0.500", "0.750", "-", "3.250", "4.000", "0.300", "2.000", "-"]


def test_an_unfinished_evaluation_is_refused(tmp_path, capsys):
  assert ablation.main([f"--workdir={tmp_path}"]) == 2
  assert "has no metrics.json" in capsys.readouterr().err
