"""Tables: aligned, missing figures as dashes, every region of every system."""

from moecore_jax.reporting import table


def test_columns_are_aligned():
  text = table.render(("name", "ms"), [("a", 1.23456), ("longer", None), ("b", 1234.5)])
  assert text.splitlines() == [
    "name        ms",
    "------  ------",
    "a        1.235",
    "longer       -",
    "b       1234.5",
  ]


def test_evaluation_shows_every_figure():
  spread = {"mean": 11.0, "p50": 12.0, "p95": 13.0}
  row = {
    "task": "math",
    "system": "lod",
    "n": 7,
    "accuracy": 0.875,
    "ttft_ms": {"mean": 21.0, "p50": 0.0, "p95": 0.0},
    "tpot_ms": None,
    "e2el_ms": spread,
    "hit_rate": 0.625,
    "availability_frac": 0.75,
    "misses_per_token": 3.5,
    "moved_mb_per_token": 4.25,
  }
  memory = {
    "lod": {"device": {"expert_slots": 2_500_000}, "host": {"expert_bank": 90_000_000}},
    "all_resident": {"device": {"expert_slots": 90_000_000, "tables": 1000}},
  }
  text = table.evaluation({"results": [row], "totals": [row], "memory_bytes": memory})
  figures, regions = text.split("\n\n")
  cells = figures.splitlines()[2].split()
  assert len(figures.splitlines()) == 3
  assert cells[:2] == ["math", "lod"]
  assert cells[2:] == (
    ["7", "0.875", "21.000", "-", "11.000", "12.000", "13.000", "0.625", "0.750", "3.500", "4.250"]
  )
  assert [line.split() for line in regions.splitlines()[2:]] == [
    ["device", "expert_slots", "2.500", "90.000"],
    ["host", "expert_bank", "90.000", "0.000"],
    ["device", "tables", "0.000", "0.001"],
    ["device", "total", "2.500", "90.001"],
    ["host", "total", "90.000", "0.000"],
  ]
  rows = [row, row | {"task": "qa"}]
  text = table.evaluation({"results": rows, "totals": [row | {"task": "all"}], "memory_bytes": {}})
  assert [line.split()[0] for line in text.splitlines()[2:5]] == ["math", "qa", "all"]


def test_layers_of_every_system():
  names = ["hit_rate", "availability_frac", "recall_frac", "misses_per_token"]
  names += ["prefetches_per_token", "useful_prefetches_per_token", "wasted_prefetches_per_token"]
  names += ["substitutions_per_token", "evictions_per_token", "moved_mb_per_token"]
  layers = [{name: float(i + 10 * layer) for i, name in enumerate(names)} for layer in range(2)]
  layers[0]["recall_frac"] = None
  totals = [{"system": system, "layers": layers} for system in ("moecore", "lod")]
  lines = [line.split() for line in table.by_layer({"totals": totals}).splitlines()[2:]]
  assert [line[:2] for line in lines] == [[s, i] for s in ("moecore", "lod") for i in ("0", "1")]
  assert lines[0][2:5] == ["0.000", "1.000", "-"]
  assert lines[3][2:] == [f"{10 + i}.000" for i in range(10)]
