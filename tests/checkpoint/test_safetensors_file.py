"""The reader of one file, against files written by the safetensors library and damaged ones."""

import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moecore_jax.checkpoint import safetensors_file

TENSORS = {
  "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
  "b.weight": np.array([1.5, -2.0, 3e38, 0], ml_dtypes.bfloat16),
  "c.weight": np.array([[0.25]], np.float16),
  "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "model.safetensors"
  safetensors.numpy.save_file(TENSORS, path, metadata={"format": "pt"})
  return path


def _read_all(path):
  return {
    key: safetensors_file.read_tensor(key, entry)
    for key, entry in safetensors_file.read_header(path).items()
  }


def test_reads_what_the_library_wrote(file):
  got = _read_all(file)
  assert got.keys() == TENSORS.keys()
  for key, want in TENSORS.items():
    assert got[key].dtype == want.dtype
    np.testing.assert_array_equal(got[key], want)


def _write(path, header, data=b""):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(begin, end, shape=(1,), dtype="F32"):
  return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HEADERS = {
  "a gap": ({"x": _entry(4, 8)}, b"12345678", "tensor x: starts at byte"),
  "an overlap": ({"x": _entry(0, 4), "y": _entry(2, 6)}, b"123456", "tensor y: starts at byte"),
  "bytes missing": ({"x": _entry(0, 4)}, b"12", "truncated"),
  "bytes left": ({"x": _entry(0, 4)}, b"12345678", "longer than its header says"),
  "shape and bytes": ({"x": _entry(0, 8, (3,))}, b"12345678", "tensor x: shape \\[3\\] of F32"),
  "negative size": ({"x": _entry(8, 4)}, b"12345678", "tensor x: .*corrupt"),
  "negative dim": ({"x": _entry(0, 4, (-1,))}, b"1234", "tensor x: .*corrupt"),
  "shape of text": ({"x": _entry(0, 4) | {"shape": "1"}}, b"1234", "tensor x: .*corrupt"),
  "offsets in part": ({"x": _entry(0.5, 4)}, b"1234", "tensor x: .*corrupt"),
  "no offsets": ({"x": {"dtype": "F32", "shape": [1]}}, b"1234", "tensor x: .*corrupt"),
  "entry of text": ({"x": "F32"}, b"1234", "tensor x: .*corrupt"),
  "a list": ([], b"", "not an object"),
  "no JSON": (b"{'x': 1}", b"", "header is corrupt"),
  "not UTF-8": (b'{"\xff": 1}', b"", "header is corrupt"),
  "nested deeply": (b'{"x": ' * 5000 + b"1" + b"}" * 5000, b"", "nested too deeply"),
  "a long name": ({"x" * 9999: _entry(0, 4)}, b"1234", "is no name of a tensor"),
  "a name of two lines": ({"x\ny": _entry(0, 4)}, b"1234", "'x.*y' is no name of a tensor"),
  "a long dtype": ({"x": _entry(0, 4, dtype="F32" * 99)}, b"1234", "tensor x: .*corrupt"),
  "many dims": ({"x": _entry(0, 4, (1,) * 99)}, b"1234", "tensor x: .*corrupt"),
  "a huge dim": ({"x": _entry(0, 0, (0, 10**400))}, b"", "tensor x: .*corrupt"),
  "a key twice": (b'{"x": {}, "x": {}}', b"", "'x' is listed twice"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers(tmp_path, case):
  header, data, words = HEADERS[case]
  path = tmp_path / "model.safetensors"
  _write(path, header, data)
  with pytest.raises(ValueError, match=words) as e:
    safetensors_file.read_header(path)
  assert str(path) in str(e.value)
  assert len(str(e.value)) < 500


def test_every_truncation_is_found(file):
  """Cut at any byte, a file is refused with its name: in the length, the header, the data."""
  whole = file.read_bytes()
  for size in range(0, len(whole), 3):
    file.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
      safetensors_file.read_header(file)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_is_never_read(tmp_path, protocol):
  path = tmp_path / "model.safetensors"
  path.write_bytes(pickle.dumps({"a": list(range(100))}, protocol=protocol))
  with pytest.raises(ValueError, match=r"model\.safetensors: is (a pickle|not a safetensors)"):
    safetensors_file.read_header(path)


def test_missing_file(tmp_path):
  with pytest.raises(ValueError, match=r"x\.safetensors: the file is missing"):
    safetensors_file.read_header(tmp_path / "x.safetensors")


def test_a_folder_in_place_of_a_file(tmp_path):
  with pytest.raises(ValueError, match="cannot be read"):
    safetensors_file.read_header(tmp_path)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint8, np.bool_])
def test_wrong_dtype(tmp_path, dtype):
  path = tmp_path / "model.safetensors"
  safetensors.numpy.save_file({"x": np.ones(3, dtype)}, path)
  entry = safetensors_file.read_header(path)["x"]
  with pytest.raises(ValueError, match=r"tensor x: dtype is \w+, expected one of F32, F16, BF16"):
    safetensors_file.read_tensor("x", entry)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path, dtype, value):
  path = tmp_path / "model.safetensors"
  x = np.ones((3, 5), dtype)
  x[2, 4] = value
  safetensors.numpy.save_file({"x": x}, path)
  entry = safetensors_file.read_header(path)["x"]
  with pytest.raises(ValueError, match="tensor x: has NaN or infinite values"):
    safetensors_file.read_tensor("x", entry)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_and_smallest_values_are_finite(tmp_path, dtype):
  path, info = tmp_path / "model.safetensors", ml_dtypes.finfo(dtype)
  x = np.array([info.max, info.min, info.smallest_subnormal, -0.0], dtype)
  safetensors.numpy.save_file({"x": x}, path)
  entry = safetensors_file.read_header(path)["x"]
  np.testing.assert_array_equal(safetensors_file.read_tensor("x", entry), x)


def test_a_file_that_shrinks_while_it_is_read(file):
  entries = safetensors_file.read_header(file)
  entry = max(entries.values(), key=lambda e: e.start + e.num_bytes)
  file.write_bytes(file.read_bytes()[:-1])
  with pytest.raises(ValueError, match="the file ends after"):
    safetensors_file.read_tensor("last", entry)


def test_rows_of_a_tensor(tmp_path):
  path = tmp_path / "model.safetensors"
  x = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
  safetensors.numpy.save_file({"w": np.ones(3, np.float32), "x": x}, path)
  entry = safetensors_file.read_header(path)["x"]
  for start, stop in ((0, 6), (0, 1), (2, 5), (5, 6), (3, 3)):
    got = safetensors_file.read_tensor("x", entry, start, stop)
    np.testing.assert_array_equal(got, x[start:stop])
  np.testing.assert_array_equal(safetensors_file.read_tensor("x", entry, 4), x[4:])
  assert safetensors_file.first_bytes("x", entry, 10) == x.tobytes()[:10]
  assert safetensors_file.first_bytes("x", entry, 1000) == x.tobytes()
