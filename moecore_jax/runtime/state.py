"""Everything that changes from step to step, as pytrees of device arrays that are passed, returned
and donated.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt16, UInt32

from moecore_jax.models.attention.cache import CacheArrays, cache_shapes
from moecore_jax.models.experts import ExpertArrays, bank_layout
from moecore_jax.residency import slots as slots_lib
from moecore_jax.residency.base import PolicyState
from moecore_jax.runtime.program import Program, group_slots
from moecore_jax.specs import ResidencySpec

DECODE, PREFILL = 0, 1
COUNTERS = (
  "invocations",
  "hits",
  "misses",
  "evictions",
  "prefetches",
  "useful_prefetches",
  "predicted",
  "substitutions",
  "staged",
)
"""What is counted a layer. invocations: experts chosen by tokens. hits: invocations whose expert
was resident, or had arrived ahead, when the layer had routed. misses: experts loaded after that.
evictions: experts that another displaced. prefetches: experts copied ahead, in decode of what is
predicted, in prefill of what a warm start wants; useful_prefetches: those of them that the layer
then chose. predicted: invocations that the layer's
prediction held, resident or not. substitutions: invocations computed by another expert. staged:
experts copied by the staging of whole layers."""

NO_EXPERT = 65535


def stack_counts(counts: dict[str, jax.Array]) -> jax.Array:
  """Returns int32 [len(COUNTERS)]; what is not given is 0."""
  return jnp.stack([counts.get(name, jnp.int32(0)) for name in COUNTERS])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupState:
  """Residency of one expert group (L layers, N experts, C slots in all).

  Attributes:
    pool: stored expert arrays [C + 1 + M, ...] in device memory; the row behind the slots is
      transient, the last M = n_max are in flight, no table refers to them.
    tables: which expert lies in which row.
    policy: policy signals, every array with a leading layer axis L.
    useful_rate: float32 [L], recent share of right predictions for each layer.
  """

  pool: ExpertArrays
  tables: slots_lib.SlotTables
  policy: PolicyState
  useful_rate: Float32[Array, "L"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """State of an engine with B rows of S tokens.

  Attributes:
    token: int32 [B], the next input token of each row.
    position: int32 [B], its position: the tokens of the row that are in the cache.
    remaining: int32 [B], tokens that the row may still generate.
    active: bool [B], rows that decode.
    kv: for each segment, its caches by name, [layers, B, rows, R] of the engine's dtype, R in whole
      lanes.
    groups: residency of each expert group.
    counters: int32 [2, MoE layers, len(COUNTERS)], cumulative, decode and prefill apart.
    key: uint32 [2], random key.
  """

  token: Int32[Array, "B"]
  position: Int32[Array, "B"]
  remaining: Int32[Array, "B"]
  active: Bool[Array, "B"]
  kv: tuple[CacheArrays, ...]
  groups: tuple[GroupState, ...]
  counters: Int32[Array, "2 L counters"]
  key: UInt32[Array, "2"]


class StepOut(NamedTuple):
  """What one decode step tells.

  Attributes:
    token: int32 [B], the token drawn for each row; meaningless where the row was not active.
    was_active: bool [B], rows that took part.
    is_active: bool [B], rows that go on.
    logits: float32 [B, V].
    topk_ids: uint16 [MoE layers, B, A], chosen experts in top-k order, 65535 for none.
    hits: int32 [B], invocations of the row that count as hits.
    scores: float32 [MoE layers, B, N], selection scores, -inf beyond a layer's experts; None unless
      the program records.
    predicted: uint16 [MoE layers, B, A], what the layer before predicted, in top-k order, 65535 for
      none; None likewise.
  """

  token: Int32[Array, "B"]
  was_active: Bool[Array, "B"]
  is_active: Bool[Array, "B"]
  logits: Float32[Array, "B V"]
  topk_ids: UInt16[Array, "L B A"]
  hits: Int32[Array, "B"]
  scores: Float32[Array, "L B N"] | None = None
  predicted: UInt16[Array, "L B A"] | None = None


def init_state(program: Program, residency: ResidencySpec) -> DecodeState:
  """Returns the state of an engine that has seen nothing; call it under jit, or under
  jax.eval_shape for shapes.
  """
  model, engine = program.model, program.engine
  rows = engine.batch_size
  kv = tuple(
    {
      name: jnp.zeros((seg.length, rows, *shape), program.dtype)
      for name, shape in cache_shapes(seg.layer.attention, engine.context_tokens).items()
    }
    for seg in program.segments
  )
  groups = tuple(
    init_group(program, g, slots) for g, slots in enumerate(group_slots(model, residency))
  )
  return DecodeState(
    token=jnp.zeros(rows, jnp.int32),
    position=jnp.zeros(rows, jnp.int32),
    remaining=jnp.zeros(rows, jnp.int32),
    active=jnp.zeros(rows, bool),
    kv=kv,
    groups=groups,
    counters=jnp.zeros((2, len(model.moe_layers), len(COUNTERS)), jnp.int32),
    key=jax.random.PRNGKey(engine.sampling.seed),
  )


def init_group(program: Program, group_index: int, slots: tuple[int, ...]) -> GroupState:
  """Returns the empty residency of one expert group: pool, tables and signals are always made
  together.
  """
  group = program.model.expert_groups[group_index]
  layout = bank_layout(group, program.engine.expert_format)
  rows = sum(slots) + 1 + program.prefetch.max_experts
  pool = {name: jnp.zeros((rows, *shape[1:]), dtype) for name, (shape, dtype) in layout.items()}
  signals = program.make_policy().init(group.num_experts)
  signals = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(slots), *x.shape)), signals)
  tables = slots_lib.init_tables(group.num_experts, slots, program.max_slots[group_index])
  return GroupState(pool, tables, signals, jnp.ones(len(slots), jnp.float32))
