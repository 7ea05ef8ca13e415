"""Latent attention to the keys that an indexer chooses: in steps of any length it is dense
attention under the mask of the choice, and it reads nothing but the chosen rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moecore_jax.models.attention.cache import LayerCache, Tokens, cache_shapes
from moecore_jax.models.attention.mla import MLAttention
from moecore_jax.specs import IndexerSpec, MLASpec, RopeSpec

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("quick_compilation")]

DIM, ROWS, LENGTH, CHUNK, BLOCK, TOPK = 12, 2, 48, 19, 8, 5
ROPE = RopeSpec(4)
SPECS = [  # the second layer attends to what the first has chosen
  MLASpec(3, 10, 8, 6, 4, 5, ROPE, IndexerSpec(2, 8, TOPK, ROPE, is_shared))
  for is_shared in (False, True)
]


def draw(*shape: int) -> np.ndarray:
  return np.random.default_rng(shape).normal(0, 0.5, shape).astype(np.float32)


def module_of(spec: MLASpec) -> MLAttention:
  graphdef, params = nnx.split(
    nnx.eval_shape(lambda: MLAttention(spec, DIM, jnp.float32, nnx.Rngs(0)))
  )
  return nnx.merge(graphdef, jax.tree.map(lambda p: jnp.asarray(draw(*p.shape)), params))


X = 4 * draw(ROWS, LENGTH, DIM)


def some_caches(context: int) -> list[dict[str, np.ndarray]]:
  """Two layers' caches of each kind, full of what others left."""
  return [
    {name: draw(2, ROWS, *shape) for name, shape in cache_shapes(spec, context).items()}
    for spec in SPECS
  ]


@pytest.fixture(scope="module")
def layers():
  return [module_of(spec) for spec in SPECS]


@pytest.fixture(scope="module")
def run(layers):
  @functools.partial(jax.jit, donate_argnums=0)
  def run(caches, x, at, valid, row):
    tokens, picks, outputs, written = Tokens(at, valid, row, at), None, [], []
    for layer, arrays in zip(layers, caches, strict=True):
      y, cache = layer.attend(x, LayerCache(arrays, jnp.int32(1), tokens, picks), BLOCK)
      picks = cache.picks
      outputs.append(y)
      written.append(cache.arrays)
    return written, jnp.stack(outputs, axis=2), picks

  return run


@pytest.fixture(scope="module")
def step(run):
  """Runs both layers on tokens at int32 [B, T] positions of the rows from `row` on."""

  def step(caches, at, valid, row=0):
    rows = X[row : row + len(at)]
    x = np.take_along_axis(rows, np.minimum(at, LENGTH - 1)[..., None], axis=1)
    x = np.where(valid[..., None], x, 99).astype(np.float32)
    caches, y, picks = run(caches, x, np.where(valid, at, 0), valid, np.int32(row))
    return caches, np.asarray(y), np.asarray(picks)

  return step


@pytest.fixture(scope="module")
def whole(layers):
  """Outputs [B, T, layer, D] and the choice [B, T, TOPK] of dense attention under a mask."""

  @jax.jit
  def run(x):
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    y, picks = layers[0](x, positions)
    return jnp.stack([y, layers[1](x, positions, picks)[0]], axis=2), picks

  return jax.tree.map(np.asarray, run(X))


@pytest.fixture(scope="module")
def filled(step):
  """Outputs and choices of all tokens, and the caches behind them: row 0 is far ahead of row 1, and
  both hold what others left."""
  caches = some_caches(LENGTH)
  outputs = np.full((ROWS, LENGTH, len(SPECS), DIM), np.nan, np.float32)
  chosen, used = np.full((ROWS, LENGTH, TOPK), -2), np.zeros(ROWS, np.int32)
  for row, count in ((0, 19), (0, 1), (0, 2), (0, 13), (1, 3)):
    lane = np.arange(CHUNK, dtype=np.int32)[None]
    caches, y, picks = step(caches, used[row] + lane, lane < count, row)
    outputs[row, used[row] :][:count], chosen[row, used[row] :][:count] = (
      y[0, :count],
      picks[0, :count],
    )
    used[row] += count
  while np.any(active := used < LENGTH):
    caches, y, picks = step(caches, used[:, None], active[:, None])
    outputs[active, used[active]], chosen[active, used[active]] = y[active, 0], picks[active, 0]
    used += active
  return outputs, chosen, jax.tree.map(np.asarray, caches)


def test_steps_of_any_length_are_dense_attention_under_a_mask(filled, whole):
  np.testing.assert_allclose(filled[0], whole[0], atol=2e-5)


def test_the_choice_is_the_same_however_it_is_made(filled, whole):
  np.testing.assert_array_equal(np.sort(filled[1], -1), np.sort(whole[1], -1))
  seen = np.minimum(np.arange(LENGTH) + 1, TOPK)
  np.testing.assert_array_equal((filled[1] >= 0).sum(-1), np.broadcast_to(seen, (ROWS, LENGTH)))


def test_nothing_but_the_choice_is_read(filled, step):
  outputs, chosen, caches = filled
  last = np.full((ROWS, 1), LENGTH - 1, np.int32)
  poisoned = []
  for arrays in caches:
    latent = np.full_like(arrays["latent"], np.nan)
    for row, picks in enumerate(chosen[:, -1]):
      latent[:, row, picks] = arrays["latent"][:, row, picks]
    poisoned.append(arrays | {"latent": latent})
  _, y, picks = step(poisoned, last, last > 0)
  np.testing.assert_array_equal(picks[:, 0], chosen[:, -1])
  np.testing.assert_array_equal(y[:, 0], outputs[:, -1])


def test_memory_of_a_step_does_not_follow_the_capacity(run):
  temp = []
  for context in (LENGTH, 100 * LENGTH):
    caches, at = some_caches(context), np.zeros((ROWS, 1), np.int32)
    x = np.zeros((ROWS, 1, DIM), np.float32)
    memory = run.lower(caches, x, at, at == 0, np.int32(0)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(a.nbytes for a in jax.tree.leaves(caches))
    temp.append(memory.temp_size_in_bytes)
  assert temp[0] == temp[1]
