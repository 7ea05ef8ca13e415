"""What a compiled program is specialised on, and how plain parameter trees become modules inside
its trace.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from moecore_jax.models import hyper
from moecore_jax.models.layers import linear, rms_norm
from moecore_jax.models.quantized import quantize_module
from moecore_jax.models.transformer import DecoderLayer
from moecore_jax.residency import policy as policies
from moecore_jax.specs import (
  EngineSpec,
  LayerPrefetchSpec,
  LayerSpec,
  ModelSpec,
  MoESpec,
  PolicyName,
  PrefetchSpec,
  ResidencySpec,
  RhacSpec,
  StagingSpec,
)

Params = dict[str, Any]
"""Dense parameters: the pure dict of a Transformer's state without its expert banks; `layers` is
keyed by segment.
"""

ModuleT = TypeVar("ModuleT", bound=nnx.Module)

_MAX_PERIOD = 8  # kinds of layers that one scan runs; each is traced once more


@dataclasses.dataclass(frozen=True)
class Segment:
  """Layers that one trace of the layer function serves: one layer, or several equal MoE layers that
  are scanned.

  Where layers of different kinds take turns, such as those of local and of full attention, one scan
  runs as many segments: each has every `period`th layer, and they follow one another.

  Attributes:
    start: index of the first layer in ModelSpec.layers.
    length: number of layers.
    layer: their spec.
    moe_start: index of the first layer among the MoE layers, -1 for dense ones.
    group: index of the expert group, -1 for dense layers.
    group_start: index of the first layer within the group.
    prefetch_count: experts that are copied ahead for each of the layers when any are.
    is_streamed: the layers are copied whole in every step.
    period: segments that one scan runs.
    group_period: layers of the group from one of the segment to its next.
  """

  start: int
  length: int
  layer: LayerSpec
  moe_start: int = -1
  group: int = -1
  group_start: int = -1
  prefetch_count: int = 0
  is_streamed: bool = False
  period: int = 1
  group_period: int = 1

  @property
  def layers(self) -> range:
    """Indices of the layers in ModelSpec.layers."""
    return range(self.start, self.start + self.length * self.period, self.period)

  @property
  def moe_indices(self) -> range:
    """Indices of the layers among the MoE layers."""
    return range(self.moe_start, self.moe_start + self.length * self.period, self.period)

  def moe_index(self, offset: jax.Array) -> jax.Array:
    """Returns int32 [], the index of the layer at `offset` among the MoE layers."""
    return self.moe_start + offset * self.period

  def group_index(self, offset: jax.Array) -> jax.Array:
    """Returns int32 [], the index of the layer at `offset` within the group."""
    return self.group_start + offset * self.group_period


@dataclasses.dataclass(frozen=True)
class Program:
  """Static part of the compiled programs; equal programs share one compilation.

  Slots of single layers are not in it: they are traced, and one program serves every allocation of
  the same total.

  Attributes:
    model: the model.
    engine: shapes and formats.
    policy: replacement policy.
    rhac: settings of the policy rhac.
    max_slots: for each expert group, the largest number of slots of a layer.
    prefetch: copies ahead of the routing.
    substitution_threshold: alpha of approximate substitution; 0 is exact.
    staging: how prefill brings in the layers of long prompts.
    layer_prefetch: which layers are streamed, and how many layers are buffered.
    records: calls give selection scores and predictions, too.
    warm_starts: admissions rank the experts by the profile of the request's domain.
  """

  model: ModelSpec
  engine: EngineSpec
  policy: PolicyName
  rhac: RhacSpec
  max_slots: tuple[int, ...]
  prefetch: PrefetchSpec
  substitution_threshold: float
  staging: StagingSpec
  layer_prefetch: LayerPrefetchSpec
  records: bool = False
  warm_starts: bool = False

  def __hash__(self) -> int:
    return self._hash  # taken at every dispatch, so not worked out anew

  @functools.cached_property
  def _hash(self) -> int:
    return hash(dataclasses.astuple(self))

  @property
  def dtype(self) -> jnp.dtype:
    return jnp.dtype(self.engine.dtype)

  def make_policy(self) -> policies.Policy:
    return policies.make_policy(self.policy, self.rhac)

  def prefetch_count(self, layer: int) -> int:
    """Returns n_l, how many experts are copied ahead for a layer when any are; the first MoE layer
    has no prediction, and none is made where whole layers are streamed.
    """
    moe_layers, prefetch = self.model.moe_layers, self.prefetch
    mlp = self.model.layers[layer].mlp
    if layer == moe_layers[0] or not isinstance(mlp, MoESpec) or self.layer_prefetch.group_layers:
      return 0
    count = min(prefetch.max_experts, mlp.router.num_experts_per_tok)
    if prefetch.link_experts:
      count = min(count, prefetch.link_experts[moe_layers.index(layer)])
    return count

  @functools.cached_property
  def segments(self) -> tuple[Segment, ...]:
    """The layers in order, cut as `engine.layer_loop` says."""
    model, cuts = self.model, []
    for i, layer in enumerate(model.layers):
      cut = Segment(i, 1, layer)
      if isinstance(layer.mlp, MoESpec):
        moe_index, count = model.moe_layers.index(i), self.prefetch_count(i)
        streams = self.layer_prefetch.streams(moe_index)
        cut = Segment(i, 1, layer, moe_index, *model.group_of(i), count, streams)
      cuts.append(cut)
    return _scanned(cuts) if self.engine.layer_loop == "scanned" else tuple(cuts)

  @property
  def scans(self) -> tuple[range, ...]:
    """Segments of MoE layers, those that one scan runs together."""
    scans, s = [], 0
    while s < len(self.segments):
      period = self.segments[s].period
      if self.segments[s].group >= 0:
        scans.append(range(s, s + period))
      s += period
    return tuple(scans)

  @property
  def streamed(self) -> tuple[int, ...]:
    """Segments whose layers are copied whole in every step."""
    return tuple(s for s, segment in enumerate(self.segments) if segment.is_streamed)


def _scanned(cuts: list[Segment]) -> tuple[Segment, ...]:
  """Joins segments of one layer each, in order, to those that are scanned."""
  segments, i = [], 0
  while i < len(cuts):
    period, length = _repeats(cuts[i:])
    for cut in cuts[i : i + period]:
      if length > 1:
        after = cuts[cut.start + period]
        group_period = after.group_start - cut.group_start
        cut = dataclasses.replace(cut, length=length, period=period, group_period=group_period)
      segments.append(cut)
    i += period * length
  return tuple(segments)


def _repeats(cuts: list[Segment]) -> tuple[int, int]:
  """Returns how many MoE layers at the start repeat, and how often they are there: what covers
  most, (1, 1) where nothing repeats.
  """
  best = 1, 1
  for period in range(1, _MAX_PERIOD + 1):
    if any(cut.group < 0 for cut in cuts[:period]):
      break
    alike = map(_are_alike, cuts, cuts[period:])
    length = 1 + sum(1 for _ in itertools.takewhile(bool, alike)) // period
    if length > 1 and period * length > best[0] * best[1]:
      best = period, length
  return best


def _are_alike(a: Segment, b: Segment) -> bool:
  """Tells whether one trace serves the layers of both."""
  return (a.layer, a.prefetch_count, a.is_streamed) == (b.layer, b.prefetch_count, b.is_streamed)


def make_program(
  model: ModelSpec,
  residency: ResidencySpec,
  engine: EngineSpec,
  records: bool = False,
  warm_starts: bool = False,
) -> Program:
  """Returns the program of an engine."""
  max_slots = tuple(max(slots) for slots in group_slots(model, residency))
  return Program(
    model,
    engine,
    residency.policy,
    residency.rhac,
    max_slots,
    residency.prefetch,
    residency.substitution_threshold,
    residency.staging,
    residency.layer_prefetch,
    records,
    warm_starts,
  )


def group_slots(model: ModelSpec, residency: ResidencySpec) -> tuple[tuple[int, ...], ...]:
  """Returns the slots of each layer, expert group by expert group."""
  by_layer = dict(zip(model.moe_layers, residency.slots, strict=True))
  return tuple(tuple(by_layer[layer] for layer in group.layers) for group in model.expert_groups)


def staging_thresholds(program: Program, residency: ResidencySpec) -> dict[int, int]:
  """Returns N*, the prompt tokens from which a segment's layers are staged: {segment: tokens}.

  Layers that one scan runs are staged together, from the largest of their thresholds; none is where
  one of them can hold all its experts. Streamed layers are staged from 0 tokens on.

  Source: SPEC sections 8 and 10.
  """
  model, thresholds = program.model, dict.fromkeys(program.streamed, 0)
  if not program.staging.enabled:
    return thresholds
  for scan in program.scans:
    segments = {s: program.segments[s] for s in scan if not program.segments[s].is_streamed}
    counts = [
      (residency.slots[i], model.expert_groups[segment.group])
      for segment in segments.values()
      for i in segment.moe_indices
    ]
    if counts and all(count < group.num_experts for count, group in counts):
      least = max(-(-count // group.num_experts_per_tok) for count, group in counts)
      thresholds |= dict.fromkeys(segments, least)
  return thresholds


def bind(make_module: Callable[[], ModuleT], params: Params) -> ModuleT:
  """Returns a module over the given parameters; creates no arrays of its own."""
  graphdef, state = nnx.split(nnx.eval_shape(make_module))
  nnx.replace_by_pure_dict(state, params)
  return nnx.merge(graphdef, state)


def bind_layer(program: Program, layer: LayerSpec, params: Params) -> DecoderLayer:
  """Returns one decoder layer over its parameters."""
  model, dtype = program.model, program.dtype

  def make() -> DecoderLayer:
    module = DecoderLayer(layer, model, dtype, nnx.Rngs(0))
    return quantize_module(module) if program.engine.dense_format == "w8a8" else module

  return bind(make, params)


def embed(program: Program, params: Params, tokens) -> Any:
  """Returns the embeddings of int32 tokens [...], [..., D]; hyper-connections: [..., n, D]."""
  x = jnp.take(params["embed"]["embedding"], tokens, axis=0, mode="clip")
  return hyper.expand(x * program.model.embedding_multiplier, program.model.hyper)


def head(program: Program, params: Params, x) -> Any:
  """Returns float32 logits [..., V] of the stream after the last layer, shaped as of `embed`."""
  model, dtype = program.model, program.dtype
  if (spec := model.hyper) is not None:
    sizes = model.embed_dim, model.rms_norm_eps
    x = bind(lambda: hyper.HyperHead(spec, *sizes, nnx.Rngs(0)), params["hyper_head"])(x)
  norm = bind(
    lambda: rms_norm(model.embed_dim, model.rms_norm_eps, dtype, nnx.Rngs(0)), params["norm"]
  )
  hidden = norm(x)
  if model.tie_embeddings:
    logits = jnp.dot(hidden, params["embed"]["embedding"].T)
    return logits.astype(jnp.float32) / model.logits_divisor
  lm_head = bind(
    lambda: linear(model.embed_dim, model.vocab_size, dtype, nnx.Rngs(0)), params["lm_head"]
  )
  return lm_head(hidden).astype(jnp.float32) / model.logits_divisor


def by_segment(program: Program, layers: dict[int, Params], stack: Callable) -> dict[int, Params]:
  """Arranges per-layer parameters as the program takes them.

  Args:
    program: the program.
    layers: parameters keyed by layer.
    stack: combines the equal trees of a scanned segment's layers into one with a leading layer
      axis.

  Returns:
    Parameters keyed by segment.
  """
  return {
    s: layers[seg.start] if seg.length == 1 else stack([layers[i] for i in seg.layers])
    for s, seg in enumerate(program.segments)
  }
