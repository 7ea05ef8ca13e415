"""Times the link and the phases of a decode step on the present device.

Nothing is loaded: zeros stand for the weights, of one layer at a time, for times do not depend on
values. Each figure is the fastest of several calls of a program that repeats the work, divided by
the repetitions: whatever else the machine does only adds.

What comes out bounds the prefetch: between the prediction of a layer and its routing, a whole
number of transfers fits (`planner.prefetch_bound`).
"""

import importlib.metadata
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from moecore_jax import memory, planner
from moecore_jax.models import experts as experts_lib
from moecore_jax.models import hyper
from moecore_jax.models.attention.cache import cache_shapes
from moecore_jax.models.experts import expert_bytes
from moecore_jax.models.transformer import DecoderLayer
from moecore_jax.runtime import routed, stack
from moecore_jax.runtime.program import Program, make_program
from moecore_jax.specs import (
  DenseSpec,
  EngineSpec,
  ExpertGroup,
  LayerSpec,
  ModelSpec,
  MoESpec,
  ResidencySpec,
)

REPETITIONS, CALLS = 16, 7
_LINK_SIZES = (0.25, 0.5, 1.0, 2.0)  # of the largest expert, or of a megabyte
_MIN_LINK_BYTES = 1 << 20
_LINK_ROWS = 4


class Link(NamedTuple):
  """Transfers from pinned host memory to the device; one of s bytes takes tau + s / beta.

  Attributes:
    tau_s: launch overhead of one expert (two arrays), seconds.
    bytes_per_s: effective bandwidth (beta).
    points: measured (bytes, seconds).
  """

  tau_s: float
  bytes_per_s: float
  points: tuple[tuple[int, float], ...]


class LayerTimes(NamedTuple):
  """Seconds of the phases of one layer; 0 for what the layer lacks.

  Attributes:
    attention_s: norm, projections and attention over half the context.
    router_s: norm and router.
    experts_s: k experts, all on the device, and the shared expert.
    dense_s: norm and dense block.
  """

  attention_s: float
  router_s: float = 0.0
  experts_s: float = 0.0
  dense_s: float = 0.0


def calibrate(model: ModelSpec, residency: ResidencySpec, engine: EngineSpec) -> dict[str, Any]:
  """Measures the present device.

  Args:
    model: its shapes are used.
    residency: its policy and slots do not matter.
    engine: formats, batch rows and context.

  Returns:
    The figures in JSON types, units in their names; `link_experts` is n_comm of each MoE layer, for
    `residency.prefetch.link_experts`.

  Raises:
    RuntimeError: larger transfers did not take longer.
  """
  program = make_program(model, residency, engine)
  sizes = [expert_bytes(group, engine.expert_format) for group in model.expert_groups]
  link = measure_link(max(sizes))
  times = {layer: time_layer(program, layer) for layer in dict.fromkeys(model.layers)}
  by_layer = [times[layer] for layer in model.layers]
  windows = prefetch_windows(by_layer, model.moe_layers)
  moe_bytes = [sizes[model.group_of(layer)[0]] for layer in model.moe_layers]
  device = memory.default_device()
  return {
    "device": device.device_kind,
    "platform": device.platform,
    "versions": {"python": platform.python_version()}
    | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
    "batch_size": engine.batch_size,
    "position": engine.context_tokens // 2,
    "tau_s": link.tau_s,
    "bandwidth_bytes_per_s": link.bytes_per_s,
    "link_points": [{"bytes": size, "seconds": seconds} for size, seconds in link.points],
    "layers": [t._asdict() for t in by_layer],
    "prefetch_window_s": windows,
    "link_experts": list(planner.prefetch_bound(windows, moe_bytes, link.tau_s, link.bytes_per_s)),
  }


def prefetch_windows(times: Sequence[LayerTimes], moe_layers: Sequence[int]) -> list[float]:
  """Returns the seconds from each MoE layer's prediction to its routing (Delta).

  The experts of the MoE layer before, the layers between, the layer's own attention and router; 0
  for the first, which is not predicted. Loads that stretch a layer are left out.
  """
  windows = [0.0]
  for before, layer in itertools.pairwise(moe_layers):
    between = sum(t.attention_s + t.dense_s for t in times[before + 1 : layer])
    own = times[layer].attention_s + times[layer].router_s
    windows.append(times[before].experts_s + between + own)
  return windows


def measure_link(largest_bytes: int) -> Link:
  """Times copies of experts of several sizes, as the step makes them.

  Args:
    largest_bytes: of one stored expert of the model; a quarter, a half and twice of it are tried,
      too. Experts of less than 1 MB count as 1 MB: their copies are too short to be told apart.
  """
  points = []
  for share in _LINK_SIZES:
    size = int(share * max(largest_bytes, _MIN_LINK_BYTES))
    words = size // 12  # a third of an expert, in uint32
    shapes = {"gate_up": (_LINK_ROWS, 2 * words), "down": (_LINK_ROWS, words)}
    host = memory.placement("pinned_host")
    bank = {n: jax.device_put(np.zeros(s, np.uint32), host) for n, s in shapes.items()}
    pool = {n: jnp.zeros(s, jnp.uint32) for n, s in shapes.items()}

    @jax.jit
    def copy(bank, pool):
      def once(i, pool):
        row = i % _LINK_ROWS
        stored = routed.fetch(bank, row)
        return {n: lax.dynamic_update_index_in_dim(pool[n], stored[n], row, 0) for n in pool}

      return lax.fori_loop(0, REPETITIONS, once, pool)

    points.append((12 * words, _seconds(copy, bank, pool)))
  return fit_link(points)


