"""What an allocation of slots gains: both allocators against uniform slots on routing traces.

    python -m bench.allocators --trace=a.npz,b.npz --json=/tmp/allocators.json

For each trace and number of slots K (of N experts: N/8, N/4, 3N/8, N/2, where K exceeds the
fan-out) the first half of the decoded tokens gives the curves. `hit_rate` is that of the other half
with each allocation, `hit_rate_on_curve` what the curves promised for the first. Cold start, LRU or
RHAC with its defaults, the protected rule; all layers weigh alike.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from moecore_jax.reporting.table import render
from moecore_jax.residency import allocator
from moecore_jax.traces import Phase, Trace, hit_rates, load_any, replay

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)


def measure(trace: Trace, uniform: int, policy: str) -> dict[str, Any]:
  """Allocates by the first half of a trace and replays the second; returns the row."""
  half = trace.num_tokens // 2
  is_first = np.arange(trace.num_tokens) < half
  first, second = trace.select(is_first), trace.select(~is_first)
  top_k, num_experts = (np.asarray(x, np.int64) for x in (trace.top_k, trace.num_experts))
  step = allocator.default_step(uniform)
  sizes = np.array(
    allocator.candidate_sizes(uniform, step, int(top_k.min()), int(num_experts.max()))
  )
  rates = hit_rates(first, np.clip(sizes[:, None], top_k, num_experts), policy)
  expert_bytes = np.maximum(trace.expert_bytes, 1)
  curves = allocator.Curves(sizes, rates, expert_bytes, top_k, num_experts)
  budget = uniform * int(expert_bytes.sum())
  allocations = {
    "uniform": (uniform,) * trace.num_layers,
    "heuristic": allocator.allocate_heuristic(curves, uniform, budget, step),
    "exact": allocator.allocate_exact(curves, budget),
  }
  return {
    "policy": policy,
    "num_experts": int(num_experts.max()),
    "slots": uniform,
    "step": step,
    "tokens": [first.num_tokens, second.num_tokens],
    "hit_rate": {
      name: float(replay(second, policy, slots).hit_rate.mean())
      for name, slots in allocations.items()
    },
    "hit_rate_on_curve": {name: curves.hit_rate(slots) for name, slots in allocations.items()},
    "allocations": {name: list(slots) for name, slots in allocations.items()},
  }


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  values = flags.FlagValues()
  flags.DEFINE_list("trace", [], "trace files, of any known format", flag_values=values)
  flags.DEFINE_list("policy", ["lru", "rhac"], "replacement policies", flag_values=values)
  flags.DEFINE_integer("tokens", 4000, "most tokens of a trace", lower_bound=2, flag_values=values)
  flags.DEFINE_string("json", None, "write the rows to this file", flag_values=values)
  try:
    values(["bench.allocators", *argv])
    if not values["trace"].value:
      raise flags.Error("--trace=FILE,.. is missing")
  except flags.Error as error:
    print(f"bench.allocators: {error}\n{__doc__}", file=sys.stderr)
    return 2
  rows = []
  for path in values["trace"].value:
    trace = load_any(path)
    trace = trace.select(trace.phase == Phase.DECODE).head(values["tokens"].value)
    largest = int(trace.num_experts.min())
    counts = [round(share * largest) for share in SHARES]
    for uniform in (k for k in counts if k > trace.top_k.max()):
      for policy in values["policy"].value:
        rows.append({"trace": pathlib.Path(path).name, **measure(trace, uniform, policy)})
  names = ("uniform", "heuristic", "exact")
  print(
    render(
      ["trace", "policy", "N", "K", *names, *(f"{name}, curve" for name in names)],
      [
        [
          *(row[name] for name in ("trace", "policy", "num_experts", "slots")),
          *(row["hit_rate"][name] for name in names),
          *(row["hit_rate_on_curve"][name] for name in names),
        ]
        for row in rows
      ],
    )
  )
  if values["json"].value:
    pathlib.Path(values["json"].value).write_text(json.dumps(rows, indent=1) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
