"""Published folders: what is missing, corrupt or unexpected is named before weights are read."""

import json
import pickle
import shutil

import numpy as np
import pytest
import safetensors.numpy

from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.testing.random_checkpoint import tiny_config, write_checkpoint

INDEX = "model.safetensors.index.json"
ROUTER = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.fixture
def single(tmp_path):
  return write_checkpoint(tmp_path / "single")


@pytest.fixture
def sharded(tmp_path):
  folder = write_checkpoint(tmp_path / "sharded", shard_bytes=20_000)
  assert len(list(folder.glob("*.safetensors"))) > 2
  return folder


def _edit_tensors(file, edit):
  tensors = safetensors.numpy.load_file(file)
  edit(tensors)
  safetensors.numpy.save_file(tensors, file)


def _edit_json(file, edit):
  value = json.loads(file.read_text())
  edit(value)
  file.write_text(json.dumps(value))


def _refused(folder, words):
  with pytest.raises(ValueError, match=words) as e:
    PublishedCheckpoint(folder)
  assert "\n" not in str(e.value)


def test_shards_and_one_file_are_read_alike(tmp_path):
  one = PublishedCheckpoint(write_checkpoint(tmp_path / "one"))
  many = PublishedCheckpoint(write_checkpoint(tmp_path / "many", shard_bytes=20_000))
  assert one.tensors.keys() == many.tensors.keys()
  for key in one.keymap.shapes:
    np.testing.assert_array_equal(one.read(key), many.read(key))
  assert one.fingerprint() == many.fingerprint()


def test_the_fingerprint_tells_weights_and_configs_apart(tmp_path):
  folders = [
    write_checkpoint(tmp_path / "a"),
    write_checkpoint(tmp_path / "b", seed=1),
    write_checkpoint(tmp_path / "c", tiny_config(rms_norm_eps=1e-5)),
    write_checkpoint(tmp_path / "d", dtype="bfloat16"),
    write_checkpoint(tmp_path / "e"),
  ]

  def change_one_expert(tensors):
    tensors[EXPERT][0, 0] += 1

  _edit_tensors(folders[4] / "model.safetensors", change_one_expert)
  prints = set()
  for folder in folders:
    checkpoint = PublishedCheckpoint(folder)
    for key in checkpoint.keymap.shapes:
      checkpoint.read(key)
    prints.add(checkpoint.fingerprint())
  assert len(prints) == 5


def test_missing_folder(tmp_path):
  _refused(tmp_path / "none", "none: the checkpoint folder does not exist")


def test_a_file_in_place_of_the_folder(single):
  _refused(single / "config.json", "the checkpoint folder does not exist")


def test_missing_config(single):
  (single / "config.json").unlink()
  _refused(single, r"config\.json: the file is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x80abc"])
def test_damaged_config(single, text):
  (single / "config.json").write_bytes(text.encode("latin-1"))
  _refused(single, r"config\.json: is not")


@pytest.mark.parametrize(
  ("field", "value", "words"),
  [
    ("model_type", "llama", "model_type 'llama' is not one of"),
    ("hidden_size", 0, "hidden_size is 0"),
    ("hidden_size", "32", "hidden_size is '32'"),
    ("hidden_size", None, "hidden_size is None"),
    ("rope_scaling", {"type": "yarn"}, "factor"),
    ("rope_scaling", "yarn", "malformed"),
  ],
)
def test_wrong_config(single, field, value, words):
  _edit_json(single / "config.json", lambda c: c.update({field: value}))
  _refused(single, words)


def test_no_weights(single):
  (single / "model.safetensors").unlink()
  _refused(single, r"has neither model\.safetensors nor")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_folder_of_pickles(single, name):
  (single / "model.safetensors").unlink()
  (single / name).write_bytes(pickle.dumps({}))
  _refused(single, f"{name}: is a pickle, which is never read")