def fit_link(points: Sequence[tuple[int, float]]) -> Link:
  """Fits seconds = tau + bytes / beta to measured transfers, by least squares of relative errors.

  Raises:
    RuntimeError: larger transfers did not take longer.
  """
  sizes, seconds = np.asarray(points, np.float64).T
  slope, tau = np.polyfit(sizes, seconds, 1, w=1 / seconds)
  if slope <= 0:
    raise RuntimeError(f"larger transfers did not take longer: {points}; is the machine busy?")
  return Link(max(0.0, float(tau)), float(1 / slope), tuple(points))


def time_layer(program: Program, layer: LayerSpec) -> LayerTimes:
  """Times the phases of one layer on as many tokens as a decode step has."""
  model, engine, dtype = program.model, program.engine, program.dtype
  graphdef, abstract = nnx.split(
    nnx.eval_shape(lambda: DecoderLayer(layer, model, dtype, nnx.Rngs(0)))
  )
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
  x = hyper.expand(jnp.ones((engine.batch_size, 1, model.embed_dim), dtype), model.hyper)

  def time_phase(body: Callable[..., Any], *state: Any) -> float:
    """Times body(module, x, *state) -> (x, *state), repeated."""

    @jax.jit
    def repeat(params, state):
      module = nnx.merge(graphdef, params)
      return lax.fori_loop(0, REPETITIONS, lambda _, state: body(module, *state), state)

    return _seconds(repeat, params, (x, *state))

  cache = {
    name: jnp.zeros((1, engine.batch_size, *shape), dtype)
    for name, shape in cache_shapes(layer.attention, engine.context_tokens).items()
  }
  positions = jnp.full((engine.batch_size, 1), engine.context_tokens // 2, jnp.int32)
  valid = jnp.ones_like(positions, bool)
  tokens = stack.Tokens(positions, valid, jnp.int32(0), jnp.zeros_like(positions))
  attention = time_phase(
    lambda module, x, caches: stack.attend(
      module, jnp.int32(0), x, caches, 0, tokens, engine.kv_block_tokens
    ),
    {0: cache} | stack.no_picks([layer], engine.context_tokens, tokens),
  )
  if isinstance(layer.mlp, DenseSpec):
    dense = time_phase(_run_dense)
    return LayerTimes(attention, dense_s=dense)
  pool = _pool(program, _group_of(model, layer))
  return LayerTimes(
    attention,
    router_s=time_phase(_route),
    experts_s=time_phase(lambda module, *state: _run_experts(program, layer, module, *state), pool),
  )


def _run_dense(module: Any, x: jax.Array):
  h, mix = module.mlp_input(x)
  return (module.add(x, module.mlp(h), mix),)


def _route(module: Any, x: jax.Array):
  routing = module.mlp.router(module.mlp_input(x)[0][:, 0], jnp.zeros(len(x), jnp.int32))
  return (x + routing.topk_weights.mean().astype(x.dtype),)


def _run_experts(
  program: Program, layer: LayerSpec, module: Any, x: jax.Array, pool: experts_lib.ExpertArrays
):
  assert isinstance(layer.mlp, MoESpec)
  fan_out = layer.mlp.router.num_experts_per_tok
  h, mix = module.mlp_input(x)
  h = h[:, 0]
  ids = jnp.broadcast_to(jnp.arange(fan_out, dtype=jnp.int32), (h.shape[0], fan_out))

  def run(i, outputs):
    return experts_lib.run_on_all_rows(
      outputs, h, ids, i, lambda rows: routed.run_expert(program, pool, i, rows)
    )

  outputs = lax.fori_loop(0, fan_out, run, jnp.zeros((*ids.shape, h.shape[1]), h.dtype))
  y = experts_lib.combine(outputs, jnp.full(ids.shape, 1 / fan_out, jnp.float32))
  return module.add(x, module.mlp.add_shared(y, h)[:, None], mix), pool


def _group_of(model: ModelSpec, layer: LayerSpec) -> ExpertGroup:
  return model.expert_groups[model.group_of(model.layers.index(layer))[0]]


def _pool(program: Program, group: ExpertGroup) -> experts_lib.ExpertArrays:
  """Returns as many experts as a token takes."""
  layout = experts_lib.bank_layout(group, program.engine.expert_format)
  rows = group.num_experts_per_tok
  return {name: jnp.zeros((rows, *shape[1:]), dtype) for name, (shape, dtype) in layout.items()}


def _seconds(function: Callable[..., Any], *args: Any) -> float:
  """Returns the seconds of one repetition inside a jitted function."""
  jax.block_until_ready(function(*args))
  times = []
  for _ in range(CALLS):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    times.append(time.perf_counter() - start)
  return min(times) / REPETITIONS
