"""The memory plan of an engine: gathers a model's numbers for `moecore_jax.planner`.

Weights, caches, tables and pools are counted on the abstract trees that the engine allocates, so
the plan and the engine cannot disagree. Nothing is allocated here.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moecore_jax import memory, planner
from moecore_jax.checkpoint.template import dense_template, total_bytes
from moecore_jax.config import RunConfig
from moecore_jax.models.attention.cache import cache_shapes
from moecore_jax.models.experts import expert_bytes
from moecore_jax.runtime.program import group_slots, make_program, staging_thresholds
from moecore_jax.runtime.state import DecodeState, init_state
from moecore_jax.specs import (
  DenseSpec,
  DeviceSpec,
  EngineSpec,
  LayerSpec,
  ModelSpec,
  ResidencySpec,
)

TEMPORARY_EXPERTS = 4
"""Experts that may lie in temporary memory beside what a prefetch brings."""

_FLOAT_BYTES = 4
_UNLIMITED = 1 << 62


@dataclasses.dataclass(frozen=True)
class Plan:
  """What an engine needs, and what there is.

  Attributes:
    demand: what the model costs.
    settings: what was chosen.
    budget_bytes: device memory that may be filled; 0: not known, no limit.
    bank_bytes: pinned host memory that all experts need, those of MTP layers included.
    host_budget_bytes: host memory that may be used; 0: no limit.
    slots_field: config field that gives the slots.
  """

  demand: planner.Demand
  settings: planner.Settings
  budget_bytes: int
  bank_bytes: int
  host_budget_bytes: int
  slots_field: str = planner.SLOTS_FIELD

  @property
  def refusal(self) -> str:
    """One sentence on what does not fit and what would; "" if everything fits."""
    if 0 < self.host_budget_bytes < self.bank_bytes:
      return (
        f"the expert bank needs {planner.show(self.bank_bytes)} of pinned host memory, "
        f"device.host_memory_bytes allows {planner.show(self.host_budget_bytes)}; raise it, or "
        "choose a narrower engine.expert_format"
      )
    budget = self.budget_bytes or _UNLIMITED
    return planner.refusal(self.demand, self.settings, budget, self.slots_field)

  def to_dict(self) -> dict[str, Any]:
    """Returns the plan in JSON types."""
    demand, settings, budget = self.demand, self.settings, self.budget_bytes or _UNLIMITED
    return {
      "regions_bytes": planner.regions(demand, settings),
      "needed_bytes": planner.needed_bytes(demand, settings),
      "budget_bytes": self.budget_bytes or None,
      "fits": not self.refusal,
      "slots": list(settings.slots),
      "most_uniform_slots": planner.most_uniform_slots(demand, settings, budget),
      "longest_context_tokens": planner.longest_context(demand, settings, budget),
      "largest_batch": planner.largest_batch(demand, settings, budget),
      "frees_bytes": planner.frees(demand, settings, self.slots_field),
      "expert_bank_bytes": self.bank_bytes,
      "host_budget_bytes": self.host_budget_bytes or None,
    }


def make_plan(
  model: ModelSpec,
  residency: ResidencySpec,
  engine: EngineSpec,
  device: DeviceSpec,
  slots_field: str = planner.SLOTS_FIELD,
) -> Plan:
  """Plans the memory of an engine on a device; `slots_field` is what the slots come from."""
  state, wider = (
    _state(model, residency, dataclasses.replace(engine, batch_size=rows))
    for rows in (engine.batch_size, engine.batch_size + 1)
  )
  slots = group_slots(model, residency)
  slot_entries = sum(sum(part) + max(part) for part in slots)
  row_bytes = _table_bytes(wider) - _table_bytes(state)
  dense = dense_costs(model, engine)
  activations = activation_costs(model, engine)
  fmt = engine.expert_format
  kv_token_bytes, kv_row_bytes = cache_costs(model, engine)
  demand = planner.Demand(
    pools=tuple(
      planner.ExpertPool(
        tuple(map(model.moe_layers.index, group.layers)),
        group.num_experts,
        expert_bytes(group, fmt),
      )
      for group in model.expert_groups
    ),
    dense_bytes=dense.total_bytes,
    kv_token_bytes=kv_token_bytes,
    kv_row_bytes=kv_row_bytes,
    table_bytes=_table_bytes(state) - engine.batch_size * row_bytes - 4 * slot_entries,
    table_row_bytes=row_bytes,
    temporary_bytes=dense.largest_bytes
    + TEMPORARY_EXPERTS * max((expert_bytes(g, fmt) for g in model.expert_groups), default=0),
    activation_token_bytes=activations.token_bytes,
    stream_token_bytes=activations.stream_bytes,
    activation_row_bytes=activations.row_bytes,
    head_token_bytes=activations.head_bytes,
    max_context_tokens=model.max_context_tokens,
    context_step=engine.kv_block_tokens,
  )
  in_flight = [
    group.pool["down"].shape[0] - sum(part) - 1
    for group, part in zip(state.groups, slots, strict=True)
  ]
  program = make_program(model, residency, engine)
  num_streamed = sum(program.segments[s].length for s in program.streamed)
  settings = planner.Settings(
    slots=residency.slots,
    context_tokens=engine.context_tokens,
    batch_size=engine.batch_size,
    chunk_tokens=engine.prefill_buckets[-1],
    block_tokens=engine.prefill_block_tokens,
    in_flight_rows=max(in_flight, default=0),
    use_staging=residency.staging.enabled and bool(staging_thresholds(program, residency)),
    ring_layers=min(num_streamed, residency.layer_prefetch.prefetch_step),
  )
  bank_bytes = sum(
    group.num_rows * expert_bytes(group, fmt)
    for group in (*model.expert_groups, *model.mtp_expert_groups)
  )
  return Plan(
    demand, settings, _budget_bytes(device), bank_bytes, device.host_memory_bytes, slots_field
  )


def freeze(
  config: RunConfig, model: ModelSpec, fingerprint: str = ""
) -> tuple[ResidencySpec, EngineSpec, DeviceSpec]:
  """Freezes a config as `RunConfig.freeze` does, and refuses it where it does not fit the device.

  Raises:
    ValueError: a field is wrong, or memory is not enough; with the bytes by region.
  """
  specs = config.freeze(model, fingerprint)
  if refusal := make_plan(model, *specs, slots_field(config)).refusal:
    raise ValueError(refusal)
  return specs


def slots_field(config: RunConfig) -> str:
  """Returns the name of the field that gives the slots."""
  for name in ("all_resident", "allocation", "slots"):
    if getattr(config.residency, name):
      return f"residency.{name}"
  return planner.SLOTS_FIELD


class DenseCosts(NamedTuple):
  """Bytes of all dense weights, and of the largest matrix of a layer."""

  total_bytes: int
  largest_bytes: int


def dense_costs(model: ModelSpec, engine: EngineSpec) -> DenseCosts:
  """Returns what the weights besides routed experts cost; MTP layers are left out.

  Equal layers are traced once: tracing them all takes minutes for deep models.
  """
  counts = collections.Counter(model.layers)
  distinct = dataclasses.replace(model, layers=tuple(counts), mtp_layers=())
  tree = dense_template(distinct, jnp.dtype(engine.dtype), engine.dense_format)
  layers = [tree["layers"][i] for i in range(len(counts))]
  rest = total_bytes({name: part for name, part in tree.items() if name != "layers"})
  return DenseCosts(
    rest + sum(map(int.__mul__, map(total_bytes, layers), counts.values())),
    max(total_bytes(leaf) for leaf in jax.tree.leaves(layers)),
  )


def cache_costs(model: ModelSpec, engine: EngineSpec) -> tuple[int, int]:
  """Returns the cached bytes of one token, and those of a batch row whatever its context.

  They are read off two long contexts, so that what only long contexts cache counts for all. A
  compressed entry counts as a share of each of its tokens: exact for contexts of whole windows of
  2 ** n tokens, else by less than a byte a token and an entry a layer too much.
  """
  long, longer = (_kv_bytes(model, engine, tokens) for tokens in (1 << 20, 1 << 21))
  return -((long - longer) >> 20), 2 * long - longer  # a share rounds up


class ActivationCosts(NamedTuple):
  """Bytes of activations for a token in a layer, for a token between layers that take long pieces
  in blocks, for a batch row, and for a token whose logits are taken.
  """

  token_bytes: int
  stream_bytes: int
  row_bytes: int
  head_bytes: int


def activation_costs(model: ModelSpec, engine: EngineSpec) -> ActivationCosts:
  """Returns what one layer's activations and the head's cost, all taken as live together.

  A token takes 8 n D + H (R + block) + 8 N numbers in float32 (streams, running mean and scores of
  attention, routing) and, in the engine's dtype, H (R + block) + 2 A D + 4 F (queries, shares,
  expert outputs, the hidden of an expert, of the shared one or of a dense block). Between layers it
  takes 3 n D + 2 D in that dtype and 4 N in float32 (streams, expert inputs, routing). A batch row
  takes the KV block that is read, block R in float32; the head takes 4 V in float32. R is the
  padded cached row, n the number of streams.
  """
  row_dims = [_row_dim(layer) for layer in model.layers]
  num_streams = model.hyper.num_streams if model.hyper else 1
  most_experts = max((group.num_experts for group in model.expert_groups), default=0)
  itemsize = jnp.dtype(engine.dtype).itemsize
  return ActivationCosts(
    max(_layer_token_bytes(layer, model, engine) for layer in model.layers),
    itemsize * (3 * num_streams + 2) * model.embed_dim + _FLOAT_BYTES * 4 * most_experts,
    _FLOAT_BYTES * engine.kv_block_tokens * max(row_dims),
    _FLOAT_BYTES * 4 * model.vocab_size,
  )


def _layer_token_bytes(layer: LayerSpec, model: ModelSpec, engine: EngineSpec) -> int:
  row, num_streams = _row_dim(layer), model.hyper.num_streams if model.hyper else 1
  attention = layer.attention.num_heads * (row + engine.kv_block_tokens)
  in_float32, in_dtype = 8 * num_streams * model.embed_dim + attention, attention
  if isinstance(layer.mlp, DenseSpec):
    in_dtype += 4 * layer.mlp.hidden_dim
  else:
    router = layer.mlp.router
    in_float32 += 8 * router.num_experts
    in_dtype += 2 * router.num_experts_per_tok * model.embed_dim
    in_dtype += 4 * (layer.mlp.expert_dim + layer.mlp.shared_dim)
  return _FLOAT_BYTES * in_float32 + jnp.dtype(engine.dtype).itemsize * in_dtype


def _kv_bytes(model: ModelSpec, engine: EngineSpec, context_tokens: int) -> int:
  """Returns the cached bytes of one batch row."""
  shapes = (cache_shapes(layer.attention, context_tokens).values() for layer in model.layers)
  numbers = sum(rows * width for shape in shapes for rows, width in shape)
  return numbers * jnp.dtype(engine.dtype).itemsize


def _row_dim(layer: LayerSpec) -> int:
  """Returns the numbers of a token's cached rows."""
  return sum(width for _, width in cache_shapes(layer.attention, 1).values())


def _state(model: ModelSpec, residency: ResidencySpec, engine: EngineSpec) -> DecodeState:
  program = make_program(model, residency, engine)
  return jax.eval_shape(lambda: init_state(program, residency))


def _table_bytes(state: DecodeState) -> int:
  pools = [group.pool for group in state.groups]
  return total_bytes(state) - total_bytes(pools) - total_bytes(state.kv)


def _budget_bytes(device: DeviceSpec) -> int:
  """Returns the device memory that may be filled, 0 where the device does not tell its size."""
  total = device.memory_bytes
  if not total:
    total = (memory.default_device().memory_stats() or {}).get("bytes_limit", 0)
  return int(total * device.usable_frac)
