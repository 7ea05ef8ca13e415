"""Published folders: what is missing, corrupt or unexpected is named before weights are read."""

import json
import os
import pathlib
import pickle
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy

from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.testing.random_checkpoint import tiny_config, write_checkpoint

INDEX = "model.safetensors.index.json"
ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
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
  assert len(str(e.value)) < 800


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
    ("hidden_size", 10**30, "hidden_size is 1000"),
    ("hidden_size", True, "hidden_size is True"),
    ("hidden_size", "long" * 9999, "hidden_size is 'long"),
    ("num_hidden_layers", 10**9, "whole number of 1 to 1000"),
    ("num_nextn_predict_layers", 10**9, "whole number of 0 to 1000"),
    ("n_routed_experts", 10**9, "describes 3000000000 experts in 4 layers"),
    ("num_hidden_layers", 1, "no layer has routed experts"),
    ("num_attention_heads", 33, r"shape is \(24, 12\)"),
    ("q_lora_rank", "12", "q_lora_rank is '12'"),
    ("q_lora_rank", 0.5, "q_lora_rank is 0.5"),
    ("n_shared_experts", -1, "n_shared_experts is -1"),
    ("n_group", [0] * 9999, r"n_group is \[0, 0"),
    ("n_group", 3, "8 experts cannot be shared by 3 groups"),
    ("topk_group", 3, "3 of 2 groups of experts cannot be chosen"),
    ("num_experts_per_tok", 5, "a token cannot choose 5 of 4 experts"),
    ("qk_rope_head_dim", 3, "3 components of a head cannot be rotated"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
    ("rms_norm_eps", -1e-6, "needs a number above 0"),
    ("routed_scaling_factor", float("inf"), "routed_scaling_factor is inf"),
    ("routed_scaling_factor", 10**400, "routed_scaling_factor is 1000"),
    ("eos_token_id", {"a": 1}, "needs a token id or a list of them"),
    ("eos_token_id", [1, -1], r"eos_token_id is \[1, -1\]"),
    ("eos_token_id", 48, "eos_token_id is 48, deepseek_v3 needs .* each 0 to 47"),
    ("model_type", ["deepseek_v3"], "model_type .* is not one of"),
    ("rope_scaling", {"type": "linear"}, "rope_scaling.type is 'linear'"),
    ("rope_scaling", {"type": "yarn"}, "rope_scaling.factor is None"),
    ("rope_scaling", "yarn", "rope_scaling is 'yarn', deepseek_v3 needs an object"),
  ],
)
def test_wrong_config(single, field, value, words):
  _edit_json(single / "config.json", lambda c: c.update({field: value}))
  _refused(single, words)


@pytest.mark.parametrize(
  ("family", "fields", "words"),
  [
    ("deepseek_v4", {"compress_ratios": [4, "x"]}, "compress_ratios is"),
    ("deepseek_v4", {"mlp_layer_types": "moe" * 99}, "mlp_layer_types is 'moemoe"),
    ("deepseek_v4", {"num_hash_layers": None, "mlp_layer_types": [{}] * 4}, "mlp_layer_types is"),
    ("deepseek_v4", {"o_groups": 3}, "heads cannot be shared by 3 o_groups"),
    ("deepseek_v4", {"hc_sinkhorn_iters": 10**9}, "whole number of 1 to 100"),
    ("deepseek_v4", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0, .* a number above 0"),
    ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0, .* a number above 0"),
    ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "the first 'full'"),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_freq": 0}, "index_topk_freq is 0"),
    ("gpt_oss", {"layer_types": [["x"]] * 4}, "layer_types is"),
    ("gpt_oss", {"num_key_value_heads": 3}, "4 heads cannot be shared by 3 key heads"),
    ("mixtral", {"sliding_window": "8"}, "sliding_window is '8'"),
    ("mixtral", {"head_dim": None, "num_attention_heads": 999}, "at most hidden_size of them"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("qwen2_moe", {"mlp_only_layers": {"0": 1}}, "needs a list of whole numbers"),
    ("qwen2_moe", {"decoder_sparse_step": "x"}, "decoder_sparse_step is 'x'"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": "x"}}, "partial_rotary_factor is"),
  ],
)
def test_wrong_config_of_a_family(tmp_path, family, fields, words):
  config = json.loads((ORACLES / family / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(config | fields))
  _refused(tmp_path, words)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"x": ' * 5000 + "1" + "}" * 5000, "1" * 5000])
def test_json_that_cannot_be_parsed(sharded, name, text):
  (sharded / name).write_text(text)
  _refused(sharded, rf"{re.escape(name)}: is not JSON")


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_field_that_is_listed_twice(sharded, name):
  text = (sharded / name).read_text()
  key = next(iter(json.loads(text)))
  (sharded / name).write_text(f'{{"{key}": 1, {text[1:]}')
  _refused(sharded, rf"{re.escape(name)}: is not JSON: '{key}' is listed twice")


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_what_is_no_file_is_not_read(sharded, name, kind):
  """A pipe would be waited for, a device read for ever."""
  file = sharded / name
  file.unlink()
  if kind == "pipe":
    os.mkfifo(file)
  else:
    file.symlink_to("/dev/zero" if kind == "device" else name)
  _refused(sharded, f"{name}: cannot be read|weight file '{name}' |{name}: the index .* is missing")


@pytest.mark.parametrize("name", ["", ".", "a\0b", "\ud800", "n" * 300, "n" * 9999, "a\nb"])
def test_odd_names_of_shards(sharded, name):
  _edit_json(sharded / INDEX, lambda i: i["weight_map"].update({ROUTER: name}))
  _refused(sharded, "weight file|cannot be read|is missing")


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
  _refused(sharded, r"model-00001\.safetensors: tensor 'x' is missing")


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
