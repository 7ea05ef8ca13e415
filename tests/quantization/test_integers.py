"""W4A8 and W8A8: what is stored, what it stands for, and products with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moecore_jax.quantization import formats
from moecore_jax.quantization.matmul import affine, quantize_tokens

FORMATS = ("w8a8", "w4a8", "w4a8_g32", "w4a8_g64", "w4a8_g128", "w4a8_g256")


def weights(shape=(256, 48), seed=0):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=shape) * rng.lognormal(size=shape[-1])).astype(np.float32)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_values_are_within_half_a_step(fmt, has_bias):
  values = weights((2, 256 + has_bias, 48))
  stored = formats.pack(values, fmt, has_bias)
  assert stored.dtype == np.uint32
  assert stored.shape == (2, *formats.storage_shape(256, 48, fmt, has_bias))
  held = formats.unpack_host(stored, fmt, has_bias)
  in_program = jax.jit(lambda s: formats.unpack(s, fmt, jnp.float32, has_bias))(stored)
  np.testing.assert_array_equal(in_program, held)
  size = formats.group_rows(fmt, 256)
  grouped = np.abs(values[:, :256]).reshape(2, -1, size, 48)
  largest = 127 if fmt == "w8a8" else 7
  step = np.repeat(grouped.max(2) / largest, size, axis=1)
  assert (np.abs(held - values)[:, :256] <= step * (0.5 + 1e-5)).all()
  np.testing.assert_array_equal(held[:, 256:], values[:, 256:])  # a bias is kept


def test_zero_columns_and_the_largest_steps():
  values = np.zeros((4, 16), np.float32)
  values[:, 1] = [-7, 7, 3, -4]
  held = formats.unpack_host(formats.pack(values, "w4a8"), "w4a8")
  np.testing.assert_array_equal(held, values)


@given(st.integers(0, 2**32 - 1))
def test_all_nibbles_survive(seed):
  values = np.random.default_rng(seed).integers(-7, 8, (8, 16)).astype(np.float32)
  values[0] = 7  # so that a step is 1
  np.testing.assert_array_equal(formats.unpack_host(formats.pack(values, "w4a8"), "w4a8"), values)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products_equal_integer_arithmetic(fmt, has_bias):
  values, x = weights((256 + has_bias, 48)), weights((5, 256), seed=1)
  x[2] = 0
  stored = formats.pack(values, fmt, has_bias)
  held = formats.unpack_host(stored, fmt, has_bias).astype(np.float64)
  scales = np.abs(x).max(-1, keepdims=True) / np.float32(127)
  tokens = np.rint(x / np.where(scales > 0, scales, np.float32(1))) * scales.astype(np.float64)
  wanted = tokens @ held[:256] + held[256:].sum(0)
  got = jax.jit(lambda x, s: affine(x, s, fmt))(x, stored)
  np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
  ("fmt", "bound"),
  [
    ("w8a8", 0.013),
    ("w4a8", 0.15),
    ("w4a8_g256", 0.14),
    ("w4a8_g128", 0.125),
    ("w4a8_g64", 0.115),
    ("w4a8_g32", 0.105),
  ],
)
def test_relative_error_of_a_product(fmt, bound):
  """Of normal weights and activations: root mean square error over root mean square output."""
  rng = np.random.default_rng(2)
  values, x = rng.normal(size=(512, 64)), rng.normal(size=(64, 512))
  values, x = values.astype(np.float32), x.astype(np.float32)
  got = np.asarray(affine(jnp.asarray(x), jnp.asarray(formats.pack(values, fmt)), fmt))
  error = np.sqrt(((got - x @ values) ** 2).mean() / ((x @ values) ** 2).mean())
  assert 0.8 * bound < error <= bound


def test_tokens_are_quantised_one_by_one():
  x = jnp.asarray([[0.0, 0.0], [1.0, -2.0], [1e-3, 1e-3]])
  values, scales = quantize_tokens(x)
  assert values.dtype == jnp.int8
  np.testing.assert_array_equal(values, [[0, 0], [64, -127], [127, 127]])
  np.testing.assert_allclose(np.multiply(values, scales), x, atol=2 / 127)


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="12 columns"):
    formats.pack(weights((64, 12)), "w4a8")
  with pytest.raises(ValueError, match="100 rows"):
    formats.pack(weights((100, 16)), "w4a8_g32")
