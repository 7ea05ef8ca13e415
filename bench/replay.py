"""How fast traces are replayed on one core, and how much of the way from LRU to Belady RHAC goes.

    taskset -c 0 python -m bench.replay --json=/tmp/replay.json

replays random traces with locality, of the shapes of real models, once to compile and then a few
times: requests are experts that tokens chose, `sizes` the numbers of slots that are replayed at
once. 4 million requests a second and core are the bound for LRU and RHAC.

    python -m bench.replay --trace=FILE,FILE --json=/tmp/gap.json

replays the decoded tokens of given traces instead: hit rates of LRU, of RHAC as it is by default
and of Belady, from a cold start, the present token's experts protected, at K = N/8, N/4, 3N/8 and
N/2 slots where K is larger than the fan-out. `closed` is (RHAC - LRU) / (Belady - LRU).
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from bench import command
from bench.aot_row import machine, versions
from moecore_jax import traces
from moecore_jax.reporting import table
from moecore_jax.testing import routing

BOUND_PER_S = 4e6


@dataclasses.dataclass(frozen=True)
class Case:
  """What is replayed for speed.

  Attributes:
    policy: replacement policy.
    num_layers, num_experts, top_k: shape of the model.
    sizes: numbers of slots that are replayed at once, all N/4.
    counting: "protected" or "sequential".
  """

  policy: traces.ReplayPolicy
  num_layers: int
  num_experts: int
  top_k: int
  sizes: int = 1
  counting: traces.Counting = "protected"


_SHAPES = ((26, 64, 6), (48, 128, 8), (58, 256, 8))
CASES = tuple(Case(policy, *shape) for policy in ("lru", "rhac") for shape in _SHAPES)
CASES += (Case("rhac", *_SHAPES[0], sizes=8), Case("belady", *_SHAPES[0]))
CASES += tuple(Case(policy, *_SHAPES[0], counting="sequential") for policy in ("lru", "rhac"))


def measure_speed(case: Case, num_tokens: int, rounds: int) -> dict[str, Any]:
  """Replays a random trace; returns the row of a case."""
  trace = routing.random_trace(num_tokens, case.num_layers, case.num_experts, case.top_k)
  slots = [case.num_experts // 4] * case.sizes
  wall, cpu = [], []
  for _ in range(rounds + 1):
    start = time.perf_counter(), time.process_time()
    rates = traces.hit_rates(trace, slots, case.policy, counting=case.counting)
    wall.append(time.perf_counter() - start[0])
    cpu.append(time.process_time() - start[1])
  requests = trace.experts.size * case.sizes
  return {
    **dataclasses.asdict(case),
    "num_tokens": num_tokens,
    "requests": requests,
    "hit_rate": round(float(rates.mean()), 4),
    "requests_per_s": round(requests / float(np.median(wall[1:]))),  # warm
    "requests_per_cpu_s": round(requests / float(np.median(cpu[1:]))),
    "first_call_s": round(wall[0], 3),
    "bound_per_s": BOUND_PER_S,
    "rounds": rounds,
    "versions": versions(),
    "machine": machine(),
  }


def measure_gap(path: str) -> list[dict[str, Any]]:
  """Returns a row for each number of slots of a trace."""
  trace = traces.load_any(path)
  trace = trace.select(trace.phase == traces.Phase.DECODE)
  num_experts, top_k = int(trace.num_experts[0]), int(trace.top_k[0])
  slots = [i * num_experts // 8 for i in range(1, 5) if i * num_experts // 8 > top_k]
  found = traces.compare(trace, "rhac", slots)
  return [
    {
      "trace": pathlib.Path(path).name,
      "num_tokens": trace.num_tokens,
      "num_layers": trace.num_layers,
      "num_experts": num_experts,
      "top_k": top_k,
      "slots": count,
      "lru": round(float(found.mean(found.lru)[i]), 4),
      "rhac": round(float(found.mean(found.policy)[i]), 4),
      "belady": round(float(found.mean(found.belady)[i]), 4),
      "gap_closed_frac": round(float(found.gap_closed_frac[i]), 4),
      "versions": versions(),
      "machine": machine(),
    }
    for i, count in enumerate(slots)
  ]


def gap_table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the table of gaps, the mean of each trace, and the mean of all rows."""
  columns = ("trace", "num_experts", "top_k", "slots", "lru", "rhac", "belady", "gap_closed_frac")
  titles = ("trace", "N", "k", "K", "LRU", "RHAC", "Belady", "closed")
  lines = [table.render(titles, [[row[name] for name in columns] for row in rows]), ""]
  for name in dict.fromkeys(row["trace"] for row in rows):
    closed = [row["gap_closed_frac"] for row in rows if row["trace"] == name]
    lines.append(f"mean closed, {name}: {np.mean(closed):.3f}")
  lines.append(f"mean closed, all rows: {np.mean([row['gap_closed_frac'] for row in rows]):.3f}")
  return "\n".join(lines)


def measure(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Measures gaps where traces are given, else speed; yields the rows."""
  if values["trace"].value:
    rows = []
    for path in values["trace"].value:
      rows += measure_gap(path)
    print(gap_table(rows))
    yield from rows
    return
  for case in CASES:
    row = measure_speed(case, values["tokens"].value, values["rounds"].value)
    print(
      f"{row['policy']:<7}{row['counting']:<11} {row['num_layers']} layers x "
      f"{row['num_experts']:>3} experts, top-{row['top_k']}, {row['sizes']} sizes  "
      f"{row['requests_per_s'] / 1e6:5.2f} M requests/s, "
      f"{row['requests_per_cpu_s'] / 1e6:5.2f} M a CPU second",
      flush=True,
    )
    yield row
  print(f"bound: {BOUND_PER_S / 1e6:.0f} M requests/s and core for lru and rhac, protected")


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_list("trace", [], "trace files: measure gaps instead of speed", flag_values=values)
  flags.DEFINE_integer("tokens", 4096, "tokens of a case", lower_bound=1, flag_values=values)
  flags.DEFINE_integer("rounds", 5, "replays of a case", lower_bound=1, flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return command.run("bench.replay", __doc__, argv, measure, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
