"""The loop over layers, shared by decode and prefill.

A step is a chain of MoE layers. An approach leads to one: the dense layers before it, its
attention and its router. A transition leads from a layer that has routed to the next that has:
residual loads, prediction and copies for the next layer, experts, the next approach. The copies
start before the experts and are needed after the approach, so that both hide them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from moecore_jax.models.attention.cache import LANES, CacheArrays, LayerCache, Tokens
from moecore_jax.models.attention.indexer import NO_PICK
from moecore_jax.models.experts import ExpertArrays
from moecore_jax.models.hyper import Mix
from moecore_jax.models.router import Routing
from moecore_jax.residency import prefetch as prefetch_lib
from moecore_jax.runtime import ahead as ahead_lib
from moecore_jax.runtime import routed as routed_lib
from moecore_jax.runtime import staging
from moecore_jax.runtime.ahead import Pools
from moecore_jax.runtime.program import Params, Program, Segment, bind_layer
from moecore_jax.runtime.state import DECODE, NO_EXPERT, DecodeState, GroupState, stack_counts
from moecore_jax.specs import LayerSpec, MLASpec


class Ops(NamedTuple):
  """How routed experts are brought in and run; benchmarks compare others than `routed`'s."""

  prepare: Callable[..., tuple[GroupState, routed_lib.Prepared]] = routed_lib.prepare
  execute: Callable[..., tuple[jax.Array, jax.Array]] = routed_lib.execute


ROUTED = Ops()


class Told(NamedTuple):
  """What leaves the program of the routing of one layer, or of all with a leading layer axis; A and
  N are those of the widest layer.

  Attributes:
    topk_ids: uint16 [T, A], chosen experts, NO_EXPERT for none.
    scores: float32 [T, N], selection scores, -inf beyond the layer's experts; None unless the
      program records.
    predicted: uint16 [T, A], what was predicted of the layer, NO_EXPERT for none; None likewise.
  """

  topk_ids: jax.Array
  scores: jax.Array | None
  predicted: jax.Array | None


class Out(NamedTuple):
  """What the layers give.

  Attributes:
    x: stream after the last layer, [B, T, D], with hyper-connections [B, T, n, D] everywhere here.
    kv: the caches of all segments.
    groups: residency of each expert group.
    counters: int32 [MoE layers, len(COUNTERS)] of the step's phase, this step added.
    hits: int32 [B * T], invocations that count as hits.
    told: of the MoE layers.
  """

  x: jax.Array
  kv: tuple[CacheArrays, ...]
  groups: tuple[GroupState, ...]
  counters: jax.Array
  hits: jax.Array
  told: Told


class _Flow(NamedTuple):
  """What passes from layer to layer.

  Attributes:
    x: stream [B, T, D], after the attention of the layer that `inputs` belongs to.
    inputs: of the routed experts of that layer; at the end, those of the last.
    buffer: all experts of that layer where it is staged, else None.
    done: int32 scalars, all 0, known when the layer after each of the last staged layers has routed
      and so its buffer is free; one for each layer buffer, the oldest first; empty where no layer
      is staged.
    groups, counters, hits: as in Out.
  """

  x: jax.Array
  inputs: routed_lib.Inputs
  buffer: ExpertArrays | None
  done: tuple[jax.Array, ...]
  groups: tuple[GroupState, ...]
  counters: jax.Array
  hits: jax.Array


