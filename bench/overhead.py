"""What residency costs a decode step whose experts are all on the device, and what a call costs the
host.

    python -m bench.overhead --json=/tmp/overhead.json

`step` is the decode step with every expert resident: tables are read and written, the policy
observes, loops over loads turn zero times. `bound` is the same program without tables, policy and
loads: an expert's number is its row of the pool. Layer loop, attention, expert code, sampling and
donation are the same, and so are the tokens; both run in turns, and medians are compared. `ratio`
is step over bound: 1.10 is allowed where experts have at least 1 MB.

`dispatch_us` is the time that a call of the step takes the host while nothing else is queued,
before the device is done: 200 are allowed for the demo model. Where the device is the host's own
processors they share them: `dispatch_alone_us` is of a program with the same arrays, donated and
returned, that computes nothing.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from bench import command
from bench.aot_row import machine, versions
from moecore_jax import families, memory
from moecore_jax.config_loading import load_config
from moecore_jax.models import experts as experts_lib
from moecore_jax.residency.slots import SlotTables
from moecore_jax.runtime import routed, stack
from moecore_jax.runtime.decode import jit_decode_step
from moecore_jax.runtime.state import COUNTERS, DecodeState, GroupState
from moecore_jax.specs import (
  DenseSpec,
  EngineSpec,
  LayerSpec,
  MLASpec,
  ModelSpec,
  MoESpec,
  ResidencySpec,
  RopeSpec,
  RouterSpec,
)
from moecore_jax.testing.tiny import make_engine, random_model

RATIO_BOUND, DISPATCH_BOUND_US = 1.10, 200.0
_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def prepare_without_residency(
  program, phase, group_index, bank, group: GroupState, index, inputs: routed.Inputs, key
) -> tuple[GroupState, routed.Prepared]:
  """Finds the experts of one layer in a pool that holds the whole bank in its order.

  Takes and gives what `routed.prepare` does; counts and hits are zero.
  """
  num_experts = group.tables.expert_to_slot.shape[1]
  topk_ids = jnp.where(inputs.valid[:, None], inputs.routing.topk_ids, num_experts)
  order, count = _distinct(topk_ids, num_experts)
  return group, routed.Prepared(
    topk_ids,
    order,
    index * num_experts + order,
    jnp.int32(0),
    count,
    jnp.zeros((*topk_ids.shape, inputs.h.shape[1]), inputs.h.dtype),
    jnp.zeros(len(COUNTERS), jnp.int32),
    jnp.zeros(inputs.h.shape[0], jnp.int32),
  )


def _distinct(topk_ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """Returns the distinct experts among int32 [T, A] and their number; one token's are distinct."""
  if topk_ids.shape[0] == 1:
    return topk_ids[0], jnp.sum(topk_ids[0] < num_experts, dtype=jnp.int32)
  is_chosen = jnp.zeros(num_experts, bool).at[topk_ids].set(True, mode="drop")
  order = jnp.nonzero(is_chosen, size=min(topk_ids.size, num_experts), fill_value=num_experts)[0]
  return order.astype(jnp.int32), jnp.sum(is_chosen, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
  """A model with random weights and the engine that runs it, every expert on the device."""

  name: str
  model: ModelSpec
  engine: EngineSpec

  @property
  def residency(self) -> ResidencySpec:
    groups = self.model.expert_groups
    slots = {layer: group.num_experts for group in groups for layer in group.layers}
    return ResidencySpec("rhac", tuple(slots[layer] for layer in self.model.moe_layers))

  @property
  def expert_bytes(self) -> int:
    """Bytes of the largest expert as the engine stores it."""
    layouts = [
      experts_lib.bank_layout(g, self.engine.expert_format) for g in self.model.expert_groups
    ]
    return max(sum(memory.num_bytes(s[1:], d) for s, d in layout.values()) for layout in layouts)


def large_experts(layer_loop: str) -> Case:
  """Returns a model of 8 MoE layers whose experts have 2.4 MB."""
  attention = MLASpec(8, None, 128, 64, 32, 64, RopeSpec(32))
  moe = MoESpec(RouterSpec(16, 4, norm_topk=True), expert_dim=384, shared_dim=384)
  layers = (LayerSpec(attention, DenseSpec(1024)),) + (LayerSpec(attention, moe),) * 8
  model = ModelSpec("deepseek_v3", 2048, 512, layers, max_context_tokens=4096)
  engine = EngineSpec(context_tokens=4096, layer_loop=layer_loop)
  return Case(f"8 x 16 experts of 2.4 MB, top-4, {layer_loop}", model, engine)


def demo() -> Case:
  """Returns the demo model's shapes in the demo's engine."""
  published = load_config(str(_CONFIGS / "demo_train.py")).model.published_config
  model = dataclasses.replace(families.model_spec(published), eos_token_ids=(), mtp_layers=())
  config = load_config(str(_CONFIGS / "demo.py"))
  config.engine.context_tokens = model.max_context_tokens
  _, engine, _ = config.freeze(model)
  return Case("demo model", model, engine)


class Contest:
  """The step and its bound on one model, from equal states."""

  def __init__(self, case: Case, steps: int):
    self._engine = make_engine(random_model(case.model, case.engine), case.residency, case.engine)
    self.functions = {
      "step": stack.ROUTED,
      "bound": stack.Ops(prepare=prepare_without_residency),
    }
    start = self._resident_state()
    self._states = {name: jax.tree.map(jnp.copy, start) for name in (*self.functions, "nothing")}
    self._steps = steps

  def _resident_state(self) -> DecodeState:
    """Returns a state with every expert in the row of its number and every row decoding."""
    state, engine = self._engine.state, self._engine
    groups = tuple(
      dataclasses.replace(
        group,
        pool=_as_pool(bank),
        tables=_full_tables(group.tables),
      )
      for group, bank in zip(state.groups, engine.banks, strict=True)
    )
    return dataclasses.replace(
      state,
      groups=groups,
      token=jnp.arange(len(state.token), dtype=jnp.int32),
      remaining=jnp.full_like(state.remaining, 1 << 30),
      active=jnp.ones_like(state.active),
    )

  def call(self, name: str) -> Any:
    """Queues one step of `name`; returns its output."""
    engine = self._engine
    self._states[name], out = jit_decode_step()(
      engine.program, engine.params, engine.banks, self._states[name], self.functions[name]
    )
    return out

  def check(self) -> None:
    """Runs both once.

    Raises:
      RuntimeError: they differ, or an expert was loaded.
    """
    ours, theirs = (self.call(name) for name in self.functions)
    misses = int(self._states["step"].counters[0, :, 2].sum())
    if misses or not np.array_equal(ours.logits, theirs.logits):
      raise RuntimeError(f"step and bound do not compute the same: {misses} misses")

  def time_steps(self, name: str) -> float:
    """Returns milliseconds a step, over several queued one after another."""
    jax.block_until_ready(self._states[name])
    start = time.perf_counter()
    for _ in range(self._steps):
      out = self.call(name)
    jax.block_until_ready(out)
    return 1e3 * (time.perf_counter() - start) / self._steps

  def compute_nothing(self) -> None:
    """Queues a program that takes and gives what the step does but its output."""
    self._states["nothing"] = _same(
      self._engine.params, self._engine.banks, self._states["nothing"]
    )

  def time_dispatch(self) -> tuple[float, float]:
    """Returns microseconds that a call takes the host with nothing queued: of the step, and of the
    program that computes nothing.
    """
    times = []
    for call in (lambda: self.call("step"), self.compute_nothing):
      jax.block_until_ready(self._states)
      start = time.perf_counter()
      call()
      times.append(1e6 * (time.perf_counter() - start))
    return times[0], times[1]


@functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
def _same(params: Any, banks: Any, state: DecodeState) -> DecodeState:
  del params, banks
  return dataclasses.replace(state, counters=state.counters + 1)


def _as_pool(bank: experts_lib.ExpertArrays) -> experts_lib.ExpertArrays:
  """Returns the bank and one transient row, on the device."""
  device = memory.placement("device")
  rows = {name: jax.device_put(np.asarray(array), device) for name, array in bank.items()}
  return {name: jnp.concatenate([array, jnp.zeros_like(array[:1])]) for name, array in rows.items()}


def _full_tables(tables: SlotTables) -> SlotTables:
  layers, num_experts = tables.expert_to_slot.shape
  rows = jnp.arange(layers * num_experts, dtype=jnp.int32)
  return dataclasses.replace(
    tables,
    expert_to_slot=rows.reshape(layers, num_experts),
    slot_to_expert=tables.slot_to_expert.at[: len(rows)].set(rows % num_experts),
  )


def measure(case: Case, rounds: int, steps: int) -> dict[str, Any]:
  """Measures one case; returns its row."""
  contest = Contest(case, steps)
  contest.check()
  times: dict[str, list[float]] = {name: [] for name in contest.functions}
  for turn in range(rounds + 1):
    for name in sorted(times, reverse=turn % 2 == 1):
      times[name].append(contest.time_steps(name))
  dispatch = np.array([contest.time_dispatch() for _ in range(rounds * 10 + 1)])[1:]  # warm
  step, bound = (float(np.median(times[name][1:])) for name in ("step", "bound"))  # warm
  return {
    "case": case.name,
    "layer_loop": case.engine.layer_loop,
    "batch_size": case.engine.batch_size,
    "dtype": case.engine.dtype,
    "expert_bytes": case.expert_bytes,
    "step_ms": round(step, 4),
    "bound_ms": round(bound, 4),
    "ratio": round(step / bound, 4),
    "ratio_of_fastest": round(min(times["step"]) / min(times["bound"]), 4),
    "dispatch_us": round(float(np.median(dispatch[:, 0])), 1),
    "dispatch_fastest_us": round(float(dispatch[:, 0].min()), 1),
    "dispatch_alone_us": round(float(np.median(dispatch[:, 1])), 1),
    "rounds": rounds,
    "steps_per_round": steps,
    "backend": jax.default_backend(),
    "versions": versions(),
    "machine": machine(),
  }


def measure_all(values: flags.FlagValues) -> Iterator[dict[str, Any]]:
  """Measures all cases; yields their rows."""
  for case in (large_experts("unrolled"), large_experts("scanned"), demo()):
    row = measure(case, values["rounds"].value, values["steps"].value)
    print(
      f"{row['case']:<42} batch {row['batch_size']}  step {row['step_ms']:.3f} ms  "
      f"bound {row['bound_ms']:.3f} ms  ratio {row['ratio']:.3f}  "
      f"dispatch {row['dispatch_us']:.0f} us, alone {row['dispatch_alone_us']:.0f} us",
      flush=True,
    )
    yield row
  print(
    f"allowed: ratio {RATIO_BOUND} with experts of at least 1 MB, dispatch {DISPATCH_BOUND_US} us"
  )


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_integer("rounds", 15, "turns of each program", lower_bound=1, flag_values=values)
  flags.DEFINE_integer("steps", 20, "steps of a turn", lower_bound=1, flag_values=values)


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  return command.run("bench.overhead", __doc__, argv, measure_all, _define)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