def test_a_pickle_under_the_right_name(single):
  (single / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
  _refused(single, r"model\.safetensors: is a pickle")


def test_a_pickle_in_the_index(sharded):
  (sharded / "model.bin").write_bytes(pickle.dumps({}))
  _edit_json(sharded / INDEX, lambda i: i["weight_map"].update({ROUTER: "model.bin"}))
  _refused(sharded, r"model\.bin: is a pickle")


def test_missing_index(sharded):
  (sharded / INDEX).unlink()
  _refused(sharded, r"index\.json: the index of the shards is missing")


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(sharded, text):
  (sharded / INDEX).write_text(text)
  _refused(sharded, r"index\.json: ")


def test_missing_shard(sharded):
  (sharded / "model-00002.safetensors").unlink()
  _refused(sharded, r"model-00002\.safetensors: the file is missing")


def test_truncated_shard(sharded):
  file = sharded / "model-00002.safetensors"
  file.write_bytes(file.read_bytes()[:-4])
  _refused(sharded, r"model-00002\.safetensors: the file is truncated")


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "link to a folder"])
def test_a_shard_outside_the_folder(sharded, tmp_path, kind):
  outside = tmp_path / "outside"
  outside.mkdir()
  shutil.move(sharded / "model-00002.safetensors", outside / "x.safetensors")
  name = {"parent": "../outside/x.safetensors", "absolute": str(outside / "x.safetensors")}.get(
    kind
  )
  if kind == "link":
    name = "model-00002.safetensors"
    (sharded / name).symlink_to(outside / "x.safetensors")
  elif kind == "link to a folder":
    name = "sub/x.safetensors"
    (sharded / "sub").symlink_to(outside)

  def point_outside(index):
    for key, shard in index["weight_map"].items():
      if shard == "model-00002.safetensors":
        index["weight_map"][key] = name

  _edit_json(sharded / INDEX, point_outside)
  _refused(sharded, "is outside the checkpoint folder")


def test_a_single_file_that_links_outside(single, tmp_path):
  shutil.move(single / "model.safetensors", tmp_path / "x.safetensors")
  (single / "model.safetensors").symlink_to(tmp_path / "x.safetensors")
  _refused(single, "is outside the checkpoint folder")


def test_a_snapshot_may_link_to_its_blobs(tmp_path):
  """The layout of a download cache: snapshots/<revision>/ links to blobs/."""
  folder = write_checkpoint(tmp_path / "snapshots" / "abc")
  (tmp_path / "blobs").mkdir()
  shutil.move(folder / "model.safetensors", tmp_path / "blobs" / "123")
  (folder / "model.safetensors").symlink_to("../../blobs/123")
  assert PublishedCheckpoint(folder).read(ROUTER).shape == (8, 32)


def test_a_tensor_in_two_shards(sharded):
  first = safetensors.numpy.load_file(sharded / "model-00001.safetensors")
  key = next(iter(first))
  _edit_tensors(sharded / "model-00002.safetensors", lambda t: t.update({key: first[key]}))
  _refused(sharded, rf"tensor {key} is in both model-00001\.safetensors and model-00002")


def test_a_tensor_that_the_index_does_not_list(sharded):
  extra = {"extra": np.ones(1, np.float32)}
  _edit_tensors(sharded / "model-00001.safetensors", lambda t: t.update(extra))
  _refused(sharded, r"model-00001\.safetensors: tensor extra")


def test_a_tensor_that_its_shard_lacks(sharded):
  _edit_json(sharded / INDEX, lambda i: i["weight_map"].update({"x": "model-00001.safetensors"}))
  _refused(sharded, r"model-00001\.safetensors: tensor x is missing")


@pytest.mark.parametrize("key", [ROUTER, EXPERT, "model.layers.3.eh_proj.weight"])
def test_missing_tensor(single, key):
  _edit_tensors(single / "model.safetensors", lambda t: t.pop(key))
  _refused(single, f"1 tensors are missing, e.g. {key}")


def test_unknown_tensor(single):
  extra = {"model.layers.1.mlp.gate.weight_scale_inv": np.ones(1, np.float32)}
  _edit_tensors(single / "model.safetensors", lambda t: t.update(extra))
  _refused(single, r"1 tensors are unknown, e\.g\. model\.layers\.1\.mlp\.gate\.weight_scale_inv")


@pytest.mark.parametrize("key", [ROUTER, EXPERT])
def test_wrong_shape(single, key):
  _edit_tensors(single / "model.safetensors", lambda t: t.update({key: t[key].T.copy()}))
  _refused(single, rf"model\.safetensors: tensor {key}: shape is .* config\.json expects")


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.uint8])
def test_wrong_dtype(single, dtype):
  _edit_tensors(single / "model.safetensors", lambda t: t.update({EXPERT: t[EXPERT].astype(dtype)}))
  _refused(single, rf"model\.safetensors: tensor {EXPERT}: dtype is")
