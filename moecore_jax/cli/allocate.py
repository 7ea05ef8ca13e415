"""`moecore allocate`: slots per layer from the hit-rate curves of a trace."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from moecore_jax import allocation
from moecore_jax.checkpoint import known_fingerprint
from moecore_jax.cli import options
from moecore_jax.cli.plan import read_model
from moecore_jax.config import RunConfig
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.models.experts import expert_bytes
from moecore_jax.reporting import table
from moecore_jax.residency import allocator
from moecore_jax.runtime.engine import DEMO
from moecore_jax.specs import ExpertGroup, RhacSpec
from moecore_jax.traces import Phase, ReplayPolicy, Trace, hit_rates, load

ABOUT = """Allocates slots to layers, in the bytes that residency.slots_per_layer takes everywhere.

The decoded tokens of the trace are replayed under the config's policy, from a cold start, at every
size that whole steps reach. Runs take the file of --json as --config.residency.allocation=FILE.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the trace is not of the config's model, or the budget has no room.
  """
  values = options.parse("allocate", ABOUT, argv, _define, required=("trace",))
  trace = load(values.trace)
  result = allocate(values.config, trace, values.allocator, values.step)
  result["trace"] = values.trace
  if values.json:
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  print(_text(result))
  return 0


def allocate(config: RunConfig, trace: Trace, kind: str, step: int = 0) -> dict[str, Any]:
  """Measures the curves of a trace and allocates by them.

  Args:
    config: its policy and `residency.slots_per_layer`.
    trace: of the config's model.
    kind: "heuristic" or "exact", what becomes `slots`.
    step: slots of a step; 0: `allocator.default_step`.

  Returns:
    The content of an allocation file, with both allocations and what they were made of.

  Raises:
    ValueError: as `main`.
  """
  model, uniform = read_model(config), config.residency.slots_per_layer
  least, most = int(trace.top_k.max()), int(trace.num_experts.min())
  if not least <= uniform <= most:
    raise ValueError(
      f"config field residency.slots_per_layer: got {uniform}, expected {least}..{most}; a replay "
      "holds the experts of a token"
    )
  step = step or allocator.default_step(uniform)
  groups = [model.expert_groups[model.group_of(layer)[0]] for layer in model.moe_layers]
  folder = config.model.checkpoint or DEMO
  _check_model(trace, groups, "" if config.model.published_config else known_fingerprint(folder))
  residency, engine, _ = config.freeze(model)
  expert_sizes = [expert_bytes(group, engine.expert_format) for group in groups]
  rhac, seed = residency.rhac, engine.sampling.seed
  curves = measure_curves(trace, uniform, step, expert_sizes, residency.policy, rhac, seed)
  slots = allocations(curves, uniform, step)
  made = allocation.Allocation(slots[kind], trace.meta.get("fingerprint", ""))
  return made.to_dict() | {
    "allocator": kind,
    "policy": config.residency.policy,
    "step": step,
    "budget_bytes": curves.num_bytes(slots["uniform"]),
    "allocations": {name: list(part) for name, part in slots.items()},
    "hit_rates": {name: curves.hit_rate(part) for name, part in slots.items()},
    "sizes": curves.sizes.tolist(),
    "curves": np.round(curves.hit_rates, 5).tolist(),
  }


def measure_curves(
  trace: Trace,
  uniform: int,
  step: int,
  expert_sizes: Sequence[int],
  policy: ReplayPolicy,
  rhac: RhacSpec | None = None,
  seed: int = 0,
) -> allocator.Curves:
  """Replays a trace at every size that whole steps from the uniform allocation reach.

  Args:
    trace: its decoded tokens count.
    uniform: slots of each layer.
    step: slots of a step.
    expert_sizes: bytes of one expert of each layer.
    policy, rhac, seed: as in `traces.replay`.

  Raises:
    ValueError: the trace has no decoded tokens.
  """
  decoded = trace.select(trace.phase == Phase.DECODE)
  if not decoded.num_tokens:
    raise ValueError("the trace has no decoded tokens, whose hit rates slots are allocated by")
  top_k, num_experts = (np.asarray(x, np.int64) for x in (trace.top_k, trace.num_experts))
  least, most = int(top_k.min()), int(num_experts.max())
  sizes = np.array(allocator.candidate_sizes(uniform, step, least, most))
  by_layer = np.clip(sizes[:, None], top_k, num_experts)  # what a layer cannot have is not read
  rates = hit_rates(decoded, by_layer, policy, rhac=rhac, seed=seed)
  return allocator.Curves(sizes, rates, np.asarray(expert_sizes), top_k, num_experts)


def allocations(curves: allocator.Curves, uniform: int, step: int) -> dict[str, tuple[int, ...]]:
  """Returns the slots of each layer by every allocator, in the bytes of the uniform allocation."""
  same = (uniform,) * len(curves.expert_bytes)
  budget = curves.num_bytes(same)
  return {
    "uniform": same,
    "heuristic": allocator.allocate_heuristic(curves, uniform, budget, step),
    "exact": allocator.allocate_exact(curves, budget),
  }


def _check_model(trace: Trace, groups: Sequence[ExpertGroup], fingerprint: str) -> None:
  experts, top_k = (
    np.array([getattr(group, name) for group in groups])
    for name in ("num_experts", "num_experts_per_tok")
  )
  if not (np.array_equal(trace.num_experts, experts) and np.array_equal(trace.top_k, top_k)):
    raise ValueError(
      f"the trace has {trace.num_layers} layers of {_words(trace.num_experts)} experts, top "
      f"{_words(trace.top_k)}; the config's model has {len(groups)} of {_words(experts)}, top "
      f"{_words(top_k)}; choose a trace of this model"
    )
  made_of = trace.meta.get("fingerprint", "")
  if made_of and fingerprint and made_of != fingerprint:
    raise ValueError(
      f"the trace is of the weights {made_of[:12]}, the config's model has {fingerprint[:12]}; "
      "choose a trace of this model"
    )


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("trace", None, "trace file of the config's model", flag_values=values)
  flags.DEFINE_enum(
    "allocator",
    "heuristic",
    ["heuristic", "exact"],
    "moves from donors to receivers, or the best of all",
    flag_values=values,
  )
  flags.DEFINE_integer(
    "step", 0, "slots of a step; 0: a fourteenth of the uniform", lower_bound=0, flag_values=values
  )


def _text(result: dict[str, Any]) -> str:
  names, slots = list(result["allocations"]), list(result["allocations"].values())
  layers = [[layer, *row] for layer, row in enumerate(zip(*slots, strict=True))]
  rates = [["hit rate", *result["hit_rates"].values()]]
  tables = [table.render(["MoE layer", *names], layers), table.render(["", *names], rates)]
  return "\n\n".join([*tables, f"allocated: {result['allocator']} (--allocator)"])


def _words(numbers: np.ndarray) -> str:
  return " or ".join(map(str, np.unique(numbers)))
