"""Arguments of the compiled programs as shapes, dtypes and memory kinds: nothing is allocated."""

from typing import Any

import jax
import jax.numpy as jnp

from moecore_jax import memory
from moecore_jax.checkpoint.template import bank_template, dense_template
from moecore_jax.runtime.compilation import COMPILER_OPTIONS
from moecore_jax.runtime.decode import jit_decode_step
from moecore_jax.runtime.prefill import Chunk, jit_prefill_chunk
from moecore_jax.runtime.program import Program, by_segment, make_program, staging_thresholds
from moecore_jax.runtime.state import init_state
from moecore_jax.specs import EngineSpec, ModelSpec, ResidencySpec


def program_names(program: Program, residency: ResidencySpec) -> tuple[str, ...]:
  """Returns the names of an engine's programs: decode, prefill_T for each bucket of T tokens, and
  staged_T where prompts of T tokens stage layers.
  """
  buckets = program.engine.prefill_buckets
  staged = (f"staged_{t}" for t in buckets if staged_segments(program, residency, t))
  return ("decode", *(f"prefill_{t}" for t in buckets), *staged)


def staged_segments(program: Program, residency: ResidencySpec, tokens: int) -> tuple[int, ...]:
  """Returns the segments that a prompt of this length stages."""
  thresholds = staging_thresholds(program, residency)
  return tuple(s for s, least in thresholds.items() if tokens >= least)


class Programs:
  """The compiled programs of an engine that would run on one device.

  Args:
    model: the model.
    residency: slots and policy.
    engine: shapes and formats.
    device: where the arguments are placed; see `bench.described.tracing_device`.
  """

  def __init__(
    self, model: ModelSpec, residency: ResidencySpec, engine: EngineSpec, device: jax.Device
  ):
    self.program = make_program(model, residency, engine)
    self._residency, self._device = residency, device
    self.params = self._placed(_params(self.program))
    self.banks = self._placed(bank_template(model, engine.expert_format)["experts"])
    self.state = self._placed(jax.eval_shape(lambda: init_state(self.program, residency)))

  def jitted(self, name: str) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jitted function of a program and its arguments."""
    args = (self.program, self.params, self.banks, self.state)
    if name == "decode":
      return jit_decode_step(COMPILER_OPTIONS.get(self._device.platform, ())), args
    kind, _, length = name.partition("_")
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    tokens = jax.ShapeDtypeStruct((int(length),), jnp.int32)
    chunk = self._placed(Chunk(tokens, scalar, scalar, scalar, scalar))
    staged: tuple[int, ...] = ()
    if kind == "staged":
      staged = staged_segments(self.program, self._residency, int(length))
    return jit_prefill_chunk, (*args, chunk, False, staged)

  def _placed(self, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _on(leaf, self._device), tree)


def _on(leaf: jax.ShapeDtypeStruct, device: jax.Device) -> jax.ShapeDtypeStruct:
  kind = "device" if leaf.sharding is None else leaf.sharding.memory_kind
  at = memory.placement(kind, device)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


def _params(program: Program) -> dict[str, Any]:
  dense = dense_template(program.model, program.dtype, program.engine.dense_format)
  layers = by_segment(program, dense["layers"], _stacked)
  return {k: v for k, v in dense.items() if k not in ("layers", "mtp")} | {"layers": layers}


def _stacked(trees: list[Any]) -> Any:
  return jax.tree.map(
    lambda *leaves: jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype), *trees
  )
