"""Blockwise attention over a cache equals attention over whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.models.attention.blockwise import blockwise_attention
from moecore_jax.models.attention.cache import pad_rows, padded_row_dim


def dense(queries, rows, positions):
  scores = np.einsum("bthr,bsr->bths", queries, rows)
  seen = np.arange(rows.shape[1])[None, None, None] <= positions[:, :, None, None]
  scores = np.where(seen, scores, -np.inf)
  shares = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("bths,bsr->bthr", shares / shares.sum(-1, keepdims=True), rows)


@pytest.mark.parametrize("positions", [[[0], [30]], [[15], [16]], [[47], [3]]])
def test_equals_a_dense_softmax_and_reads_no_further_than_needed(positions):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(2, 48, 8)).astype(np.float32)
  queries = rng.normal(size=(2, 1, 3, 8)).astype(np.float32)
  positions = np.array(positions, np.int32)
  wanted = dense(queries, rows, positions)
  used = (positions.max() // 16 + 1) * 16
  cache = np.concatenate([rows[:, :used], np.full_like(rows[:, used:], np.nan)], axis=1)

  @jax.jit
  def attend(queries, positions, cache):
    def read_block(i):
      rows = jax.lax.dynamic_slice_in_dim(cache, i * 16, 16, axis=1)[:, :, None]
      return rows, rows

    return blockwise_attention(queries[:, :, None], positions, read_block, 16, 8)[:, :, 0]

  got = attend(queries, positions, jnp.asarray(cache))
  np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_rows_are_padded_to_whole_lanes():
  assert [padded_row_dim(n) for n in (1, 128, 129, 576)] == [128, 128, 256, 640]
  padded = pad_rows(jnp.ones((2, 3, 5)))
  assert padded.shape == (2, 3, 128)
  assert float(padded.sum()) == 30
