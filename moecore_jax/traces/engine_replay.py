"""The engine's own steps again: a recorded trace through the functions of `residency` as the
compiled programs use them, batch rows and prefill chunks included, without weights.

The counters equal those of the engine that recorded the trace, which is what makes figures of a
replay figures of the engine.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moecore_jax import residency as residency_lib
from moecore_jax.residency import policy as policies
from moecore_jax.residency.base import Policy, PolicyState
from moecore_jax.specs import PolicyName, ResidencySpec, RhacSpec
from moecore_jax.traces.trace import EventKind, Phase, Trace, layer_groups

NAMES = ("invocations", "hits", "misses", "evictions")
_RUN_STEPS = {Phase.PREFILL: 1, Phase.DECODE: 32}  # of one call; shorter runs are padded


class Layer(NamedTuple):
  """Residency of one layer: the tables of a group of one, and the policy's signals."""

  tables: residency_lib.SlotTables
  signals: PolicyState


class Steps(NamedTuple):
  """Steps of one phase, each of up to W tokens.

  Attributes:
    topk_ids: int32 [S, L, W, A], in the order (position, row).
    scores: float32 [S, L, W, N], None where the policy reads none.
    valid: bool [S, W].
    keys: uint32 [S, 2], the random key that the layers of each step share.
  """

  topk_ids: np.ndarray
  scores: np.ndarray | None
  valid: np.ndarray
  keys: np.ndarray


class _Setting(NamedTuple):
  """Static part of the program of layers with equal experts and fan-out."""

  policy: PolicyName
  rhac: RhacSpec
  num_experts: int
  top_k: int
  max_slots: int

  def make_policy(self) -> Policy:
    return policies.make_policy(self.policy, self.rhac)


class _Call(NamedTuple):
  """One step: its call number, its phase, its tokens in order, and whether the cache was emptied
  before it."""

  number: int
  phase: Phase
  tokens: np.ndarray
  is_reset: bool


def cold_layer(policy: Policy, num_experts: int, num_slots: int, max_slots: int) -> Layer:
  """Returns a layer with empty slots; its shapes depend on `max_slots` alone, the most that any
  layer has."""
  tables = residency_lib.init_tables(num_experts, (num_slots,), max_slots)
  rows = jnp.full(2 * max_slots, -1, jnp.int32)
  return Layer(dataclasses.replace(tables, slot_to_expert=rows), policy.init(num_experts))


def run_step(
  policy: Policy,
  phase: Phase,
  layer: Layer,
  max_slots: int,
  topk_ids: jax.Array,
  scores: jax.Array,
  valid: jax.Array,
  key: jax.Array,
) -> tuple[Layer, jax.Array, jax.Array]:
  """Runs the tokens of one step through a layer, in the order of the compiled programs.

  Args:
    policy: replacement policy.
    phase: decode observes and decides; in prefill signals rest, and warm rank or recency decides.
    layer: before the step.
    max_slots: width of its slice of the slot table.
    topk_ids: int32 [W, A], ids outside 0..N-1 are none.
    scores: float32 [W, N].
    valid: bool [W].
    key: random key of this layer and step.

  Returns:
    The layer after the step, int32 [4] counts as in NAMES, and int32 [W] hits of each token.

  Source: SPEC section 5.
  """
  tables, signals = layer
  num_experts = scores.shape[1]
  index = jnp.int32(0)
  topk_ids = jnp.where(valid[:, None], topk_ids, num_experts)
  if phase == Phase.DECODE:
    signals = policy.observe(signals, topk_ids, scores, valid)
  resident = residency_lib.resident(tables, index)
  plan = residency_lib.plan_step(topk_ids, valid, resident, tables.num_slots[0], policy.evicts)
  is_choice = valid[:, None] & (topk_ids < num_experts)
  hits = jnp.sum(
    resident[jnp.minimum(topk_ids, num_experts - 1)] & is_choice, axis=1, dtype=jnp.int32
  )
  held = residency_lib.protected(plan) if policy.evicts else jnp.ones(num_experts, bool)

  def load(i, carry):
    (tables, signals), evictions = carry
    expert = plan.order[i]
    if phase == Phase.DECODE:
      priority = policy.priority(signals, jax.random.fold_in(key, i))
    else:
      priority = residency_lib.prefill_priority(tables, index)
    slot, evicted = residency_lib.choose_slot(tables, index, priority, held, max_slots)
    placed = policy.placed(signals, expert)
    signals = jax.tree.map(lambda new, old: jnp.where(slot < 0, old, new), placed, signals)
    tables = residency_lib.place(tables, index, expert, slot)
    return Layer(tables, signals), evictions + (evicted >= 0).astype(jnp.int32)

  def load_early(i, carry):
    absent = carry[0].tables.expert_to_slot[0, plan.order[i]] < 0
    return lax.fori_loop(0, absent.astype(jnp.int32), lambda _, c: load(i, c), carry)

  carry = Layer(tables, signals), jnp.int32(0)
  carry = lax.fori_loop(0, plan.num_early, load_early, carry)
  first = jnp.maximum(plan.num_early, plan.num_resident)
  end = plan.num_experts if policy.evicts else first
  (tables, signals), evictions = lax.fori_loop(first, end, load, carry)
  tables = residency_lib.touch(tables, index, plan.order)
  counts = (
    jnp.sum(is_choice, dtype=jnp.int32),
    jnp.sum(hits, dtype=jnp.int32),
    plan.num_experts - plan.num_resident,
    evictions,
  )
  return Layer(tables, signals), jnp.stack(counts), hits


