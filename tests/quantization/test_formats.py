"""Storage formats of expert rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from moecore_jax.quantization import formats


@pytest.mark.parametrize("shape", [(4, 6), (3, 8, 10)])
def test_bfloat16_words_hold_the_values_bit_for_bit(shape):
  values = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
  words = formats.pack(values, "bfloat16")
  assert words.dtype == np.uint32
  assert words.shape == (*shape[:-1], shape[-1] // 2)
  for dtype in (jnp.bfloat16, jnp.float32):
    unpacked = formats.unpack(jnp.asarray(words), "bfloat16", dtype)
    assert unpacked.dtype == dtype
    np.testing.assert_array_equal(np.asarray(unpacked, np.float32), values.astype(np.float32))


def test_packing_rounds_to_nearest_even():
  values = np.array([[1 + 2**-8, 1 + 3 * 2**-8]], np.float32)  # halfway between bfloat16 numbers
  unpacked = formats.unpack(jnp.asarray(formats.pack(values, "bfloat16")), "bfloat16", jnp.float32)
  np.testing.assert_array_equal(unpacked, [[1.0, 1 + 2**-6]])


def test_float32_is_kept():
  values = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
  stored = formats.pack(values, "float32")
  np.testing.assert_array_equal(formats.unpack(jnp.asarray(stored), "float32", jnp.float32), values)


def test_columns_that_do_not_fill_words_are_refused():
  with pytest.raises(ValueError, match="7 columns"):
    formats.pack(np.zeros((2, 7), np.float32), "bfloat16")
