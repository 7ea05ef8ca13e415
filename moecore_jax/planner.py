"""The memory plan: bytes of a device by region, what fits a budget, and what each setting frees.

It takes numbers, not models: `Demand` says what a model and its formats cost, `Settings` what may
be chosen, the budget is in bytes. `moecore_jax.runtime.plan` gathers the numbers.

Regions of the device:

    dense_weights    everything but routed experts
    kv_cache         batch rows of the whole context
    expert_slots     the slots of all layers, and a transient row for each expert group
    in_flight_rows   where prefetched experts arrive
    layer_buffers    for all experts of the largest MoE layer, of those not all in slots: two for
                     staged prefill, as many as it asks for under layer prefetch
    tables           slot tables, policy signals, counters, positions
    temporaries      experts and the dense matrix that a program may copy
    activations      the largest program's

Source: SPEC section 2.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

MAX_BATCH = 1024
"""Batch rows beyond which no answer looks."""

_INT32_BYTES = 4


SLOTS_FIELD = "residency.slots_per_layer"
"""Config field of the slots of every layer, which other fields outrank."""
ALL_RESIDENT_FIELD = "residency.all_resident"
"""One of those."""


@dataclasses.dataclass(frozen=True)
class ExpertPool:
  """Experts of one shape and the layers that have them.

  Attributes:
    layers: their indices among the MoE layers.
    num_experts: experts of each layer.
    expert_bytes: stored bytes of one expert.
  """

  layers: tuple[int, ...]
  num_experts: int
  expert_bytes: int


@dataclasses.dataclass(frozen=True)
class Demand:
  """What a model costs in the chosen formats.

  Attributes:
    pools: expert groups.
    dense_bytes: all weights but routed experts.
    kv_token_bytes: cached bytes of one token, all layers together.
    kv_row_bytes: cached bytes of a batch row whatever its context: sliding windows.
    table_bytes: tables and counters, without the slots' entries.
    table_row_bytes: of those, what each batch row adds.
    temporary_bytes: what a program may copy besides activations.
    activation_token_bytes: activations of one token in a layer.
    stream_token_bytes: what a token of a long piece keeps between layers, which take it in blocks.
    activation_row_bytes: the KV block that is read for a batch row.
    head_token_bytes: activations of the head for one token.
    max_context_tokens: the model's context.
    context_step: a context is a multiple of this many tokens.
  """

  pools: tuple[ExpertPool, ...]
  dense_bytes: int
  kv_token_bytes: int
  kv_row_bytes: int = 0
  table_bytes: int = 0
  table_row_bytes: int = 0
  temporary_bytes: int = 0
  activation_token_bytes: int = 0
  stream_token_bytes: int = 0
  activation_row_bytes: int = 0
  head_token_bytes: int = 0
  max_context_tokens: int = 1 << 30
  context_step: int = 1

  @property
  def bank_bytes(self) -> int:
    """Bytes of all routed experts, in host memory."""
    return sum(len(p.layers) * p.num_experts * p.expert_bytes for p in self.pools)

  @property
  def num_moe_layers(self) -> int:
    return sum(len(p.layers) for p in self.pools)


@dataclasses.dataclass(frozen=True)
class Settings:
  """What may be chosen to make a model fit.

  Attributes:
    slots: of each MoE layer.
    context_tokens: capacity of a batch row.
    batch_size: rows decoded together.
    chunk_tokens: the longest piece of a prompt that one program takes.
    block_tokens: tokens of it that a layer takes at a time.
    in_flight_rows: rows of each expert group for prefetched experts.
    use_staging: prefill streams whole layers through two buffers.
    ring_layers: layer buffers of layer prefetch; 0: it is off.
  """

  slots: tuple[int, ...]
  context_tokens: int
  batch_size: int = 1
  chunk_tokens: int = 1
  block_tokens: int = 1 << 30
  in_flight_rows: int = 0
  use_staging: bool = False
  ring_layers: int = 0


def regions(demand: Demand, settings: Settings) -> dict[str, int]:
  """Returns the bytes of each region of the device."""
  rows, chunk, block = settings.batch_size, settings.chunk_tokens, settings.block_tokens
  buffers = max(settings.ring_layers, 2 * settings.use_staging)
  slot_bytes = table_bytes = layer_bytes = 0
  for pool in demand.pools:
    slots = [settings.slots[layer] for layer in pool.layers]
    slot_bytes += (sum(slots) + 1) * pool.expert_bytes
    table_bytes += _INT32_BYTES * (sum(slots) + max(slots))
    if min(slots) < pool.num_experts:
      layer_bytes = max(layer_bytes, pool.num_experts * pool.expert_bytes)
  token, head = demand.activation_token_bytes, demand.head_token_bytes
  prefill = min(chunk, block) * token + (chunk > block) * chunk * demand.stream_token_bytes + head
  return {
    "dense_weights": demand.dense_bytes,
    "kv_cache": rows * (settings.context_tokens * demand.kv_token_bytes + demand.kv_row_bytes),
    "expert_slots": slot_bytes,
    "in_flight_rows": settings.in_flight_rows * sum(p.expert_bytes for p in demand.pools),
    "layer_buffers": buffers * layer_bytes,
    "tables": demand.table_bytes + rows * demand.table_row_bytes + table_bytes,
    "temporaries": demand.temporary_bytes,
    "activations": max(rows * (token + head), prefill) + rows * demand.activation_row_bytes,
  }


def needed_bytes(demand: Demand, settings: Settings) -> int:
  """Returns the bytes of all regions together."""
  return sum(regions(demand, settings).values())


def most_uniform_slots(demand: Demand, settings: Settings, budget_bytes: int) -> int:
  """Returns the most slots that every layer can have within the budget, 0 if not even one."""
  most = min((p.num_experts for p in demand.pools), default=0)
  return _largest(most, demand, budget_bytes, lambda k: with_slots(demand, settings, k))


def longest_context(demand: Demand, settings: Settings, budget_bytes: int) -> int:
  """Returns the longest context in tokens within the budget, 0 if not even one step fits."""
  step = demand.context_step
  return step * _largest(
    demand.max_context_tokens // step,
    demand,
    budget_bytes,
    lambda n: with_context(settings, n * step),
  )


def largest_batch(demand: Demand, settings: Settings, budget_bytes: int) -> int:
  """Returns the most batch rows within the budget, of MAX_BATCH at most, 0 if not even one fits."""
  return _largest(
    MAX_BATCH, demand, budget_bytes, lambda n: dataclasses.replace(settings, batch_size=n)
  )


def _largest(
  most: int, demand: Demand, budget_bytes: int, settings_of: Callable[[int], Settings]
) -> int:
  """Returns the largest n in 1..most that fits, 0 if none.

  What fits, fits with less; but all experts in slots need no staging, so `most` is tried first.
  """

  def fits(n: int) -> bool:
    return needed_bytes(demand, settings_of(n)) <= budget_bytes

  if most and fits(most):
    return most
  low, high = 0, most - 1
  while low < high:
    middle = (low + high + 1) // 2
    low, high = (middle, high) if fits(middle) else (low, middle - 1)
  return max(low, 0)


def with_slots(demand: Demand, settings: Settings, slots: int) -> Settings:
  """Returns settings with the same number of slots in every layer."""
  return dataclasses.replace(settings, slots=(slots,) * demand.num_moe_layers)


def with_context(settings: Settings, tokens: int) -> Settings:
  """Returns settings with another context, which no piece of a prompt exceeds."""
  chunk = min(settings.chunk_tokens, tokens)
  return dataclasses.replace(settings, context_tokens=tokens, chunk_tokens=chunk)


def frees(demand: Demand, settings: Settings, slots_field: str = SLOTS_FIELD) -> dict[str, int]:
  """Returns the bytes that each setting frees, by what is done to it.

  Settings that free nothing are left out. `slots_field` is the config field that gives the slots.
  """
  step, ring = demand.context_step, settings.ring_layers
  slots = settings.slots if ring else tuple(max(1, k - 1) for k in settings.slots)
  changes: dict[str, dict[str, Any]] = {
    f"{slots_field}: one slot less in every layer": {"slots": slots},
    f"engine.context_tokens: {step} less": {
      "context_tokens": max(step, settings.context_tokens - step)
    },
    "engine.batch_size: one less": {"batch_size": max(1, settings.batch_size - 1)},
    "engine.prefill_buckets: the largest halved": {
      "chunk_tokens": max(1, settings.chunk_tokens // 2)
    },
    "residency.prefetch.max_experts: 0": {"in_flight_rows": 0},
    "residency.staging.enabled: False": {"use_staging": False},
    "residency.layer_prefetch.prefetch_step: one less": {"ring_layers": max(ring - 1, ring > 0)},
  }
  needed = needed_bytes(demand, settings)
  freed = {
    name: needed - needed_bytes(demand, dataclasses.replace(settings, **change))
    for name, change in changes.items()
  }
  return {name: size for name, size in freed.items() if size}


def refusal(
  demand: Demand, settings: Settings, budget_bytes: int, slots_field: str = SLOTS_FIELD
) -> str:
  """Says in one sentence what does not fit and what would, "" if everything fits."""
  parts = regions(demand, settings)
  needed = sum(parts.values())
  if needed <= budget_bytes:
    return ""
  listed = ", ".join(f"{name} {show(size)}" for name, size in parts.items() if size)
  ways = []
  if slots_field == ALL_RESIDENT_FIELD:  # what needs room without it is not known here
    ways.append(f"{ALL_RESIDENT_FIELD} to False and fewer slots")
  elif not settings.ring_layers and (slots := most_uniform_slots(demand, settings, budget_bytes)):
    instead = "" if slots_field == SLOTS_FIELD else f" without {slots_field}"
    ways.append(f"{SLOTS_FIELD} to {slots}{instead}")
  if tokens := longest_context(demand, settings, budget_bytes):
    ways.append(f"engine.context_tokens to {tokens}")
  if rows := largest_batch(demand, settings, budget_bytes):
    ways.append(f"engine.batch_size to {rows}")
  return f"the device needs {show(needed)} ({listed}), there are {show(budget_bytes)}; " + (
    f"set {', or '.join(ways)}" if ways else _smallest(demand, settings, budget_bytes)
  )


def _smallest(demand: Demand, settings: Settings, budget_bytes: int) -> str:
  """Says what is left to do where no single setting suffices."""
  if settings.ring_layers:
    return (
      "no one setting is enough: stream more layers by residency.layer_prefetch, or give a larger "
      "device.memory_bytes"
    )
  one_row = dataclasses.replace(settings, batch_size=1)
  small = with_context(one_row, demand.context_step)
  if slots := most_uniform_slots(demand, small, budget_bytes):
    tokens = longest_context(demand, with_slots(demand, one_row, 1), budget_bytes)
    return (
      f"no one setting is enough: with engine.batch_size=1 there is room for {slots} slots a layer "
      f"at {demand.context_step} tokens of context, or for {tokens} tokens at one slot"
    )
  least = needed_bytes(demand, with_slots(demand, small, 1))
  return (
    f"even one slot a layer, one row and {demand.context_step} tokens of context need "
    f"{show(least)}: it takes a larger device.memory_bytes or narrower formats"
  )


def show(num_bytes: int) -> str:
  """Returns bytes as text, in GB (1e9), or in MB below one."""
  if num_bytes >= 1e9:
    return f"{num_bytes / 1e9:.2f} GB"
  return f"{num_bytes / 1e6:.2f} MB"


def streamed_groups(
  layer_bytes: Sequence[int], budget_bytes: int, ring_layers: int
) -> tuple[int, int]:
  """Chooses the layers that layer prefetch streams.

  Args:
    layer_bytes: all experts of each MoE layer.
    budget_bytes: for the resident layers and the ring together.
    ring_layers: buffers, each as large as the largest streamed layer.

  Returns:
    (G, n): of each G layers, the last group may be shorter, those from place G - n on are streamed.
    Of all choices within the budget the one that leaves most bytes resident, of several the one
    with the smallest groups, which spreads the resident layers; (1, 1) where nothing fits.
  """
  best, most = (1, 1), -1
  for size in range(1, len(layer_bytes) + 1):
    for streamed in range(size + 1):
      resident = [i % size < size - streamed for i in range(len(layer_bytes))]
      kept = sum(itertools.compress(layer_bytes, resident))
      ring = [b for b, stays in zip(layer_bytes, resident, strict=True) if not stays]
      needed = kept + min(ring_layers, len(ring)) * max(ring, default=0)
      if needed <= budget_bytes and kept > most:
        best, most = (size, streamed), kept
  return best


def prefetch_bound(
  window_s: Sequence[float], expert_bytes: Sequence[int], tau_s: float, bandwidth: float
) -> tuple[int, ...]:
  """Returns how many whole transfers fit into each layer's window (n_comm).

  Args:
    window_s: seconds from a layer's prediction until its routing.
    expert_bytes: of one expert of that layer.
    tau_s: launch overhead of one transfer.
    bandwidth: bytes a second from the host (beta).

  Source: SPEC section 6.
  """
  return tuple(
    int(window / (tau_s + size / bandwidth))
    for window, size in zip(window_s, expert_bytes, strict=True)
  )