def replay_counters(
  trace: Trace, residency: ResidencySpec | None = None, seed: int | None = None
) -> dict[str, np.ndarray]:
  """Replays a recorded trace, step by step, from an engine's cold start.

  Args:
    trace: the trace; its reset events empty the cache.
    residency: the policy and its slots; those of the trace by default.
    seed: of the engine's random key; that of the trace, else 0, by default.

  Returns:
    int64 [L] each under the names of `Engine.counters`: {"decode", "prefill"}_{"invocations",
    "hits", "misses", "evictions", "moved_bytes"}.

  Raises:
    ValueError: there are no settings, they do not fit the trace, or the engine did more than load
      on demand: warm starts, staging, drafts, prefetch, substitution.
  """
  residency = residency or trace.residency
  if residency is None:
    raise ValueError("the trace tells no residency settings, expected some; give them")
  _check(trace, residency)
  calls = _calls(trace)
  keys = _layer_keys((trace.seed or 0) if seed is None else seed, calls[-1].number if calls else 0)
  totals = np.zeros((len(Phase), trace.num_layers, len(NAMES)), np.int64)
  for layers in layer_groups(trace):
    slots = [residency.slots[layer] for layer in layers]
    num_experts, top_k = int(trace.num_experts[layers[0]]), int(trace.top_k[layers[0]])
    setting = _Setting(residency.policy, residency.rhac, num_experts, top_k, max(slots))
    cold = state = _stack([_cold_layer(setting, count) for count in slots])
    for run in _runs(calls):
      phase = run[0].phase
      state = cold if run[0].is_reset else state
      width = max(len(call.tokens) for call in calls if call.phase == phase)
      steps = _steps(trace, setting, layers, run, width, keys)
      state, counts = _run_steps(setting, phase, state, np.int32(layers), steps)
      totals[phase][layers] += np.asarray(counts)
  figures = {
    f"{phase.name.lower()}_{name}": totals[phase, :, c]
    for phase in (Phase.DECODE, Phase.PREFILL)
    for c, name in enumerate(NAMES)
  }
  for phase in ("decode", "prefill"):
    figures[f"{phase}_moved_bytes"] = figures[f"{phase}_misses"] * trace.expert_bytes
  return figures


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_steps(
  setting: _Setting, phase: Phase, layers: Layer, indices: jax.Array, steps: Steps
) -> tuple[Layer, jax.Array]:
  """Runs steps: `layers` with a leading axis L, indices int32 [L] of them among all MoE layers.

  Returns:
    The layers after the steps, and int32 [L, 4] counts.
  """
  policy = setting.make_policy()

  def run_layer(index, layer, topk_ids, scores, valid, key):
    if scores is None:
      scores = jnp.zeros((len(valid), setting.num_experts), jnp.float32)
    key = jax.random.fold_in(key, index)
    layer, counts, _ = run_step(
      policy, phase, layer, setting.max_slots, topk_ids, scores, valid, key
    )
    return layer, counts

  def body(carry, step):
    layers, total = carry
    over_layers = jax.vmap(run_layer, in_axes=(0, 0, 0, 0, None, None))
    layers, counts = over_layers(indices, layers, step.topk_ids, step.scores, step.valid, step.keys)
    return (layers, total + counts), None

  start = layers, jnp.zeros((len(indices), len(NAMES)), jnp.int32)
  return lax.scan(body, start, steps)[0]


