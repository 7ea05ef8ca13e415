"""The layer function and the loop over layers, shared by decode and prefill."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moecore_jax.models.attention.blockwise import blockwise_attention, pad_rows
from moecore_jax.runtime import routed as routed_lib
from moecore_jax.runtime.program import Params, Program, Segment, bind_layer
from moecore_jax.runtime.state import NO_EXPERT, DecodeState, GroupState


class Tokens(NamedTuple):
  """The tokens of one step: one a row in decode, one row's chunk in prefill.

  Attributes:
    positions: int32 [B, T].
    valid: bool [B, T], False for padding.
    row: int32 scalar, first row of the cache that they belong to.
  """

  positions: jax.Array
  valid: jax.Array
  row: jax.Array


class Carry(NamedTuple):
  """What the layers pass on.

  Attributes:
    x: stream [B, T, D].
    groups: residency of each expert group.
    counters: int32 [MoE layers, 4] of this step's phase.
    hits: int32 [B * T].
  """

  x: jax.Array
  groups: tuple[GroupState, ...]
  counters: jax.Array
  hits: jax.Array


RunRouted = Callable[..., routed_lib.RoutedOut]


def run_layers(
  program: Program,
  phase: int,
  params: Params,
  banks: tuple[dict[str, jax.Array], ...],
  state: DecodeState,
  x: jax.Array,
  tokens: Tokens,
  run_routed: RunRouted = routed_lib.run_routed,
) -> tuple[Carry, tuple[jax.Array, ...], jax.Array]:
  """Runs all layers on one step's tokens.

  Args:
    program: static settings.
    phase: state.DECODE or state.PREFILL.
    params: dense parameters, layers keyed by segment.
    banks: stored experts of each group, pinned host memory.
    state: state before the step.
    x: embeddings [B, T, D].
    tokens: where the tokens stand.
    run_routed: how a layer's routed experts run; benchmarks compare others.

  Returns:
    The carry after the last layer, the KV caches, and the chosen experts uint16 [MoE layers, B * T,
    A].
  """
  carry = Carry(x, state.groups, state.counters[phase], jnp.zeros(tokens.valid.size, jnp.int32))
  caches, chosen = [], []
  width = max(g.num_experts_per_tok for g in program.model.expert_groups)
  for s, segment in enumerate(program.segments):

    def body(carry_and_cache, params_and_offset, segment=segment):
      carry, cache = carry_and_cache
      params, offset = params_and_offset
      layer = bind_layer(program, segment.layer, params)
      carry, cache, ids = _run_layer(
        program, phase, layer, segment, offset, banks, carry, cache, tokens, state.key, run_routed
      )
      if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=NO_EXPERT)
      return (carry, cache), ids

    if segment.length == 1:
      (carry, cache), ids = body((carry, state.kv[s]), (params["layers"][s], jnp.int32(0)))
      ids = None if ids is None else ids[None]
    else:
      offsets = jnp.arange(segment.length, dtype=jnp.int32)
      (carry, cache), ids = lax.scan(body, (carry, state.kv[s]), (params["layers"][s], offsets))
    caches.append(cache)
    if ids is not None:
      chosen.append(ids)
  return carry, tuple(caches), jnp.concatenate(chosen)


def _run_layer(
  program: Program,
  phase: int,
  layer: Any,
  segment: Segment,
  offset: jax.Array,
  banks: tuple[dict[str, jax.Array], ...],
  carry: Carry,
  cache: jax.Array,
  tokens: Tokens,
  key: jax.Array,
  run_routed: RunRouted,
) -> tuple[Carry, jax.Array, jax.Array | None]:
  """One decoder layer: attention over the cache, then the dense block or the routed and shared
  experts.
  """
  x = carry.x
  with jax.named_scope("attention"):
    h = layer.attention_norm(x)
    cache = _write_rows(
      cache, offset, tokens, pad_rows(layer.attention.latents(h, tokens.positions))
    )
    queries = pad_rows(layer.attention.queries(h, tokens.positions))
    block = program.engine.kv_block_tokens

    def read_block(i):
      start = (offset, tokens.row, i * block, jnp.int32(0))
      return lax.dynamic_slice(cache, start, (1, x.shape[0], block, cache.shape[3]))[0]

    x = x + layer.attention.output(
      blockwise_attention(queries, tokens.positions, read_block, block)
    )
  h = layer.mlp_norm(x)
  if not layer.is_moe:
    return carry._replace(x=x + layer.mlp(h)), cache, None
  flat = h.reshape(-1, h.shape[-1])  # one of B and T is 1: the order is (position, row)
  valid = tokens.valid.reshape(-1)
  with jax.named_scope("router"):
    routing = layer.mlp.router(flat)
  moe_index = segment.moe_start + offset
  out = run_routed(
    program,
    phase,
    segment.group,
    banks[segment.group],
    carry.groups[segment.group],
    segment.group_start + offset,
    flat,
    routing,
    valid,
    jax.random.fold_in(key, moe_index),
  )
  with jax.named_scope("shared_expert"):
    y = layer.mlp.add_shared(out.y, flat)
  groups = list(carry.groups)
  groups[segment.group] = out.group
  ids = jnp.where(valid[:, None], routing.topk_ids, NO_EXPERT).astype(jnp.uint16)
  carry = Carry(
    x + y.reshape(x.shape),
    tuple(groups),
    carry.counters.at[moe_index].add(out.counts),
    carry.hits + out.hits,
  )
  return carry, cache, ids


def _write_rows(cache: jax.Array, offset: jax.Array, tokens: Tokens, rows: jax.Array) -> jax.Array:
  """Writes rows [B, T, R] at the tokens' positions; rows of padding are dropped."""
  batch, length = tokens.valid.shape
  row = tokens.row + jnp.arange(batch, dtype=jnp.int32)[:, None]
  at = jnp.where(tokens.valid, tokens.positions, cache.shape[2])
  layer = jnp.broadcast_to(offset, (batch, length))
  return cache.at[layer, jnp.broadcast_to(row, (batch, length)), at].set(rows, mode="drop")