class _Step(NamedTuple):
  """What is the same for all layers of a step."""

  program: Program
  phase: int
  params: Params
  banks: tuple[ExpertArrays, ...]
  tokens: Tokens
  key: jax.Array
  ops: Ops
  staged: tuple[int, ...]
  is_busy: jax.Array

  def stage(
    self,
    s: int | None,
    offset: jax.Array,
    groups: tuple[GroupState, ...],
    done: tuple[jax.Array, ...],
  ) -> ExpertArrays | None:
    """Copies a whole layer, if it is staged, from when the oldest buffer is free."""
    if s not in self.staged:
      return None
    after = done[0]
    segment = self.program.segments[s]
    bank, group = self.banks[segment.group], groups[segment.group]
    index = segment.group_index(offset)
    if self.program.staging.reuses_residents:
      return staging.gather_layer(bank, group, index, after)
    return staging.fetch_layer(bank, index, group.tables.expert_to_slot.shape[1], after)

  def layer(self, s: int, offset: jax.Array, after: Any = ()) -> Any:
    """Returns the module of one layer of a segment.

    Args:
      s: the segment.
      offset: int32 scalar, the layer's place in it.
      after: arrays that a GPU knows before it reads the layer: else XLA would slice and unpack the
        weights of several products, and layers, ahead of them, and hold them all.
    """
    segment, params = self.program.segments[s], self.params["layers"][s]
    params = lax.platform_dependent(
      params,
      after,
      cuda=lambda params, after: lax.optimization_barrier((params, after))[0],
      default=lambda params, _: params,
    )
    if segment.length > 1:
      params = jax.tree.map(lambda p: _as_held(p, offset), params)
    return bind_layer(self.program, segment.layer, params)


Caches = dict[int, CacheArrays]
"""KV caches by segment: those that a part of the step writes; and under PICKS, where layers share
an indexer, the keys that the last one chose."""

PICKS = -1


class _Way(NamedTuple):
  """The way to one MoE layer, or to the end of the stack.

  Attributes:
    dense: segments of dense layers on the way.
    segment: of the MoE layer, None at the end.
  """

  dense: tuple[int, ...]
  segment: int | None

  @property
  def caches(self) -> tuple[int, ...]:
    return self.dense if self.segment is None else (*self.dense, self.segment)


def run_layers(
  program: Program,
  phase: int,
  params: Params,
  banks: tuple[ExpertArrays, ...],
  state: DecodeState,
  x: jax.Array,
  tokens: Tokens,
  ops: Ops = ROUTED,
  staged: tuple[int, ...] = (),
) -> Out:
  """Runs all layers on one step's tokens.

  Args:
    program: static settings.
    phase: state.DECODE or state.PREFILL.
    params: dense parameters, layers keyed by segment.
    banks: stored experts of each group, pinned host memory.
    state: state before the step.
    x: embeddings [B, T, D].
    tokens: where the tokens stand.
    ops: how routed experts run.
    staged: segments whose layers are copied whole.
  """
  is_other = jnp.arange(state.active.shape[0], dtype=jnp.int32) != tokens.row
  is_busy = jnp.any(state.active & is_other)
  step = _Step(program, phase, params, banks, tokens, state.key, ops, staged, is_busy)
  first, *others = _ways(program)
  caches: Caches = dict(enumerate(state.kv))
  caches |= no_picks(program.model.layers, program.engine.context_tokens, tokens)
  done = (jnp.int32(0),) * (program.layer_prefetch.prefetch_step if staged else 0)
  buffer = step.stage(first.segment, jnp.int32(0), state.groups, done)

  def approach(step: _Step, caches: Caches, nothing: Any, x: jax.Array, _: Any):
    caches, x, inputs = _approach(step, first, jnp.int32(0), x, caches)
    return caches, nothing, x, inputs, ()

  written, _, x, inputs, _ = _in_blocks(step, approach, _pick(caches, first.caches), (), x, None)
  caches |= written
  assert first.segment is not None and inputs is not None, "the model has no MoE layer"
  # The second copy follows the first: where it may start early, XLA ends the first early, too.
  done = (*done[:1], *(_once_routed(inputs) for _ in done[1:]))
  hits = jnp.zeros(tokens.valid.size, jnp.int32)
  flow = _Flow(x, inputs, buffer, done, state.groups, state.counters[phase], hits)
  told, spare = [], None
  ends = {way.segment: following for way, following in itertools.pairwise((first, *others))}

  def advance(s: int, offset: jax.Array, way: _Way, next_offset: jax.Array, flow, caches, spare):
    transition = functools.partial(_transition, step, s, offset, way, next_offset)
    after, written = _in_one_turn(transition, flow, _pick(caches, way.caches), spare)
    return after, caches | written, flow.buffer

  for scan in program.scans:
    length = program.segments[scan[0]].length
    if length > 1:
      ways = [_Way((), s) for s in (*scan[1:], scan[0])]
      # A ring of two buffers: each is in its place again after two layers.
      is_ring = _is_ring(step, scan)
      unroll = 2 if is_ring and len(scan) % 2 else 1

      def body(carry, i, scan=scan, ways=ways, is_ring=is_ring):
        (flow, caches, spare), parts = carry, []
        for s, way in zip(scan, ways, strict=True):
          next_offset = i + 1 if s == scan[-1] else i
          parts.append(_tell(program, flow.inputs))
          flow, caches, spare = advance(s, i, way, next_offset, flow, caches, spare)
        told = jax.tree.map(lambda *parts: jnp.stack(parts), *parts)
        return (flow, caches, spare if is_ring else None), told

      spare = _memory_for(flow.buffer, spare) if is_ring else None
      carry = flow, _pick(caches, scan), spare
      offsets = jnp.arange(length - 1, dtype=jnp.int32)
      (flow, written, spare), earlier = lax.scan(body, carry, offsets, unroll=unroll)
      caches |= written
      told.append(jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), earlier))
    last = jnp.int32(length - 1)
    for s in scan:
      told.append(jax.tree.map(lambda x: x[None], _tell(program, flow.inputs)))
      next_offset = jnp.int32(0) if s == scan[-1] else last
      flow, caches, spare = advance(s, last, ends[s], next_offset, flow, caches, spare)
  kv = tuple(caches[i] for i in range(len(program.segments)))
  of_layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *told)
  return Out(flow.x, kv, flow.groups, flow.counters, flow.hits, of_layers)


