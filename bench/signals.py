"""What each of RHAC's four signals contributes, on a trace that keeps selection scores.

    moecore profile --config=configs/demo.py --config.engine.batch_size=1 --scores \
      --output=/tmp/profiles.npz --trace=/tmp/trace.npz
    python -m bench.signals --trace=/tmp/trace.npz --json=/tmp/signals.json

replays the decoded tokens with different weights of recent frequency, moving average, current score
and age: the defaults, each signal alone, and each that the defaults leave out added to them. Hit
rates are from a cold start, the present token's experts protected, at K = N/4, 3N/8 and N/2 slots;
`closed` is how much of the way from LRU to Belady they go, averaged over K.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import command
from bench.aot_row import machine, versions
from moecore_jax import traces
from moecore_jax.reporting import table
from moecore_jax.specs import RhacSpec

DEFAULT = RhacSpec()
WEIGHTS = {
  "the defaults": (0.0, 3.0, 0.0, 0.5),
  "recent frequency alone": (1.0, 0.0, 0.0, 0.0),
  "moving average alone": (0.0, 1.0, 0.0, 0.0),
  "current score alone": (0.0, 0.0, 1.0, 0.0),
  "age alone": (0.0, 0.0, 0.0, 1.0),
  "the defaults and recent frequency": (1.0, 3.0, 0.0, 0.5),
  "the defaults and current score": (0.0, 3.0, 1.0, 0.5),
  "all four": (1.0, 3.0, 1.0, 0.5),
}
"""Weights of recent frequency, moving average, current score and age."""


def measure(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Replays with each set of weights; prints the table and yields its rows."""
  trace = traces.load_any(values["trace"].value)
  trace = trace.select(trace.phase == traces.Phase.DECODE)
  num_experts = int(trace.num_experts[0])
  slots = [i * num_experts // 8 for i in (2, 3, 4)]
  bounds = traces.compare(trace, "rhac", slots, rhac=DEFAULT)
  lru, belady = (np.mean(rates, axis=0) for rates in (bounds.lru, bounds.belady))
  rates = {"LRU": lru, "Belady": belady}
  for name, (frequency, average, score, age) in WEIGHTS.items():
    spec = RhacSpec(
      frequency_weight=frequency, average_weight=average, score_weight=score, age_weight=age
    )
    rates[name] = traces.hit_rates(trace, slots, "rhac", rhac=spec).mean(axis=0)
  rows = [
    {
      "signals": name,
      "weights": WEIGHTS.get(name),
      "hit_rate": {str(k): round(float(r), 4) for k, r in zip(slots, found, strict=True)},
      "gap_closed_frac": round(float(np.mean((found - lru) / (belady - lru))), 4),
      "num_tokens": trace.num_tokens,
      "num_experts": num_experts,
      "versions": versions(),
      "machine": machine(),
    }
    for name, found in rates.items()
  ]
  titles = ("signals", "f, m, q, a", *(f"K = {k}" for k in slots), "closed")
  cells = [
    [
      row["signals"],
      " ".join(f"{w:g}" for w in row["weights"] or ()),
      *row["hit_rate"].values(),
      row["gap_closed_frac"],
    ]
    for row in rows
  ]
  print(table.render(titles, cells))
  yield from rows


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("trace", None, "trace file with scores", flag_values=values)
  flags.mark_flag_as_required("trace", flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return command.run("bench.signals", __doc__, argv, measure, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
