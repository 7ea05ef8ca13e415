"""Prefill of one row, chunk by chunk, with the same layer function and the same residency code as
the decode step.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt16

from moecore_jax.runtime import program as program_lib
from moecore_jax.runtime import stack
from moecore_jax.runtime.program import Params, Program
from moecore_jax.runtime.sampling import sample
from moecore_jax.runtime.state import PREFILL, DecodeState


class PrefillOut(NamedTuple):
  """What one chunk tells.

  Attributes:
    token: int32 scalar, drawn after the chunk's last token.
    logits: float32 [V] after the chunk's last token, or [T, V] of all tokens.
    topk_ids: uint16 [MoE layers, T, A], chosen experts in top-k order, 65535 for padding.
    hits: int32 [T], invocations whose expert was resident when the layer routed.
    scores: float32 [MoE layers, T, N], selection scores, -inf beyond a layer's experts; None unless
      the program records.
    predicted: uint16 [MoE layers, T, A], 65535: prefill predicts nothing; None likewise.
  """

  token: Int32[Array, ""]
  logits: Float32[Array, "..."]
  topk_ids: UInt16[Array, "L T A"]
  hits: Int32[Array, "T"]
  scores: Float32[Array, "L T N"] | None = None
  predicted: UInt16[Array, "L T A"] | None = None


class Chunk(NamedTuple):
  """A piece of one row's prompt.

  Attributes:
    tokens: int32 [T], right-padded.
    length: int32 scalar, tokens that count.
    row: int32 scalar.
    offset: int32 scalar, position of the first token.
    max_new_tokens: int32 scalar, tokens to generate after it; 0 leaves the row inactive.
  """

  tokens: Int32[Array, "T"]
  length: Int32[Array, ""]
  row: Int32[Array, ""]
  offset: Int32[Array, ""]
  max_new_tokens: Int32[Array, ""]


def prefill_chunk(
  program: Program,
  params: Params,
  banks: tuple[dict[str, jax.Array], ...],
  state: DecodeState,
  chunk: Chunk,
  all_logits: bool = False,
  staged: tuple[int, ...] = (),
) -> tuple[DecodeState, PrefillOut]:
  """Puts a chunk of a prompt in its row's cache. Layers of the segments in `staged` are copied
  whole; in the others experts load on demand and signals do not change.

  Args:
    program: static settings.
    params: dense parameters in device memory, layers keyed by segment.
    banks: stored experts of each group, pinned host memory.
    state: state before the chunk; donated by `jit_prefill_chunk`.
    chunk: the tokens and where they go.
    all_logits: static; give the logits of every token instead of the last one's.
    staged: static; segments, see program.staging_thresholds.

  Returns:
    The state after the chunk, the row active if it shall generate more than the token drawn here,
    and what the chunk tells.

  Source: SPEC section 8.
  """
  model = program.model
  length = chunk.tokens.shape[0]
  lane = jnp.arange(length, dtype=jnp.int32)
  valid = lane < chunk.length
  positions = jnp.where(valid, chunk.offset + lane, 0)
  key, draw_key, layer_key = jax.random.split(state.key, 3)
  x = program_lib.embed(program, params, chunk.tokens)[None]
  tokens = stack.Tokens(positions[None], valid[None], chunk.row, chunk.tokens[None])
  layers = stack.run_layers(
    program,
    PREFILL,
    params,
    banks,
    dataclasses.replace(state, key=layer_key),
    x,
    tokens,
    staged=staged,
  )
  last = jnp.maximum(chunk.length - 1, 0)
  if all_logits:
    logits = program_lib.head(program, params, layers.x[0])
    last_logits = logits[last]
  else:
    logits = last_logits = program_lib.head(program, params, layers.x[0, last][None])[0]
  token = sample(last_logits[None], draw_key, program.engine.sampling)[0]
  remaining = chunk.max_new_tokens - 1
  ended = (
    jnp.isin(token, jnp.asarray(model.eos_token_ids, jnp.int32)) if model.eos_token_ids else False
  )
  new_state = dataclasses.replace(
    state,
    token=state.token.at[chunk.row].set(token),
    position=state.position.at[chunk.row].set(chunk.offset + chunk.length),
    remaining=state.remaining.at[chunk.row].set(remaining),
    active=state.active.at[chunk.row].set((remaining > 0) & ~jnp.asarray(ended)),
    kv=layers.kv,
    groups=layers.groups,
    counters=state.counters.at[PREFILL].set(layers.counters),
    key=key,
  )
  told = layers.told
  return new_state, PrefillOut(
    token, logits, told.topk_ids, layers.hits, told.scores, told.predicted
  )


jit_prefill_chunk = functools.partial(jax.jit, static_argnums=(0, 5, 6), donate_argnums=3)(
  prefill_chunk
)
