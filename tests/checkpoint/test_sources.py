"""Quantised published weights are read as the values that they stand for."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from moecore_jax.checkpoint import sources
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.checkpoint.safetensors_file import read_header
from moecore_jax.families import gpt_oss
from moecore_jax.testing.random_checkpoint import write_checkpoint

NAMES = {
  "float32": "F32",
  "float8_e4m3fn": "F8_E4M3",
  "float8_e8m0fnu": "F8_E8M0",
  "uint8": "U8",
  "int64": "I64",
}
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
RNG = np.random.default_rng(0)


def write(file, tensors):
  """Writes a safetensors file of any dtype."""
  header, data = {}, b""
  for key, array in tensors.items():
    begin, data = len(data), data + array.tobytes()
    dtype = NAMES[array.dtype.name]
    header[key] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
  text = json.dumps(header).encode()
  file.write_bytes(struct.pack("<Q", len(text)) + text + data)
  return read_header(file)


def floats8(shape):
  return RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)


def exponents(shape):
  return (2.0 ** RNG.integers(-9, 4, shape)).astype(ml_dtypes.float8_e8m0fnu)


def check(tensors, key, wanted, dtype, rows):
  source = sources.find(key, tensors)
  assert source.shape == wanted.shape
  assert source.dtype == dtype
  assert set(source.keys) == set(tensors)
  for start, stop in [(0, None), *rows]:
    got = source.read(start, stop)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float64), wanted[start:stop])


@pytest.mark.parametrize("kind", ["scale_inv", "scale"])
def test_float8_with_block_scales(tmp_path, kind):
  values = floats8((300, 200))
  if kind == "scale_inv":
    scales, dtype = RNG.normal(size=(3, 2)).astype(np.float32), np.float32
    key = "x.weight_scale_inv"
  else:
    scales, dtype, key = exponents((3, 2)), ml_dtypes.bfloat16, "x.scale"
  tensors = write(tmp_path / "t.safetensors", {"x.weight": values, key: scales})
  blown = np.repeat(np.repeat(scales.astype(np.float32), 128, 0), 128, 1)[:300, :200]
  wanted = (values.astype(np.float32) * blown).astype(np.float64)
  check(tensors, "x.weight", wanted, dtype, [(0, 128), (100, 131), (250, 300), (127, 128)])


def nibbles(codes):
  """Two codes a byte, the earlier in the low bits."""
  return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def test_float4_with_group_scales(tmp_path):
  codes, scales = RNG.integers(0, 16, (6, 96), np.uint8), exponents((6, 3))
  tensors = write(tmp_path / "t.safetensors", {"e.weight": nibbles(codes), "e.scale": scales})
  wanted = np.array(FP4)[codes] * np.repeat(scales.astype(np.float64), 32, 1)
  check(tensors, "e.weight", wanted, ml_dtypes.bfloat16, [(2, 3), (1, 6)])


def test_fused_float4_experts(tmp_path):
  codes, scales = RNG.integers(0, 16, (3, 8, 64), np.uint8), exponents((3, 8, 2))
  stored = {
    "up_blocks": nibbles(codes).reshape(3, 8, 2, 16),
    "up_scales": scales.view(np.uint8),
  }
  tensors = write(tmp_path / "t.safetensors", stored)
  wanted = np.array(FP4)[codes] * np.repeat(scales.astype(np.float64), 32, 2)
  check(tensors, "up", wanted.swapaxes(1, 2), ml_dtypes.bfloat16, [(1, 2), (2, 3)])


@pytest.mark.parametrize(
  ("tensors", "words"),
  [
    ({"x.weight": floats8((4, 4))}, r"dtype is F8_E4M3, .* and x\.scale"),
    ({"x.weight": floats8((4, 4)), "x.weight_scale_inv": np.ones((1, 2), np.float32)}, "shape is"),
    ({"x.weight": np.zeros((4, 16), np.uint8), "x.scale": np.ones((4, 1), np.float32)}, "dtype is"),
    (
      {"x.weight": floats8((4, 4)), "x.weight_scale_inv": exponents((1, 1))},
      "F8_E8M0, expected F32",
    ),
    ({"x.weight": floats8(4), "x.scale": exponents(1)}, r"shape is \(4,\), expected a matrix"),
    ({"x.weight": np.zeros((4, 24), np.uint8), "x.scale": exponents((4, 1))}, "multiple of 16"),
    ({"x.weight": np.zeros((), np.uint8), "x.scale": exponents((1, 1))}, "expected a matrix"),
  ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path, tensors, words):
  entries = write(tmp_path / "t.safetensors", tensors)
  with pytest.raises(ValueError, match=words):
    sources.find("x.weight", entries).shape  # noqa: B018


def test_not_a_number_is_refused(tmp_path):
  values = floats8((4, 4))
  values[1, 2] = np.nan
  tensors = {"x.weight": values, "x.weight_scale_inv": np.ones((1, 1), np.float32)}
  source = sources.find("x.weight", write(tmp_path / "t.safetensors", tensors))
  source.read(2, 4)
  with pytest.raises(ValueError, match=r"t\.safetensors: tensor x\.weight: has NaN"):
    source.read()


@pytest.mark.parametrize("wrong", [-1, 8])
def test_ids_out_of_range_are_refused(tmp_path, wrong):
  ids = np.array([[0, 7], [3, 2], [wrong, 1]])
  source = sources.find("x", write(tmp_path / "t.safetensors", {"x": ids}), 8)
  np.testing.assert_array_equal(source.read(0, 2), ids[:2])
  with pytest.raises(ValueError, match=rf"t\.safetensors: tensor x: has ids .*{wrong}"):
    source.read()


def test_a_checkpoint_of_mixed_weights(tmp_path):
  """Every published tensor is used: scales belong to their weight."""
  folder = write_checkpoint(tmp_path / "deepseek")
  plain = PublishedCheckpoint(folder)
  fingerprint, key = plain.fingerprint(), "model.layers.1.mlp.experts.3.up_proj.weight"
  tensors = {k: plain.read(k) for k in plain.keymap.shapes}
  tensors |= {k: np.zeros(plain.tensors[k].shape, np.float32) for k in plain.keymap.skipped}
  tensors[key] = floats8(tensors[key].shape)
  tensors[f"{key}_scale_inv"] = np.full((1, 1), 0.25, np.float32)
  write(folder / "model.safetensors", tensors)
  mixed = PublishedCheckpoint(folder)
  np.testing.assert_array_equal(mixed.read(key), tensors[key].astype(np.float32) / 4)
  assert mixed.fingerprint() != fingerprint
  tensors["model.stray_scale_inv"] = np.ones((1, 1), np.float32)
  write(folder / "model.safetensors", tensors)
  with pytest.raises(ValueError, match=r"1 tensors are unknown, e\.g\. model\.stray_scale_inv"):
    PublishedCheckpoint(folder)


def test_gpt_oss_experts_are_read_from_blocks(tmp_path):
  config = {
    "model_type": "gpt_oss",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["full_attention"],
  }
  folder = write_checkpoint(tmp_path / "gpt", config)
  plain = PublishedCheckpoint(folder)
  key = "model.layers.0.mlp.experts.gate_up_proj"
  tensors = {k: plain.read(k) for k in plain.keymap.shapes if k != key}
  codes, scales = RNG.integers(0, 16, (4, 64, 32), np.uint8), exponents((4, 64, 1))
  tensors[f"{key}_blocks"] = nibbles(codes).reshape(4, 64, 1, 16)
  tensors[f"{key}_scales"] = scales.view(np.uint8)
  write(folder / "model.safetensors", tensors)
  wanted = (np.array(FP4)[codes] * scales.astype(np.float64)).swapaxes(1, 2)
  np.testing.assert_array_equal(PublishedCheckpoint(folder).read(key, 2, 3)[0], wanted[2])
  assert plain.spec == gpt_oss.model_spec(config)