def _calls(trace: Trace) -> list[_Call]:
  """Returns the steps in the order in which the engine ran them."""
  sequence = np.searchsorted(trace.sequence_offsets, np.arange(trace.num_tokens), side="right")
  begins = np.append(True, (np.diff(sequence) != 0) | (np.diff(trace.step) != 0))[: len(sequence)]
  index = np.arange(trace.num_tokens)
  place = index - np.maximum.accumulate(np.where(begins, index, 0))  # within (sequence, step)
  order = np.lexsort((trace.row, place, trace.step))
  numbers, starts = np.unique(trace.step[order], return_index=True)
  resets = []
  if trace.events is not None:
    resets = trace.events.step[trace.events.kind == EventKind.RESET]
  reset_calls = set(np.searchsorted(numbers, resets).tolist())  # the first call at or after each
  return [
    _Call(int(number), Phase(trace.phase[tokens[0]]), tokens, i in reset_calls)
    for i, (number, tokens) in enumerate(
      zip(numbers, np.split(order, starts[1:]) if len(starts) else [], strict=True)
    )
  ]


def _runs(calls: list[_Call]) -> Iterator[list[_Call]]:
  """Yields consecutive calls of one phase without a reset among them."""
  run: list[_Call] = []
  for call in calls:
    if run and (call.is_reset or call.phase != run[0].phase or len(run) == _RUN_STEPS[call.phase]):
      yield run
      run = []
    run.append(call)
  if run:
    yield run


def _steps(
  trace: Trace,
  setting: _Setting,
  layers: np.ndarray,
  run: list[_Call],
  width: int,
  keys: np.ndarray,
) -> Steps:
  """Returns a run as arrays, padded to a fixed number of steps of `width` tokens."""
  length = _RUN_STEPS[run[0].phase]
  token = np.zeros((length, width), np.int64)
  valid = np.zeros((length, width), bool)
  step_keys = np.zeros((length, 2), np.uint32)
  for i, call in enumerate(run):
    token[i, : len(call.tokens)] = call.tokens
    valid[i, : len(call.tokens)] = True
    step_keys[i] = keys[call.number]
  topk_ids = trace.experts[:, layers, : setting.top_k][token].swapaxes(1, 2).astype(np.int32)
  scores = None
  if setting.rhac.score_weight and setting.policy == "rhac" and trace.scores is not None:
    scores = trace.scores[:, layers, : setting.num_experts][token].swapaxes(1, 2)
  return Steps(topk_ids, scores, valid, step_keys)


def _cold_layer(setting: _Setting, num_slots: int) -> Layer:
  return cold_layer(setting.make_policy(), setting.num_experts, num_slots, setting.max_slots)


def _stack(layers: list[Layer]) -> Layer:
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def _layer_keys(seed: int, last_call: int) -> np.ndarray:
  """Returns the key that each call gives to its layers, uint32 [calls, 2], as the programs split
  it."""

  def split(key, _):
    key, _, layer_key = jax.random.split(key, 3)
    return key, layer_key

  return np.asarray(lax.scan(split, jax.random.PRNGKey(seed), length=last_call + 1)[1])


def _check(trace: Trace, residency: ResidencySpec) -> None:
  if len(residency.slots) != trace.num_layers:
    raise ValueError(f"slots has {len(residency.slots)} numbers, expected {trace.num_layers}")
  kinds = [] if trace.events is None else trace.events.kind
  beyond = {
    "prefetch": residency.prefetch.max_experts > 0,
    "substitution": residency.substitution_threshold > 0,
    "drafts": trace.accepted is not None and not trace.accepted.all(),
    "staging": trace.staged is not None and trace.staged.any(),
    "warm starts": EventKind.WARM_START in kinds,
  }
  used = [name for name, is_used in beyond.items() if is_used]
  if used:
    raise ValueError(
      f"the run used {', '.join(used)}, expected loads on demand alone; record without"
    )
  reads_scores = residency.policy == "rhac" and residency.rhac.score_weight > 0
  if reads_scores and trace.scores is None:
    raise ValueError("the trace has no scores, which score_weight > 0 needs; record them, or set 0")
