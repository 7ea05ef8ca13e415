"""`moecore simulate`: replays a routing trace under a policy, beside LRU and Belady's bound."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from moecore_jax import traces
from moecore_jax.cli import options
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.reporting import table

ABOUT = """Replays a routing trace through slots, without a model, and prints hit rates: of the
policy, of LRU and of Belady, which knows the future and bounds all policies that load what they
miss (`static`, once full, does not). `closed` is the share of the way from LRU to Belady that the
policy goes, `regret` the hit rate that Belady has before it.

The cache starts cold; every token counts as a generated one. Traces are files of this package or of
other tools, told apart by content: npz archives of experts [T, L, A], offsets [S + 1] and weights
or probs [T, L, A]; and CSV, gzipped or not, of one routing choice a line, its columns (turn, phase:
0 prefill, 1 decode, step, layer, slot, expert, weight) named in the first line, behind a line such
as `# n_expert=64 n_expert_used=8`.
"""
_POLICIES = ("rhac", "lru", "lfu", "fifo", "random", "static", "belady")


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the trace, the policy or the numbers of slots are not what they should be.
  """
  values = options.parse(
    "simulate", ABOUT, argv, _define, use_config=False, required=("trace", "policy", "slots")
  )
  slots = _numbers(values.slots)
  trace = traces.load_any(values.trace, values.num_experts)
  if values.phase != "all":
    trace = trace.select(trace.phase == traces.Phase[values.phase.upper()])
  trace = trace.head(values.tokens or trace.num_tokens)
  if not trace.num_tokens:
    raise ValueError(f"{values.trace} has no {values.phase} tokens, choose another --phase")
  found = traces.compare(trace, values.policy, slots, values.counting)
  print(_tables(trace, found, values.policy, values.counting))
  if values.json:
    result = {
      "trace": values.trace,
      "tokens": trace.num_tokens,
      "phase": values.phase,
      "policy": values.policy,
      "counting": values.counting,
      "num_experts": trace.num_experts.tolist(),
      "top_k": trace.top_k.tolist(),
      "results": _rows(found),
    }
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  return 0


def _rows(found: traces.Comparison) -> list[dict[str, Any]]:
  """Returns the figures at each number of slots, in JSON types."""
  rows = []
  for i, count in enumerate(found.slots):
    row: dict[str, Any] = {"slots": count}
    for name in ("policy", "lru", "belady"):
      rates = getattr(found, name)
      row[f"{name}_hit_rate"] = float(found.mean(rates)[i])
      row[f"{name}_hit_rate_by_layer"] = rates[:, i].tolist()
    closed = float(found.gap_closed_frac[i])
    row["regret"] = float(found.regret[i])
    row["gap_closed_frac"] = None if math.isnan(closed) else closed
    rows.append(row)
  return rows


def _tables(trace: traces.Trace, found: traces.Comparison, policy: str, counting: str) -> str:
  names = {"policy": policy, "lru": "LRU", "belady": "Belady"}
  rows = [
    [row["slots"], *(row[f"{n}_hit_rate"] for n in names), row["regret"], row["gap_closed_frac"]]
    for row in _rows(found)
  ]
  head = f"{trace.num_tokens} tokens, {trace.num_layers} layers, {counting} counting, cold start"
  mean = table.render(["slots", *names.values(), "regret", "closed"], rows)
  by_layer = table.render(
    ["layer", *(f"{policy} {count}" for count in found.slots)],
    [[layer, *map(float, rates)] for layer, rates in enumerate(found.policy)],
  )
  return f"{head}\n\n{mean}\n\n{by_layer}"


def _numbers(words: Sequence[str]) -> list[int]:
  try:
    return [int(word) for word in words]
  except ValueError:
    raise ValueError(
      f"--slots={','.join(words)}: expected numbers of slots, such as 8,16"
    ) from None


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("trace", None, "the trace file", flag_values=values)
  flags.DEFINE_enum("policy", None, _POLICIES, "replacement policy", flag_values=values)
  flags.DEFINE_list("slots", None, "slots of every layer, K or K,K,...", flag_values=values)
  flags.DEFINE_enum(
    "counting",
    "protected",
    ("protected", "sequential"),
    "protected: the present token's experts are not evicted, as in the engine; sequential: choices "
    "are served one by one",
    flag_values=values,
  )
  flags.DEFINE_enum(
    "phase",
    "decode",
    ("decode", "prefill", "all"),
    "which tokens of the trace are replayed",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "tokens", None, "replay the first tokens only", lower_bound=1, flag_values=values
  )
  flags.DEFINE_integer(
    "num_experts",
    None,
    "routed experts of a layer, for files that do not tell (default: from the largest id)",
    lower_bound=1,
    flag_values=values,
  )
