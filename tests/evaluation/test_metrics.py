"""Figures of logged answers, worked out by hand."""

import pytest

from moecore_jax.config import EvalConfig
from moecore_jax.evaluation import metrics

MEMORY = {"device": {"expert_slots": 10}, "host": {"expert_bank": 40}}


def _row(task, system, score, e2el, tpot, counters, error=None, process=1):
  names = ("invocations", "hits", "misses", "moved_bytes")
  rest = {
    "prefetches": [0, 5],
    "useful_prefetches": [0, 2],
    "predicted": [0, 6],
    "substitutions": [1, 0],
    "evictions": [1, 1],
    "staged": [3, 0],
  }
  given = {f"decode_{name}": values for name, values in zip(names, counters, strict=True)}
  given |= {f"decode_{name}": values for name, values in rest.items()}
  return {
    "task": task,
    "system": system,
    "score": score,
    "error": error,
    "process": process,
    "metrics": None
    if error
    else {
      "ttft_ms": 5.0,
      "tpot_ms": tpot,
      "e2el_ms": e2el,
      "prompt_tokens": 3,
      "output_tokens": 2,
    },
    "counters": {**given, "prefill_moved_bytes": [1_000_000, 0]},
  }


def test_figures():
  """Two layers of fan-outs 2 and 4; the second row is a failed request of a second process."""
  rows = [
    _row("math", "lod", 1.0, 10.0, 4.0, ([4, 8], [3, 2], [1, 6], [500_000, 3_000_000])),
    _row("math", "lod", 0.0, 30.0, None, ([2, 4], [2, 1], [0, 3], [0, 1_500_000]), "bad", 2),
  ]
  config = EvalConfig(tasks=("math",), systems=("lod",))
  system = {"memory_bytes": MEMORY, "experts_per_tok": [2, 4], "predicts": [False, True]}
  systems = {"lod": system}
  summary = metrics.summarize(rows, systems, config)
  assert summary["memory_bytes"] == {"lod": MEMORY}
  (row,) = summary["results"]
  assert summary["totals"] == [{**row, "task": "all"}]
  assert (row["task"], row["system"], row["n"], row["num_errors"]) == ("math", "lod", 2, 1)
  assert row["accuracy"] == 0.5
  assert row["e2el_ms"] == {"mean": 10.0, "p50": 10.0, "p95": 10.0}
  assert row["tpot_ms"] == {"mean": 4.0, "p50": 4.0, "p95": 4.0}
  assert (row["prompt_tokens"], row["output_tokens"]) == (3, 2)
  assert row["hit_rate"] == pytest.approx(8 / 18)
  assert row["misses_per_token"] == pytest.approx(10 / 3)
  assert row["moved_mb_per_token"] == pytest.approx(5 / 3)
  assert row["prefill_moved_mb_per_request"] == 1.0
  assert row["num_processes"] == 2
  assert row["counters"]["decode_misses"] == [1, 9]
  # 3 tokens: 18 invocations, of them 12 in the second layer, which alone predicts.
  assert row["availability_frac"] == pytest.approx(10 / 18)
  assert row["recall_frac"] == pytest.approx(12 / 12)
  assert row["prefetches_per_token"] == pytest.approx(10 / 3)
  assert row["useful_prefetches_per_token"] == pytest.approx(4 / 3)
  assert row["wasted_prefetches_per_token"] == pytest.approx(6 / 3)
  assert row["substitutions_per_token"] == pytest.approx(2 / 3)
  assert row["evictions_per_token"] == pytest.approx(4 / 3)
  assert row["loads_per_token"] == pytest.approx((10 + 10 + 6) / 3)
  first, second = row["layers"]
  assert first["recall_frac"] is None and second["recall_frac"] == 1.0
  assert first["hit_rate"] == pytest.approx(5 / 6) and second["hit_rate"] == pytest.approx(3 / 12)
  assert first["loads_per_token"] == pytest.approx(7 / 3)
  assert second["moved_mb_per_token"] == pytest.approx(4.5 / 3)
  summed = {k: v for k, v in row.items() if k.endswith("_per_token")}
  assert summed == {k: pytest.approx(first[k] + second[k]) for k in summed}


def test_distribution_leaves_out_what_does_not_exist():
  found = metrics.distribution([1.0, None, 2.0, 3.0, 4.0, 5.0])
  assert found == {"mean": 3.0, "p50": 3.0, "p95": pytest.approx(4.8)}
  assert metrics.distribution([None]) is None


def test_rows_are_kept_apart_and_in_order():
  none = ([0, 0],) * 4
  rows = [_row(t, s, 1.0, 1.0, None, none) for s in ("moecore", "lod") for t in ("qa", "math")]
  system = {"memory_bytes": MEMORY, "experts_per_tok": [2, 2], "predicts": [False, False]}
  systems = dict.fromkeys(("moecore", "lod"), system)
  config = EvalConfig(tasks=("math", "qa"), systems=("moecore", "lod"))
  summary = metrics.summarize(rows, systems, config)
  results = summary["results"]
  assert [(t["task"], t["system"], t["n"]) for t in summary["totals"]] == [
    ("all", "moecore", 2),
    ("all", "lod", 2),
  ]
  assert [(r["task"], r["system"], r["n"]) for r in results] == [
    ("math", "moecore", 1),
    ("math", "lod", 1),
    ("qa", "moecore", 1),
    ("qa", "lod", 1),
  ]
  assert {r["hit_rate"] for r in results} == {None}
  assert {r["tpot_ms"] for r in results} == {None}
