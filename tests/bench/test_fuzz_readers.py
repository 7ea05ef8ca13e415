"""The fuzzer of the readers: what is whole is read, and what is not clean is found."""

import numpy as np
import pytest

from bench import fuzz_readers
from bench.damage import Published
from checkpoints_convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint import safetensors_file

pytestmark = pytest.mark.usefixtures("quick_compilation")


def judge(name, folder, seed=0):
  """Judges a checkpoint without faults."""
  subject = Published.read(fuzz_readers.ORACLES / name, np.random.default_rng(seed))
  return subject, fuzz_readers.judge(subject, folder)


@pytest.mark.parametrize(
  ("name", "seed", "dtypes"),
  [("deepseek_v3", 3, {"F8_E4M3"}), ("deepseek_v4", 3, {"F8_E4M3", "I8"}), ("gpt_oss", 2, {"U8"})],
)
def test_whole_checkpoints_are_read(tmp_path, name, seed, dtypes):
  """Some weights are quantised, and there are shards."""
  subject, row = judge(name, tmp_path, seed)
  assert len(subject.shards) > 1
  assert dtypes <= {dtype for shard in subject.shards.values() for dtype, _, _ in shard.values()}
  assert row == {"outcome": "read", "text": ""}


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (TypeError("no"), "TypeError is no fault of the user's"),
    (ValueError("something"), "names no file"),
    (ValueError("{}: one\ntwo"), "the message is long"),
    (ValueError("{}" + "x" * 1000), "the message is long"),
  ],
)
def test_a_refusal_that_is_no_sentence(tmp_path, monkeypatch, error, words):
  raised = type(error)(str(error).format(tmp_path / "published"))
  code = {"__name__": "moecore_jax.faulty", "error": raised}
  exec("def fail(*_): raise error", code)
  monkeypatch.setattr(safetensors_file, "_is_finite", code["fail"])
  assert judge("mixtral", tmp_path)[1]["outcome"] == f"unclean: {words}"


def test_a_refusal_that_leaves_files(tmp_path, monkeypatch):
  monkeypatch.setattr(convert.shutil, "rmtree", lambda *_, **__: None)
  monkeypatch.setattr(safetensors_file, "_is_finite", lambda *_: False)
  assert judge("mixtral", tmp_path)[1]["outcome"] == "a refusal left files behind"


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda model: model.params["norm"].clear(), "wrong shapes"),
    (lambda model: model.params["norm"].update(scale=model.params["norm"]["scale"] + 1), "differ"),
  ],
)
def test_weights_that_are_lost_or_change(tmp_path, monkeypatch, change, words):
  load = checkpoint.load

  def load_changed(path, **kwargs):
    model = load(path, **kwargs)
    if words == "wrong shapes" or path.endswith("converted"):
      change(model)
    return model

  monkeypatch.setattr(fuzz_readers.checkpoint, "load", load_changed)
  monkeypatch.setattr(fuzz_readers, "_engine", lambda source: None)
  assert words in judge("mixtral", tmp_path)[1]["outcome"]


def test_a_case_is_the_same_again(tmp_path):
  rows = []
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    row = fuzz_readers.run_case(7, 3, tmp_path / name)
    rows.append(row | {"text": row["text"].replace(str(tmp_path / name), "")})
  assert rows[0] == rows[1]
  assert rows[0]["faults"]