def _is_ring(step: _Step, scan: Sequence[int]) -> bool:
  """Tells whether all layers of a scan take turns in two buffers of one shape."""
  groups = {step.program.segments[s].group for s in scan}
  num_buffers = step.program.layer_prefetch.prefetch_step
  return num_buffers == 2 and len(groups) == 1 and all(s in step.staged for s in scan)


def _in_one_turn(
  transition: Callable[[_Flow, Caches], tuple[_Flow, Caches]],
  flow: _Flow,
  caches: Caches,
  spare: ExpertArrays | None,
) -> tuple[_Flow, Caches]:
  """Runs a transition, as the body of a loop of one turn where a whole layer arrives in it.

  XLA schedules the body by itself: the copy starts where it starts and ends where it ends. What
  arrives takes the memory of `spare`, the layer before the present one. There is no loop where the
  ring is not of two buffers, or layers differ in shape.
  """
  if len(flow.done) != 2:
    return transition(flow, caches)
  after = jax.eval_shape(transition, flow, caches)
  arriving = after[0].buffer
  before = (flow._replace(buffer=_memory_for(arriving, spare)), caches)
  if arriving is None or not _are_alike(before, after):
    return transition(flow, caches)

  def body(_, carry):
    return transition(carry[0]._replace(buffer=flow.buffer), carry[1])

  return lax.fori_loop(0, 1 + _once_routed(flow.inputs), body, before)


def _memory_for(arriving: ExpertArrays | None, spare: ExpertArrays | None) -> ExpertArrays | None:
  """Returns `spare` if it is such as what arrives, else zeros."""
  if _are_alike(spare, arriving):
    return spare
  return jax.tree.map(lambda rows: jnp.zeros(rows.shape, rows.dtype), arriving)


def _are_alike(a: Any, b: Any) -> bool:
  """Tells whether two trees have the same structure, shapes and dtypes."""
  shapes = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in (a, b)]
  return shapes[0] == shapes[1]


def _ways(program: Program) -> list[_Way]:
  """Returns the way to each MoE segment, and the one from the last to the end."""
  ways, dense = [], []
  for s, segment in enumerate(program.segments):
    dense.append(s)
    if segment.group >= 0:
      ways.append(_Way(tuple(dense[:-1]), s))
      dense = []
  return [*ways, _Way(tuple(dense), None)]


