"""Traces of other tools' formats, made here: small, and wrong in every way that is told."""

import gzip

import numpy as np
import pytest

from moecore_jax.testing import routing
from moecore_jax.traces import Phase, load_any, save

EXPERTS = routing.random_trace(9, 2, 20, 3).experts.astype(np.uint8)
WEIGHTS = np.linspace(0, 1, EXPERTS.size, dtype=np.float16).reshape(EXPERTS.shape)
OFFSETS = np.array([0, 4, 9])

HEADER = """# route_trace v1
# model=toy.gguf arch=toy n_layer=4 n_expert=6 n_expert_used=2
# layer=1 expert_bytes=100 dense_bytes=7
# layer=3 expert_bytes=200 dense_bytes=7
"""
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
ROWS = (
  "0,0,0,1,0,5,0.75,0,100\n0,0,0,1,1,2,0.25,0,100\n"  # the last layer has no choice here
  "0,1,1,1,0,2,0.5,1,0\n0,1,1,1,1,0,0.5,0,100\n0,1,1,3,0,4,0.5,0,200\n0,1,1,3,1,3,0.5,0,200\n"
  "1,1,0,3,0,1,0.5,0,200\n1,1,0,3,1,3,0.5,1,0\n1,1,0,1,0,1,1,0,100\n1,1,0,1,1,3,0,0,100\n"
)


@pytest.mark.parametrize("extra", [{"weights": WEIGHTS}, {"probs": WEIGHTS, "token_pos": OFFSETS}])
def test_archives_of_arrays(extra, tmp_path):
  np.savez(tmp_path / "a.npz", experts=EXPERTS, offsets=OFFSETS, **extra)
  trace = load_any(tmp_path / "a.npz")
  np.testing.assert_array_equal(trace.experts, EXPERTS)
  np.testing.assert_array_equal(trace.weights, WEIGHTS)
  assert trace.sequence_offsets.tolist() == OFFSETS.tolist()
  assert trace.num_experts.tolist() == [24, 24]  # ids up to 19, rounded up
  assert (trace.phase == Phase.DECODE).all()
  assert trace.step.tolist() == list(range(9))
  assert load_any(tmp_path / "a.npz", num_experts=20).num_experts.tolist() == [20, 20]


@pytest.mark.parametrize("compress", [False, True])
def test_lines_of_choices(compress, tmp_path):
  path, content = tmp_path / "a.csv", (HEADER + COLUMNS + ROWS).encode()
  path.write_bytes(gzip.compress(content, mtime=0) if compress else content)
  trace = load_any(path)
  none = [65535, 65535]
  assert trace.experts.tolist() == [[[5, 2], none], [[2, 0], [4, 3]], [[1, 3], [1, 3]]]
  assert trace.weights[0].tolist() == [[0.75, 0.25], [0, 0]]
  assert trace.phase.tolist() == [0, 1, 1]
  assert trace.sequence_offsets.tolist() == [0, 2, 3]
  assert trace.num_experts.tolist() == [6, 6]
  assert trace.expert_bytes.tolist() == [100, 200]
  assert trace.meta == {"model": "toy.gguf"}


def test_our_own_format(tmp_path):
  save(routing.random_trace(5), tmp_path / "a.npz")
  assert load_any(tmp_path / "a.npz").num_tokens == 5


@pytest.mark.parametrize(
  ("arrays", "words"),
  [
    ({"experts": EXPERTS, "offsets": OFFSETS}, "expected a trace of version"),
    ({"experts": EXPERTS, "weights": WEIGHTS}, "expected a trace of version"),
    ({"experts": EXPERTS, "weights": WEIGHTS, "offsets": OFFSETS + 1}, "sequence_offsets"),
    ({"experts": EXPERTS, "weights": WEIGHTS[:5], "offsets": OFFSETS}, "weights is"),
    ({"experts": EXPERTS[0], "weights": WEIGHTS, "offsets": OFFSETS}, "expected ids"),
    ({"experts": EXPERTS[:0], "weights": WEIGHTS, "offsets": OFFSETS}, "expected ids"),
    ({"experts": EXPERTS - 5.0, "weights": WEIGHTS, "offsets": OFFSETS}, "expected ids"),
    ({"experts": EXPERTS - np.int8(99), "weights": WEIGHTS, "offsets": OFFSETS}, "0..65534"),
    ({"experts": EXPERTS * 0, "weights": WEIGHTS, "offsets": OFFSETS}, "names an expert twice"),
  ],
)
def test_wrong_archives(arrays, words, tmp_path):
  path = tmp_path / "a.npz"
  np.savez(path, **arrays)
  with pytest.raises(ValueError, match=words) as error:
    load_any(path)
  assert str(error.value).startswith(str(path))


def test_too_few_experts(tmp_path):
  np.savez(tmp_path / "a.npz", experts=EXPERTS, weights=WEIGHTS, offsets=OFFSETS)
  with pytest.raises(ValueError, match=r"expected 0\.\.9"):
    load_any(tmp_path / "a.npz", num_experts=10)


@pytest.mark.parametrize(("num_experts", "expected"), [(None, 8), (7, 7)])
def test_lines_that_do_not_tell_the_experts(num_experts, expected, tmp_path):
  path = tmp_path / "a.csv"
  path.write_text(HEADER.replace("n_expert=6 ", "") + COLUMNS + ROWS)
  assert load_any(path, num_experts).num_experts.tolist() == [expected] * 2


def test_another_number_of_experts_than_the_file_tells_is_refused(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text(HEADER + COLUMNS + ROWS)
  assert load_any(path, num_experts=6).num_experts.tolist() == [6, 6]
  with pytest.raises(ValueError, match="tells 6 experts a layer, not 16"):
    load_any(path, num_experts=16)


@pytest.mark.parametrize(
  ("content", "words"),
  [
    (b"", "columns turn"),
    (b"some text\nof no known kind\n", "columns turn"),
    (bytes(range(256)), "known format"),
    (gzip.compress((HEADER + COLUMNS + ROWS).encode(), mtime=0)[:80], "known format"),
    (HEADER + COLUMNS, "has no tokens"),
    (COLUMNS + ROWS, "no n_expert_used="),
    (HEADER + COLUMNS + "0,0,0,1,0,x,0.5\n", "expert of choice 1 is 'x', expected a number"),
    (HEADER + COLUMNS + "0,0,0,1,0\n", "expert of choice 1 is None"),
    (HEADER + COLUMNS + "0,0,0,1,2,5,0.5\n", "slots outside 0..1"),
    (HEADER + COLUMNS + "0,0,0,1,0,-1,0.5\n", "negative experts"),
    (HEADER + COLUMNS + "0,0,0,1,0,6,0.5\n", "expected 0..5"),
    (HEADER + COLUMNS + "0,0,0,1,0,70000,0.5\n", "expert 70000"),
    (HEADER + COLUMNS + ROWS + "0,1,1,3,0,4,0.5\n", "twice"),
    (HEADER + COLUMNS + "0,7,0,1,0,5,0.5\n", "phase has 7"),
  ],
)
def test_wrong_lines(content, words, tmp_path):
  path = tmp_path / "a.csv"
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(ValueError, match=words) as error:
    load_any(path)
  assert str(error.value).startswith(str(path))
