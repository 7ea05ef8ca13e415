"""From logged answers to figures: accuracy, latencies, hit rates, misses and bytes a token.

Latencies are those of the requests; hits, misses and bytes come from the engine's counters, per MoE
layer, decode apart from prefill. A decoded token is counted once for each decode step that
processes it, so figures per token hold for runs that were killed and repeated some steps, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moecore_jax.config import EvalConfig

_LATENCIES = ("ttft_ms", "tpot_ms", "e2el_ms")


def summarize(
  rows: Sequence[Mapping[str, Any]], systems: Mapping[str, Any], config: EvalConfig
) -> dict[str, Any]:
  """Returns the content of metrics.json.

  Args:
    rows: answers, as `evaluation.job` logs them.
    systems: what systems.json says of each system.
    config: names the tasks and systems, and their order.

  Returns:
    `results`: a row for each task and system: n, num_errors, accuracy (0..1), ttft_ms, tpot_ms and
      e2el_ms with mean, p50
    and p95 (None where no request has it), prompt_tokens, output_tokens, hit_rate,
    misses_per_token, moved_mb_per_token (decode; MB = 10^6 bytes), prefill_moved_mb_per_request,
    num_processes, and `layers`: each counter by MoE layer. `memory_bytes`: device and host bytes by
    region for each system.
  """
  results = []
  for task in config.tasks:
    for system in config.systems:
      part = [row for row in rows if row["task"] == task and row["system"] == system]
      results.append({"task": task, "system": system, **_figures(part, systems[system])})
  memory = {system: systems[system]["memory_bytes"] for system in config.systems}
  return {"results": results, "memory_bytes": memory}


def _figures(rows: Sequence[Mapping[str, Any]], system: Mapping[str, Any]) -> dict[str, Any]:
  layers = {
    name: np.sum([row["counters"][name] for row in rows], axis=0) for name in rows[0]["counters"]
  }
  invocations, misses = layers["decode_invocations"].sum(), layers["decode_misses"].sum()
  tokens = invocations / sum(system["experts_per_tok"])
  requests = [row["metrics"] for row in rows if row["metrics"]]
  return {
    "n": len(rows),
    "num_errors": sum(row["error"] is not None for row in rows),
    "accuracy": float(np.mean([row["score"] for row in rows])),
    **{name: distribution([request[name] for request in requests]) for name in _LATENCIES},
    "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
    "output_tokens": sum(request["output_tokens"] for request in requests),
    "hit_rate": _ratio(layers["decode_hits"].sum(), invocations),
    "misses_per_token": _ratio(misses, tokens),
    "moved_mb_per_token": _ratio(layers["decode_moved_bytes"].sum() / 1e6, tokens),
    "prefill_moved_mb_per_request": float(layers["prefill_moved_bytes"].sum() / 1e6 / len(rows)),
    "num_processes": len({row["process"] for row in rows}),
    "layers": {name: values.tolist() for name, values in layers.items()},
  }


def distribution(values: Sequence[float | None]) -> dict[str, float] | None:
  """Returns mean, p50 and p95 of the values that exist, None where none does."""
  known = [value for value in values if value is not None]
  if not known:
    return None
  p50, p95 = np.percentile(known, [50, 95])
  return {"mean": float(np.mean(known)), "p50": float(p50), "p95": float(p95)}


def _ratio(numerator: float, denominator: float) -> float | None:
  return float(numerator / denominator) if denominator else None