def _pick(caches: Caches, segments: Sequence[int]) -> Caches:
  return {s: caches[s] for s in (*segments, PICKS) if s in caches}


def no_picks(layers: Iterable[LayerSpec], context_tokens: int, tokens: Tokens) -> Caches:
  """Returns the picks before the first layer, nothing where no layer shares an indexer."""
  caches: Caches = {}
  for layer in layers:
    indexer = layer.attention.indexer if isinstance(layer.attention, MLASpec) else None
    if indexer is not None and indexer.is_shared and context_tokens > indexer.topk:
      shape = (*tokens.valid.shape, indexer.topk)
      caches[PICKS] = {"picks": jnp.full(shape, NO_PICK, jnp.int32)}
  return caches


def _tell(program: Program, inputs: routed_lib.Inputs) -> Told:
  """Returns what leaves the program of a layer's routing."""
  groups = program.model.expert_groups
  fan_out, most_experts = (
    max(g.num_experts_per_tok for g in groups),
    max(g.num_experts for g in groups),
  )

  def widen(x, width, fill):
    return jnp.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)

  def as_ids(is_expert, topk_ids):
    ids = jnp.where(is_expert, topk_ids, NO_EXPERT).astype(jnp.uint16)
    return widen(ids, fan_out, NO_EXPERT)

  chosen = as_ids(inputs.valid[:, None], inputs.routing.topk_ids)
  if not program.records:
    return Told(chosen, None, None)
  scores, predicted = inputs.routing.selection_scores, inputs.prediction.topk_ids
  return Told(
    chosen,
    widen(scores, most_experts, -jnp.inf),
    as_ids(predicted < scores.shape[1], predicted),
  )


