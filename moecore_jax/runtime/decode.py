"""The decode step: one compiled program that attends, routes, manages residency, loads, computes
and samples.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moecore_jax.runtime import program as program_lib
from moecore_jax.runtime import stack
from moecore_jax.runtime.compilation import CompilerOptions
from moecore_jax.runtime.program import Params, Program
from moecore_jax.runtime.sampling import sample
from moecore_jax.runtime.state import DECODE, DecodeState, StepOut


def decode_step(
  program: Program,
  params: Params,
  banks: tuple[dict[str, jax.Array], ...],
  state: DecodeState,
  ops: stack.Ops = stack.ROUTED,
) -> tuple[DecodeState, StepOut]:
  """Feeds every active row its next token and draws the one after.

  Args:
    program: static settings.
    params: dense parameters in device memory, layers keyed by segment.
    banks: stored experts of each group, pinned host memory; read by one-row copies only.
    state: state before the step; donated by `jit_decode_step`.
    ops: how routed experts run; benchmarks compare others.

  Returns:
    The state after the step and what the step tells. Rows that drew an end token or used up
    `remaining` are no longer active.
  """
  model, engine = program.model, program.engine
  active = state.active
  position = jnp.where(active, state.position, 0)
  key, draw_key, layer_key = jax.random.split(state.key, 3)
  x = program_lib.embed(program, params, state.token)[:, None]
  tokens = stack.Tokens(position[:, None], active[:, None], jnp.int32(0), state.token[:, None])
  layers = stack.run_layers(
    program,
    DECODE,
    params,
    banks,
    dataclasses.replace(state, key=layer_key),
    x,
    tokens,
    ops,
    program.streamed,
  )
  with jax.named_scope("head"):
    logits = program_lib.head(program, params, layers.x[:, 0])
  token = sample(logits, draw_key, engine.sampling)
  remaining = state.remaining - active.astype(jnp.int32)
  ended = (
    jnp.isin(token, jnp.asarray(model.eos_token_ids, jnp.int32)) if model.eos_token_ids else False
  )
  is_active = active & (remaining > 0) & ~jnp.asarray(ended)
  new_state = DecodeState(
    token=jnp.where(active, token, state.token),
    position=state.position + active.astype(jnp.int32),
    remaining=remaining,
    active=is_active,
    kv=layers.kv,
    groups=layers.groups,
    counters=state.counters.at[DECODE].set(layers.counters),
    key=key,
  )
  told = layers.told
  return new_state, StepOut(
    token, active, is_active, logits, told.topk_ids, layers.hits, told.scores, told.predicted
  )


@functools.cache
def jit_decode_step(options: CompilerOptions = ()) -> Callable[..., tuple[DecodeState, StepOut]]:
  """Returns the compiled decode step; equal options share it and its programs."""
  return jax.jit(
    decode_step, static_argnums=(0, 4), donate_argnums=3, compiler_options=dict(options)
  )
