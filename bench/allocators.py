"""What an allocation of slots gains: both allocators against uniform slots on routing traces.

    python -m bench.allocators --trace=a.npz,b.npz --json=/tmp/allocators.json

For each trace and number of slots K (of N experts: N/8, N/4, 3N/8, N/2, where K exceeds the
fan-out) one half of the decoded tokens gives the curves: every other sequence where there are at
least 16, else the first half of the tokens. `hit_rate` is that of the other half with each
allocation, `hit_rate_on_curve` what the curves promised for the first. Cold start, LRU or RHAC with
its defaults, the protected rule; all layers weigh alike.
"""

import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import command
from moecore_jax.cli.allocate import allocations, measure_curves
from moecore_jax.reporting.table import render
from moecore_jax.residency import allocator
from moecore_jax.traces import Phase, Trace, load_any, replay

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
_MANY_SEQUENCES = 16


def measure(trace: Trace, uniform: int, policy: str) -> dict[str, Any]:
  """Allocates by one half of a trace and replays the other; returns the row."""
  index = np.arange(trace.num_tokens)
  is_first = index < trace.num_tokens // 2
  if len(trace.sequence_offsets) > _MANY_SEQUENCES:
    is_first = np.searchsorted(trace.sequence_offsets, index, side="right") % 2 == 0
  first, second = trace.select(is_first), trace.select(~is_first)
  step = allocator.default_step(uniform)
  expert_bytes = np.maximum(trace.expert_bytes, 1)
  curves = measure_curves(first, uniform, step, expert_bytes, policy)
  slots = allocations(curves, uniform, step)
  return {
    "policy": policy,
    "num_experts": int(trace.num_experts.max()),
    "slots": uniform,
    "step": step,
    "tokens": [first.num_tokens, second.num_tokens],
    "hit_rate": {
      name: float(replay(second, policy, part).hit_rate.mean()) for name, part in slots.items()
    },
    "hit_rate_on_curve": {name: curves.hit_rate(part) for name, part in slots.items()},
    "allocations": {name: list(part) for name, part in slots.items()},
  }


def measure_all(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Measures every trace, number of slots and policy; yields their rows.

  Raises:
    ValueError: no trace is given.
  """
  if not values["trace"].value:
    raise ValueError("--trace=FILE,.. is missing")
  rows = []
  for path in values["trace"].value:
    trace = load_any(path)
    trace = trace.select(trace.phase == Phase.DECODE).head(values["tokens"].value)
    largest = int(trace.num_experts.min())
    counts = [round(share * largest) for share in SHARES]
    for uniform in (k for k in counts if k > trace.top_k.max()):
      for policy in values["policy"].value:
        rows.append({"trace": pathlib.Path(path).name, **measure(trace, uniform, policy)})
        yield rows[-1]
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


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_list("trace", [], "trace files, of any known format", flag_values=values)
  flags.DEFINE_list("policy", ["lru", "rhac"], "replacement policies", flag_values=values)
  flags.DEFINE_integer("tokens", 4000, "most tokens of a trace", lower_bound=2, flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return command.run("bench.allocators", __doc__, argv, measure_all, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