def _transition(
  step: _Step,
  s: int,
  offset: jax.Array,
  way: _Way,
  next_offset: jax.Array,
  flow: _Flow,
  caches: Caches,
) -> tuple[_Flow, Caches]:
  """Leads from a MoE layer that has routed to the next that has, or to the end.

  Args:
    step: the step.
    s: segment of the layer.
    offset: int32 scalar, its place in the segment.
    way: what follows.
    next_offset: place of the next MoE layer in its segment.
    flow: after the layer's router.
    caches: those that `way` writes.
  """
  program = step.program
  segment = program.segments[s]
  index = segment.group_index(offset)
  moe_index = segment.moe_index(offset)
  group = flow.groups[segment.group]
  before, counts = group.tables, stack_counts({})
  if flow.buffer is not None:
    group, counts = _fill_slots(step, segment, index, flow, group)
  filled = jnp.minimum(jnp.sum(counts), 0)

  def bring(
    step: _Step, group: GroupState, inputs: routed_lib.Inputs
  ) -> tuple[GroupState, routed_lib.Prepared]:
    if flow.buffer is not None:
      # The experts wait: filled later, the buffer would be in the way of the copy after next.
      return group, staging.prepare(before, index, inputs, filled)
    key = jax.random.fold_in(step.key, moe_index)
    bank = step.banks[segment.group]
    return step.ops.prepare(program, step.phase, segment.group, bank, group, index, inputs, key)

  def compute(
    step: _Step, caches: Caches, pool: ExpertArrays, x: jax.Array, inputs, prepared, turn=0
  ) -> tuple[jax.Array, tuple[Caches, jax.Array, Any]]:
    pool = pool if flow.buffer is None else flow.buffer
    y, after = step.ops.execute(program, pool, inputs, prepared)
    # A TPU reads one of stacked layers where it is used, if which one is known neither before the
    # loop around it (turn) nor before the experts have run (after).
    later = lax.platform_dependent(turn + after, tpu=lambda x: x, default=jnp.zeros_like)
    layer = step.layer(s, offset + later, y)
    with jax.named_scope("shared_expert"):
      y = layer.mlp.add_shared(y, inputs.h)
    x = layer.add(x, y.reshape((*x.shape[:2], -1)), inputs.mix)
    return after, _approach(step, way, next_offset + later, x, caches)

  def run_block(step: _Step, caches: Caches, kept: Any, x: jax.Array, inputs: Any):
    group, counts = kept
    group, prepared = bring(step, group, inputs)
    _, (caches, x, following) = compute(step, caches, group.pool, x, inputs, prepared)
    return caches, (group, counts + prepared.counts), x, following, prepared.hits

  ahead, done = None, flow.done
  if _num_blocks(program, flow.x) > 1:  # copies are not worth while: nothing is ahead
    caches, (group, counts), x, inputs, hits = _in_blocks(
      step, run_block, caches, (group, counts), flow.x, flow.inputs
    )
    groups = _replaced(flow.groups, segment.group, group)
  else:
    group, prepared = bring(step, group, flow.inputs)
    counts, hits = counts + prepared.counts, prepared.hits
    groups = _replaced(flow.groups, segment.group, group)
    groups, ahead = _copies_ahead(step, way.segment, next_offset, flow, groups)

    def advance(turn: jax.Array, pools: Pools, caches: Caches):
      return compute(step, caches, pools[segment.group], flow.x, flow.inputs, prepared, turn)

    if ahead is None:
      _, (caches, x, inputs) = advance(jnp.int32(0), {segment.group: group.pool}, caches)
    else:
      pools = {g: groups[g].pool for g in {segment.group, ahead.group}}
      pools, (caches, x, inputs) = ahead_lib.advance_with_copies(
        step.banks, ahead, advance, pools, caches
      )
      for g, pool in pools.items():
        groups = _replaced(groups, g, dataclasses.replace(groups[g], pool=pool))
      inputs = inputs._replace(prediction=ahead.prediction)
  if flow.buffer is not None and inputs is not None:
    done = (*done[1:], _once_routed(inputs))
  buffer = step.stage(way.segment, next_offset, groups, done)
  counters = flow.counters.at[moe_index].add(counts)
  if ahead is not None and program.prefetch.placement == "slot":
    displaced = stack_counts({"evictions": ahead.evictions})
    counters = counters.at[ahead.moe_index].add(displaced)
  return _Flow(
    x,
    flow.inputs if inputs is None else inputs,
    buffer,
    done,
    groups,
    counters,
    flow.hits + hits,
  ), caches


def _fill_slots(
  step: _Step, segment: Segment, index: jax.Array, flow: _Flow, group: GroupState
) -> tuple[GroupState, jax.Array]:
  """Fills the slots of a layer that was staged, if it is asked for.

  Returns:
    The group, and int32 [len(COUNTERS)], what the staging of the layer counts.
  """
  program, buffer = step.program, flow.buffer
  assert buffer is not None, "the layer is not staged"
  streamed = staging.num_streamed(group.tables, index, program.staging.reuses_residents)
  counts = {"staged": streamed}
  if program.staging.fill != "none" and not segment.is_streamed:
    order = staging.warm_order(program, group, index, flow.inputs)
    group, evictions = staging.fill_slots(
      program, segment.group, group, index, buffer, order, step.is_busy
    )
    counts["evictions"] = evictions
  return group, stack_counts(counts)


