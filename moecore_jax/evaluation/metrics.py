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
    `results`, a row for each task and system; `totals`, a row for each system over all tasks, its
    task named "all"; `memory_bytes`, device and host bytes by region for each system. A row has

    task, system      what it is about
    n, num_errors     requests, and those of them that failed
    accuracy          share of right answers
    ttft_ms, tpot_ms, e2el_ms     mean, p50 and p95 over requests, None where none has it
    prompt_tokens, output_tokens  of all requests that did not fail
    prefill_moved_mb_per_request  from the bank, MB = 10^6 bytes
    num_processes     processes that answered
    counters          each counter of the engine by MoE layer, see `Engine.counters`
    layers            the figures below for each MoE layer, in order

    and, of decode, over all MoE layers,

    hit_rate                      invocations whose expert was there when the layer had routed
    availability_frac             the same with those that another expert computed
    recall_frac                   invocations that were predicted, of the layers that predict
    misses_per_token              experts loaded after the routing
    prefetches_per_token          experts copied ahead of it
    useful_prefetches_per_token   of these, those that the layer then chose
    wasted_prefetches_per_token   of these, those that it did not
    substitutions_per_token       invocations that another expert computed
    evictions_per_token           experts that another displaced
    loads_per_token               misses, prefetches and the experts of layers copied whole
    moved_mb_per_token            bytes of these loads
  """
  results, totals = [], []
  for system in config.systems:
    part = [row for row in rows if row["system"] == system]
    totals.append({"task": "all", "system": system, **_figures(part, systems[system])})
  for task in config.tasks:
    for system in config.systems:
      part = [row for row in rows if row["task"] == task and row["system"] == system]
      results.append({"task": task, "system": system, **_figures(part, systems[system])})
  memory = {system: systems[system]["memory_bytes"] for system in config.systems}
  return {"results": results, "totals": totals, "memory_bytes": memory}


def _figures(rows: Sequence[Mapping[str, Any]], system: Mapping[str, Any]) -> dict[str, Any]:
  counters = {
    name: np.sum([row["counters"][name] for row in rows], axis=0) for name in rows[0]["counters"]
  }
  fan_outs, predicts = np.array(system["experts_per_tok"]), np.array(system["predicts"])
  tokens = counters["decode_invocations"].sum() / fan_outs.sum()
  requests = [row["metrics"] for row in rows if row["metrics"]]
  every = np.arange(len(fan_outs))
  return {
    "n": len(rows),
    "num_errors": sum(row["error"] is not None for row in rows),
    "accuracy": float(np.mean([row["score"] for row in rows])),
    **{name: distribution([request[name] for request in requests]) for name in _LATENCIES},
    "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
    "output_tokens": sum(request["output_tokens"] for request in requests),
    **_decode_figures(counters, every, predicts, tokens),
    "prefill_moved_mb_per_request": float(counters["prefill_moved_bytes"].sum() / 1e6 / len(rows)),
    "num_processes": len({row["process"] for row in rows}),
    "layers": [_decode_figures(counters, every[i : i + 1], predicts, tokens) for i in every],
    "counters": {name: values.tolist() for name, values in counters.items()},
  }


def _decode_figures(
  counters: Mapping[str, np.ndarray], layers: np.ndarray, predicts: np.ndarray, tokens: float
) -> dict[str, float | None]:
  """Returns the figures of some MoE layers together.

  Args:
    counters: int64 [MoE layers] each.
    layers: int [n], which.
    predicts: bool [MoE layers], layers that have predictions.
    tokens: decoded.
  """

  def count(name: str, of: np.ndarray = layers) -> float:
    return counters[f"decode_{name}"][of].sum()

  invocations, foreseen = count("invocations"), layers[predicts[layers]]
  issued, useful = count("prefetches"), count("useful_prefetches")
  return {
    "hit_rate": _ratio(count("hits"), invocations),
    "availability_frac": _ratio(count("hits") + count("substitutions"), invocations),
    "recall_frac": _ratio(count("predicted", foreseen), count("invocations", foreseen)),
    "misses_per_token": _ratio(count("misses"), tokens),
    "prefetches_per_token": _ratio(issued, tokens),
    "useful_prefetches_per_token": _ratio(useful, tokens),
    "wasted_prefetches_per_token": _ratio(issued - useful, tokens),
    "substitutions_per_token": _ratio(count("substitutions"), tokens),
    "evictions_per_token": _ratio(count("evictions"), tokens),
    "loads_per_token": _ratio(count("misses") + issued + count("staged"), tokens),
    "moved_mb_per_token": _ratio(count("moved_bytes") / 1e6, tokens),
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
