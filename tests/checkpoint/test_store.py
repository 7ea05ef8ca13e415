"""Converted folders: what comes back is what was stored; what is damaged is named."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint import assemble, store
from moecore_jax.testing.random_checkpoint import write_checkpoint


def _load(folder, fmt="float32", dtype=jnp.float32):
  return checkpoint.load(str(folder), dtype=dtype, expert_format=fmt)


def _check_equal(a, b):
  assert a.spec == b.spec
  assert a.fingerprint == b.fingerprint
  for x, y in ((a.params, b.params), (a.banks, b.banks), (a.mtp_banks, b.mtp_banks)):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for got, want in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
      assert got.dtype == want.dtype
      assert got.sharding.memory_kind == want.sharding.memory_kind
      np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def published(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param) / "published"
  return write_checkpoint(folder, dtype=request.param)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
  base = tmp_path_factory.mktemp("converted")
  convert(str(write_checkpoint(base / "published")), str(base / "c"), show_progress=False)
  return base / "c"


@pytest.fixture
def copy(converted, tmp_path):
  return shutil.copytree(converted, tmp_path / "copy")


@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored_fmt", ["", "float32", "bfloat16"])
def test_loads_as_the_published_folder_does(published, tmp_path, stored_fmt, fmt):
  """Stored in either format, loaded in either: equal to the last bit unless bfloat16 cut it."""
  convert(str(published), str(tmp_path / "c"), expert_format=stored_fmt, show_progress=False)
  direct = _load(published, fmt)
  got = _load(tmp_path / "c", fmt)
  cut = stored_fmt == "bfloat16" and published.parent.name.startswith("float32")
  if cut and fmt == "float32":
    rounded = jax.tree.map(
      lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32), direct.banks
    )
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), got.banks, rounded)
  else:
    _check_equal(got, direct)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights_are_stored_in_the_dtype_asked_for(published, tmp_path, dtype):
  convert(str(published), str(tmp_path / "c"), dtype=dtype, show_progress=False)
  for piece in store.StoredCheckpoint(tmp_path / "c").dense_pieces():
    wanted = np.float32 if "router" in piece.path else jnp.dtype(dtype)
    assert piece.array.dtype == wanted, piece.path
  narrow = [_load(folder, "bfloat16", jnp.bfloat16) for folder in (tmp_path / "c", published)]
  _check_equal(*narrow)


def test_memory_kinds(converted):
  loaded = _load(converted)
  for leaf in jax.tree.leaves(loaded.params):
    assert leaf.sharding.memory_kind == "device"
  for leaf in jax.tree.leaves((loaded.banks, loaded.mtp_banks)):
    assert leaf.sharding.memory_kind == "pinned_host"
    assert jax.typeof(leaf).memory_space == jax.memory.Space.Host


def test_weights_are_stored_in_parts(tmp_path, monkeypatch):
  """Chunk by chunk, with a short last one, items in row order; large dense weights in pieces."""
  monkeypatch.setattr(assemble, "MIN_CHUNK_BYTES", 3 * 3 * 32 * 16 * 4)
  monkeypatch.setattr(assemble, "MAX_CHUNK_BYTES", 3 * 3 * 32 * 16 * 4)
  monkeypatch.setattr(assemble, "MAX_PIECE_BYTES", 4000)
  published = write_checkpoint(tmp_path / "p")
  convert(str(published), str(tmp_path / "c"), show_progress=False)
  stored = store.StoredCheckpoint(tmp_path / "c")
  rows = [(i.bank, i.start, i.rows) for i in stored.items if i.bank]
  main = [("experts", start, min(3, 16 - start)) for start in range(0, 16, 3)]
  assert rows == main + [("mtp_experts", start, min(3, 8 - start)) for start in range(0, 8, 3)]
  dense = [item for item in stored.items if not item.bank]
  assert len(dense) > 3
  assert [i.cuts["lm_head.kernel"] for i in dense if "lm_head.kernel" in i.cuts] == [
    [1, 0, 31],
    [1, 31, 48],
  ]
  _check_equal(_load(tmp_path / "c"), _load(published))


def test_an_orbax_reader_needs_nothing_of_ours(converted):
  """Items are plain Orbax checkpoints."""
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    arrays = checkpointer.restore((converted / "banks" / "experts.0" / "000000").resolve())
  bank = _load(converted).banks[0]
  np.testing.assert_array_equal(np.asarray(arrays["gate_up"]), np.asarray(bank["gate_up"]))
  np.testing.assert_array_equal(np.asarray(arrays["down"]), np.asarray(bank["down"]))


def _edit_manifest(folder, edit):
  file = folder / store.MANIFEST
  manifest = json.loads(file.read_text())
  edit(manifest)
  file.write_text(json.dumps(manifest))


def _files(folder):
  return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("item", ["dense/00000", "banks/experts.0/000000"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "remove all"])
def test_a_damaged_item_is_named(copy, item, damage):
  largest = max(_files(copy / item), key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  if damage == "flip":
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
  elif damage == "truncate":
    largest.write_bytes(data[: len(data) // 2])
  elif damage == "remove":
    largest.unlink()
  else:
    shutil.rmtree(copy / item)
  with pytest.raises(ValueError, match=f"{item}.*convert again") as e:
    _load(copy)
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("edit", "words"),
  [
    (lambda m: m.update(version=1), "version is 1, expected 2"),
    (lambda m: m.pop("version"), "version is None"),
    (lambda m: m.pop("items"), "is damaged"),
    (lambda m: m["items"][0].update(extra=1), "is damaged"),
    (lambda m: m["items"].pop(0), "dense parameters do not match"),
    (lambda m: m["items"][0]["cuts"].pop("norm.scale"), "arrays of dense/00000"),
    (lambda m: m["items"][0]["cuts"].update({"norm.scale": [0, 1, 32]}), "pieces of norm.scale"),
    (lambda m: m["items"][0]["cuts"].update({"norm.scale": [0, 0, 31]}), "dense parameters do not"),
    (lambda m: m["items"].pop(1), "bank rows do not match"),
    (lambda m: m["items"].append(m["items"][-1]), "rows of bank banks/mtp_experts.0/000000"),
    (lambda m: m["items"][1].update(start=1), "rows of bank banks/experts.0/000000"),
    (lambda m: m["items"][1].update(folder="../x"), "item '../x' is outside the checkpoint"),
    (lambda m: m["items"][1].update(rows=15), "bank rows do not match"),
  ],
)
def test_a_manifest_that_does_not_match(copy, edit, words):
  _edit_manifest(copy, edit)
  with pytest.raises(ValueError, match=words):
    _load(copy)


FIELDS = {
  "folder": [None, 5, "", "a\0", "a" * 251, "\udc80"],
  "bank": [None, 5, [], "others"],
  "group": [None, -1, "x", True, 0.0],
  "start": [None, "x"],
  "rows": [None, "x", [1]],
  "cuts": [None, [], {"a": 1}, {"a": [0, 0]}, {"a": [-1, 0, 1]}],
  "checksums": [None, [], {"a": "x"}],
  "files": [None, [], {"a": None}, {"a" * 251: 1}],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in FIELDS.items() for v in vs])
@pytest.mark.parametrize("index", [0, 1])
def test_a_field_of_an_item_that_is_no_such_thing(copy, index, field, value):
  """In a dense item and in one of a bank."""
  _edit_manifest(copy, lambda m: m["items"][index].update({field: value}))
  with pytest.raises(ValueError, match=f"{field} of an item is .*; convert again") as e:
    store.StoredCheckpoint(copy)
  assert str(e.value).startswith(f"{copy / store.MANIFEST}: is damaged: ")
  assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize(
  ("field", "value"),
  [
    *(("expert_format", value) for value in (None, 5, [1], "nope")),
    *(("items", value) for value in (None, {}, "x")),
    *(("fingerprint", value) for value in (None, 5)),
    *(("config_sha256", value) for value in (None, [])),
  ],
)
def test_a_field_of_the_manifest_that_is_no_such_thing(copy, field, value):
  _edit_manifest(copy, lambda m: m.update({field: value}))
  with pytest.raises(ValueError, match=f"is damaged: {field} of the manifest is .*convert again"):
    store.StoredCheckpoint(copy)


@pytest.mark.parametrize("items", [[None], [5], [{}], ["x"], [[]]])
def test_items_that_are_none(copy, items):
  _edit_manifest(copy, lambda m: m.update(items=items))
  with pytest.raises(ValueError, match=r"is damaged: an item (is|has no field) .*convert again"):
    store.StoredCheckpoint(copy)


@pytest.fixture(scope="module")
def of_format(tmp_path_factory):
  """Returns a folder as it is converted to a format."""
  published = write_checkpoint(tmp_path_factory.mktemp("formats") / "published")

  @functools.cache
  def make(fmt):
    folder = tmp_path_factory.mktemp(fmt) / "c"
    convert(str(published), str(folder), expert_format=fmt, show_progress=False)
    return folder

  return make


FORMATS = ["float32", "bfloat16", "w8a8", "w4a8", "w4a8_g32"]


@pytest.mark.parametrize("edited", FORMATS)
@pytest.mark.parametrize("fmt", FORMATS[:-1])
def test_an_expert_format_that_the_banks_do_not_have(of_format, tmp_path, fmt, edited):
  """However the banks are wanted: as stored, as the manifest says, or otherwise."""
  copy = shutil.copytree(of_format(fmt), tmp_path / "copy")
  _edit_manifest(copy, lambda m: m.update(expert_format=edited))
  if fmt == edited:
    _load(copy)
    return
  words = f"rows in {edited}|expert_format {edited} does not match config.json"
  for wanted in {fmt, edited, "float32"}:
    if wanted != "w4a8_g32":  # the model has no such groups
      with pytest.raises(ValueError, match=rf"checkpoint\.json: .*({words}); convert again") as e:
        _load(copy, wanted)
      assert "\n" not in str(e.value)


@pytest.mark.parametrize("axis", [1, 9])
def test_a_cut_along_another_axis(copy, axis):
  _edit_manifest(copy, lambda m: m["items"][0]["cuts"]["norm.scale"].__setitem__(0, axis))
  with pytest.raises(ValueError, match="dense parameters do not match config"):
    _load(copy)


def test_a_bank_that_names_dense_parameters(copy):
  _edit_manifest(copy, lambda m: m["items"][1]["cuts"].update({"norm.scale": [0, 32, 33]}))
  with pytest.raises(ValueError, match=r"arrays of banks/experts\.0/000000 are not what it says"):
    _load(copy)


@pytest.mark.parametrize("index", [0, 1])
def test_two_items_of_one_folder(copy, index):
  """What one holds is said to be the parts of two."""

  def split(manifest):
    first, second = manifest["items"][index], json.loads(json.dumps(manifest["items"][index]))
    if index:
      first.update(rows=8)
      second.update(start=8, rows=8)
    for name, (axis, start, stop) in second["cuts"].items():
      first["cuts"][name] = [axis, start, stop // 2]
      second["cuts"][name] = [axis, stop // 2, stop]
    manifest["items"].insert(index + 1, second)

  _edit_manifest(copy, split)
  with pytest.raises(ValueError, match=r"is damaged: array .*(entries|8 rows in .*); convert aga"):
    _load(copy)


def test_a_config_that_was_changed(copy):
  config = json.loads((copy / "config.json").read_text())
  (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
  with pytest.raises(ValueError, match=r"config\.json: was changed after the conversion"):
    _load(copy)


def test_a_missing_config(copy):
  (copy / "config.json").unlink()
  with pytest.raises(ValueError, match=r"config\.json: the file is missing"):
    _load(copy)


def test_a_torn_manifest(copy):
  text = (copy / store.MANIFEST).read_text()
  (copy / store.MANIFEST).write_text(text[: len(text) // 2])
  with pytest.raises(ValueError, match=r"moecore_checkpoint\.json: is not JSON"):
    _load(copy)


def test_without_its_manifest_a_folder_is_no_checkpoint(copy):
  (copy / store.MANIFEST).unlink()
  with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
    _load(copy)