def _num_blocks(program: Program, x: jax.Array) -> int:
  """Returns in how many blocks of tokens the layers take a stream [B, T, D]."""
  return max(1, x.shape[1] // program.engine.prefill_block_tokens)


def _in_blocks(
  step: _Step,
  run: Callable[..., tuple[Caches, Any, jax.Array, Any, Any]],
  caches: Caches,
  kept: Any,
  x: jax.Array,
  inputs: Any,
) -> tuple[Caches, Any, jax.Array, Any, Any]:
  """Runs a part of a step on one block of its tokens after another.

  Args:
    step: the step.
    run: (step, caches, kept, x, inputs) -> (caches, kept, x, inputs of the next layer, what else
      it says of each token), all of one block's tokens but `caches` and `kept`, which pass from
      block to block.
    caches: those that the part writes.
    kept: what else passes from block to block.
    x: stream [B, T, D].
    inputs: of the layer that has routed, None where there is none.

  Returns:
    What `run` does, of all tokens.
  """
  count, length = _num_blocks(step.program, x), x.shape[1]
  if count == 1:
    return run(step, caches, kept, x, inputs)

  assert length % count == 0, "blocks of tokens are equally long"
  size, names = length // count, ("positions", "valid", "ids")

  def axis(a: Any, num_tokens: int) -> int:  # [T, ..] or, of the one batch row, [1, T, ..]
    return 0 if a.shape[0] == num_tokens else 1

  def cut(a: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(a, i * size, size, axis(a, length))

  def put(a: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, block, i * size, axis(a, length))

  def whole(block: jax.ShapeDtypeStruct) -> jax.Array:
    shape = list(block.shape)
    shape[axis(block, size)] = length
    return jnp.zeros(shape, block.dtype)

  def of_tokens(inputs: routed_lib.Inputs | None) -> tuple[Any, ...]:
    return () if inputs is None else (inputs.h, inputs.routing, inputs.valid, inputs.mix)

  def run_block(i, caches, kept, picks, x, parts):
    of_block = {name: cut(getattr(step.tokens, name), i) for name in names}
    part = step._replace(tokens=step.tokens._replace(**of_block))
    picks, x, parts = jax.tree.map(lambda a: cut(a, i), (picks, x, parts))
    inputs = _unpredicted(*parts) if parts else None
    caches, kept, x, inputs, others = run(part, caches | picks, kept, x, inputs)
    picks = _pick(caches, ())
    caches = {s: caches[s] for s in caches if s not in picks}
    return caches, kept, picks, x, of_tokens(inputs), others

  given, picks = of_tokens(inputs), _pick(caches, ())
  caches = {s: caches[s] for s in caches if s not in picks}
  results = jax.eval_shape(run_block, jnp.int32(0), caches, kept, picks, x, given)
  parts, others = jax.tree.map(whole, results[-2:])
  is_in_place = _are_alike(given, parts)  # else the next layer routes otherwise, or is the first

  def body(i, carry):
    caches, kept, *wholes = carry
    picks, x, parts, _ = wholes
    result = run_block(i, caches, kept, picks, x, parts if is_in_place else given)
    caches, kept, *blocks = result
    return caches, kept, *jax.tree.map(lambda a, block: put(a, block, i), wholes, blocks)

  carry = caches, kept, picks, x, given if is_in_place else parts, others
  caches, kept, picks, x, parts, others = lax.fori_loop(0, count, body, carry)
  return caches | picks, kept, x, _unpredicted(*parts) if parts else None, others


def _unpredicted(
  h: jax.Array, routing: Routing, valid: jax.Array, mix: Mix | None
) -> routed_lib.Inputs:
  """Returns the inputs of a layer that nothing was predicted of."""
  nothing = prefetch_lib.no_prediction(routing.topk_ids, routing.selection_scores.shape[1])
  return routed_lib.Inputs(h, routing, valid, nothing, mix)


def _copies_ahead(
  step: _Step, s: int | None, offset: jax.Array, flow: _Flow, groups: tuple[GroupState, ...]
) -> tuple[tuple[GroupState, ...], ahead_lib.Ahead | None]:
  """Returns what is copied for the layer at `offset` of segment `s` while the present one runs."""
  program = step.program
  if s is None or not program.segments[s].prefetch_count:
    return groups, None
  segment, valid = program.segments[s], flow.inputs.valid
  group = groups[segment.group]
  if step.phase != DECODE:
    if s in step.staged or not program.warm_starts:
      return groups, None
    ahead = ahead_lib.warm_ahead(program, segment, offset, group, valid, step.is_busy)
    return groups, ahead
  layer, h = step.layer(s, offset), flow.inputs.h
  if program.prefetch.predictor_input == "renorm":
    h = layer.mlp_input(flow.x)[0].reshape(h.shape)
  with jax.named_scope("predictor"):
    routing = layer.mlp.router(h, step.tokens.ids.reshape(-1))
  group, ahead = ahead_lib.look_ahead(program, segment, offset, group, routing, valid, step.key)
  return _replaced(groups, segment.group, group), ahead


def _approach(
  step: _Step, way: _Way, offset: jax.Array, x: jax.Array, caches: Caches
) -> tuple[Caches, jax.Array, routed_lib.Inputs | None]:
  """Runs the dense layers on a way, then the attention and the router of its MoE layer.

  Args:
    step: the step.
    way: where to go.
    offset: int32 scalar, place of the MoE layer in its segment.
    x: stream [B, T, D].
    caches: of `way.caches`.

  Returns:
    The caches, the stream, and the inputs of the MoE layer's experts, None at the end.
  """
  block = step.program.engine.kv_block_tokens
  for s in way.dense:
    first = jnp.int32(0)
    layer = step.layer(s, first, x)
    x, caches = attend(layer, first, x, caches, s, step.tokens, block)
    h, mix = layer.mlp_input(x)
    x = layer.add(x, layer.mlp(h), mix)
  if way.segment is None:
    return caches, x, None
  layer = step.layer(way.segment, offset, x)
  x, caches = attend(layer, offset, x, caches, way.segment, step.tokens, block)
  h, mix = layer.mlp_input(x)
  flat = h.reshape(-1, h.shape[-1])  # one of B and T is 1: the order is (position, row)
  with jax.named_scope("router"):
    routing = layer.mlp.router(flat, step.tokens.ids.reshape(-1))
  valid = step.tokens.valid.reshape(-1)
  return caches, x, _unpredicted(flat, routing, valid, mix)


def attend(
  layer: Any,
  offset: jax.Array,
  x: jax.Array,
  caches: Caches,
  segment: int,
  tokens: Tokens,
  block: int,
) -> tuple[jax.Array, Caches]:
  """Runs the attention of one layer over its caches.

  Args:
    layer: a DecoderLayer.
    offset: int32 scalar, its place in the caches.
    x: stream [B, T, D].
    caches: with those of the segment.
    segment: the layer's.
    tokens: where the tokens stand.
    block: tokens of one block of the attention loop.

  Returns:
    The stream after it, and the caches with the tokens' rows.
  """
  with jax.named_scope("attention"):
    picks = caches.get(PICKS, {}).get("picks")
    cache = LayerCache(caches[segment], offset, tokens, picks)
    h, mix = layer.attention_input(x)
    y, cache = layer.attention.attend(h, cache, block)
    caches = caches | {segment: cache.arrays}
    if picks is not None and cache.picks is not None:
      caches[PICKS] = {"picks": cache.picks}
    return layer.add(x, y, mix), caches


def _as_held(stacked: jax.Array, offset: jax.Array) -> jax.Array:
  """Returns one of stacked arrays in the layout that they are held in: XLA would copy all of them
  to give it the layout of an integer product."""
  one = lax.dynamic_index_in_dim(stacked, offset, 0, keepdims=False)
  axes = tuple(range(one.ndim))

  def as_given(x, axes=axes):
    return with_layout_constraint(x, Layout(axes))

  if one.ndim < 2 or one.shape[-1] % LANES == 0:
    return as_given(one)
  # A TPU holds arguments whose rows do not fill its lanes column-major.
  columns = (*axes[:-2], axes[-1], axes[-2])
  return lax.platform_dependent(one, tpu=lambda x: as_given(x, columns), default=as_given)


def _once_routed(inputs: routed_lib.Inputs) -> jax.Array:
  """Returns int32 [], always 0, but known only when a layer has routed."""
  return jnp.minimum(inputs.routing.topk_ids[0, 0], 0)


def _replaced(groups: tuple[GroupState, ...], g: int, group: GroupState) -> tuple[GroupState, ...]:
  return (*groups[:g], group, *groups[g + 1 :])
