"""Attention over compressed entries: in steps of any length it is that over a whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moecore_jax.models.attention.cache import LayerCache, Tokens, cache_shapes
from moecore_jax.models.attention.compressed import CompressedAttention
from moecore_jax.specs import CompressedSpec, CompressionSpec, IndexerSpec, RopeSpec

pytestmark = pytest.mark.cover

DIM, ROWS, LENGTH, CHUNK, BLOCK = 12, 2, 59, 13, 4
ROPE = RopeSpec(4, is_trailing=True)
KINDS = {
  "best": CompressionSpec(4, True, IndexerSpec(2, 8, 3, ROPE)),
  "all": CompressionSpec(8),
}


def spec_of(kind):
  return CompressedSpec(3, 8, 10, 1, 6, 5, ROPE, KINDS[kind])


@functools.cache
def module_of(kind):
  graphdef, params = nnx.split(
    nnx.eval_shape(lambda: CompressedAttention(spec_of(kind), DIM, 1e-6, jnp.float32, nnx.Rngs(0)))
  )
  rng = np.random.default_rng(1)
  draw = functools.partial(rng.normal, 0.0, 0.5)
  return graphdef, jax.tree.map(lambda p: jnp.asarray(draw(p.shape), p.dtype), params)


@functools.cache
def step_of(kind):
  graphdef, params = module_of(kind)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(arrays, x, tokens):
    cache = LayerCache(arrays, jnp.int32(1), tokens)
    y, cache = nnx.merge(graphdef, params).attend(x, cache, BLOCK)
    return cache.arrays, y

  return step


def some_caches(kind, context):
  """Two layers' caches, full of what others left."""
  rng = np.random.default_rng(2)
  shapes = cache_shapes(spec_of(kind), context)
  return {
    name: jnp.asarray(rng.normal(size=(2, ROWS, *shape)), jnp.float32)
    for name, shape in shapes.items()
  }


@functools.cache
def whole_of(kind):
  """A stream, what a pass over it gives, and the entries that an indexer chooses."""
  graphdef, params = module_of(kind)
  x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, DIM)).astype(np.float32)
  positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
  return x, *jax.jit(lambda x: nnx.merge(graphdef, params)(x, positions))(x)


def prefill(kind, arrays, x, row, start, count):
  """Returns the caches and the outputs [count, D] of the next tokens of a row."""
  lane = np.arange(CHUNK, dtype=np.int32)
  valid = lane < count
  at = np.where(valid, start + lane, 0)
  chunk = np.where(valid[:, None], x[row, np.minimum(at, LENGTH - 1)], 99)[None]
  arrays, y = step_of(kind)(arrays, chunk, Tokens(at[None], valid[None], jnp.int32(row), at[None]))
  return arrays, y[0, :count]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_any_length_are_one_sequence(kind):
  """59 tokens are three blocks and more of entries, the last block cut short."""
  x, wanted, _ = whole_of(kind)
  step, arrays, got = step_of(kind), some_caches(kind, 60), np.full(x.shape, np.nan, np.float32)
  others = {name: np.asarray(array[0]) for name, array in arrays.items()}
  used = np.zeros(ROWS, np.int32)
  for row, counts in enumerate([(13, 1, 2, 13, 7), (3, 4)]):
    for count in counts:
      arrays, y = prefill(kind, arrays, x, row, used[row], count)
      got[row, used[row] :][:count] = y
      used[row] += count
  for i in range(LENGTH - used.min()):
    active = (used < LENGTH) & ((i % 3 > 0) | (np.arange(ROWS) > 0))  # row 0 pauses
    at = np.where(active, used, 0).astype(np.int32)[:, None]
    tokens = Tokens(at, active[:, None], jnp.int32(0), at)
    arrays, y = step(arrays, x[np.arange(ROWS), at[:, 0]][:, None], tokens)
    got[active, used[active]] = y[active, 0]
    used += active
  np.testing.assert_array_equal(used, LENGTH)
  np.testing.assert_allclose(got, wanted, atol=2e-5)
  for name, array in others.items():
    np.testing.assert_array_equal(arrays[name][0], array)


@pytest.mark.usefixtures("quick_compilation")
def test_entries_that_are_not_chosen_are_not_read():
  x, wanted, picks = whole_of("best")
  arrays = some_caches("best", 60)
  for row in range(ROWS):
    for start in range(0, LENGTH - 1, CHUNK):
      count = min(CHUNK, LENGTH - 1 - start)
      arrays, _ = prefill("best", arrays, x, row, start, count)
  entries = np.full_like(arrays["entries"], np.nan)
  for row, chosen in enumerate(np.asarray(picks[:, -1])):
    entries[:, row, chosen] = arrays["entries"][:, row, chosen]
  at = jnp.full((ROWS, 1), LENGTH - 1, jnp.int32)
  tokens = Tokens(at, at > 0, jnp.int32(0), at)
  _, y = step_of("best")(arrays | {"entries": jnp.asarray(entries)}, x[:, -1:], tokens)
  np.testing.assert_allclose(y, wanted[:, -1:], atol=2e-5)


def test_memory_of_a_step_does_not_follow_the_capacity():
  temp = []
  for context in (60, 6000):
    arrays = some_caches("best", context)
    at = jnp.zeros((ROWS, 1), jnp.int32)
    args = arrays, jnp.zeros((ROWS, 1, DIM)), Tokens(at, at == 0, jnp.int32(0), at)
    memory = step_of("best").lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(array.nbytes for array in arrays.values())
    temp.append(memory.temp_size_in_bytes)
  assert temp[0] == temp[1]


def test_a_short_context_caches_the_window_alone():
  spec = spec_of("best")
  assert cache_shapes(spec, 3).keys() == {"window"}
  assert cache_shapes(spec, 12).keys() == {"window", "entries", "entries_tokens"}
  assert cache_shapes(spec, 59)["index_entries"] == (14, 128)
