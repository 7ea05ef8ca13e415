"""Conversion: whole or not at all, whatever happens on the way."""

import errno
import fcntl
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_convert import convert as convert_lib
from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint import assemble, store, writer
from moecore_jax.checkpoint.published import INDEX_FILE
from moecore_jax.cli import main
from moecore_jax.config import RunConfig
from moecore_jax.runtime.engine import Engine
from moecore_jax.testing.random_checkpoint import tiny_config, write_checkpoint


@pytest.fixture
def source(tmp_path):
  folder = write_checkpoint(tmp_path / "source", shard_bytes=40_000)
  (folder / "tokenizer.json").write_text('{"a": 1}')
  (folder / "generation_config.json").write_text("{}")
  (folder / "chat_template.jinja").write_text("{{ messages }}")
  (folder / "README.md").write_text("not needed")
  return folder


def _names(folder):
  return sorted(p.name for p in folder.iterdir())


def test_what_is_written(source, tmp_path, capsys):
  result = convert(str(source), str(tmp_path / "out"))
  copied = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]
  assert _names(tmp_path / "out") == sorted([*copied, "banks", "dense", store.MANIFEST])
  for name in copied:
    assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
  assert _names(tmp_path) == ["out", "source"]
  assert result["expert_format"] == "float32"
  assert result["num_items"] == 3
  assert set(result["skipped"]) == {
    "model.layers.3.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight",
  }
  stored = store.StoredCheckpoint(tmp_path / "out")
  assert result["fingerprint"] == stored.fingerprint
  assert result["num_bytes"] == sum(map(stored.verify, stored.items))
  out, err = capsys.readouterr()
  assert out == ""
  assert "convert: 100%" in err
  assert "verify: 100%" in err


def test_what_is_written_is_read_back_from_the_disk(source, tmp_path, monkeypatch):
  """Every file of an item leaves the page cache when it is written, and when it is read back."""
  left = []
  monkeypatch.setattr(
    os, "posix_fadvise", lambda f, *_: left.append(os.readlink(f"/proc/self/fd/{f}"))
  )
  convert(str(source), str(tmp_path / "out"), show_progress=False)
  stored = store.StoredCheckpoint(tmp_path / "out")
  files = [tmp_path / "out.partial" / i.folder / name for i in stored.items for name in i.files]
  assert sorted(left) == sorted([*map(str, files)] * 2)


def test_an_empty_output_folder_may_exist(source, tmp_path):
  (tmp_path / "out").mkdir()
  convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert store.is_store(tmp_path / "out")


@pytest.mark.parametrize("kind", ["checkpoint", "file", "link", "source"])
def test_an_output_that_exists_is_left_alone(source, tmp_path, kind):
  out = tmp_path / "out"
  if kind == "checkpoint":
    convert(str(source), str(out), show_progress=False)
  elif kind == "file":
    out.write_text("mine")
  elif kind == "link":
    out.symlink_to(tmp_path / "elsewhere")
  else:
    out = source
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if not p.is_symlink()}
  with pytest.raises(ValueError, match="the output exists; remove it or choose another folder"):
    convert(str(source), str(out), show_progress=False)
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if not p.is_symlink()} == before


def test_a_missing_parent(source, tmp_path):
  with pytest.raises(ValueError, match="its folder does not exist; create it first"):
    convert(str(source), str(tmp_path / "a" / "out"), show_progress=False)
  assert _names(tmp_path) == ["source"]


def test_a_full_disk_is_refused_in_numbers(source, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(convert_lib.shutil, "disk_usage", lambda _: usage)
  with pytest.raises(ValueError, match=r"needs 0\.02 GB, the disk has 0\.00 GB free"):
    convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize(
  "key", ["model.embed_tokens.weight", "model.layers.3.mlp.experts.7.down_proj.weight"]
)
def test_a_fault_found_on_the_way_leaves_nothing(source, tmp_path, key):
  """NaN in the first and in the last weight that is read."""
  index = json.loads((source / "model.safetensors.index.json").read_text())
  file = source / index["weight_map"][key]
  tensors = safetensors.numpy.load_file(file)
  tensors[key][-1, -1] = np.nan
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match=f"{file.name}: tensor {key}: has NaN"):
    convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert _names(tmp_path) == ["source"]


def test_a_write_that_does_not_read_back_leaves_nothing(source, tmp_path, monkeypatch):
  """The read-back compares with what was meant to be written, not with what was."""
  save = writer.StoreWriter._save

  def save_wrongly(self, target, arrays):
    if target.parent.name == "experts.0":
      arrays = {**arrays, "down": arrays["down"] + 1}
    save(self, target, arrays)

  monkeypatch.setattr(writer.StoreWriter, "_save", save_wrongly)
  with pytest.raises(ValueError, match=r"experts\.0/000000: array down: its checksum is wrong"):
    convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert _names(tmp_path) == ["source"]


def test_quantised_weights_are_those_of_the_published_folder(source, tmp_path):
  """Experts are stored in w4a8, other weights as published: these are quantised once loaded."""
  (source / "tokenizer.json").unlink()
  out = tmp_path / "out"
  convert(str(source), str(out), expert_format="w4a8", show_progress=False)
  config = RunConfig()
  config.engine.context_tokens = 128
  config.engine.expert_format, config.engine.dense_format = "w4a8", "w8a8"
  engines = [Engine.from_checkpoint(str(folder), config) for folder in (out, source)]
  arrays = [jax.tree.leaves_with_path((engine.params, engine.banks)) for engine in engines]
  assert any("words" in str(path) for path, _ in arrays[0])
  for (path, got), (_, want) in zip(*arrays, strict=True):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want, err_msg=str(path))
  for piece in store.StoredCheckpoint(out).dense_pieces():
    assert piece.array.dtype == np.float32


@pytest.fixture
def parts(monkeypatch):
  """Makes many items of a small checkpoint, one after the other; returns the folders of those that
  are written."""
  monkeypatch.setattr(convert_lib, "_WORKERS", 1)
  monkeypatch.setattr(assemble, "MIN_CHUNK_BYTES", 60_000)
  monkeypatch.setattr(assemble, "MAX_CHUNK_BYTES", 60_000)
  monkeypatch.setattr(assemble, "MAX_PIECE_BYTES", 4000)
  save, saved = writer.StoreWriter._save, []

  def save_some(self, target, arrays):
    if len(saved) == parts.limit:
      raise KeyboardInterrupt
    save(self, target, arrays)
    saved.append(str(target.relative_to(self.folder)))

  monkeypatch.setattr(writer.StoreWriter, "_save", save_some)
  parts = types.SimpleNamespace(limit=-1, saved=saved)
  return parts


def _interrupt(source, out, parts, num_items):
  parts.limit = num_items
  with pytest.raises(KeyboardInterrupt):
    convert(str(source), str(out), show_progress=False)
  assert not out.exists()
  parts.limit = -1
  done = list(parts.saved)
  parts.saved.clear()
  return done


def _arrays(folder):
  stored = store.StoredCheckpoint(folder)
  return [(i.folder, i.cuts, i.start, i.rows, i.checksums) for i in stored.items]


@pytest.mark.parametrize("num_items", [0, 6])
def test_a_run_goes_on_where_another_was_interrupted(source, tmp_path, capsys, parts, num_items):
  """What is there is not written again; what comes out is what one run writes."""
  whole = convert(str(source), str(tmp_path / "whole"), show_progress=False)
  every = list(parts.saved)
  assert len(every) == whole["num_items"] > 6
  parts.saved.clear()
  done = _interrupt(source, tmp_path / "out", parts, num_items)
  assert done == every[:num_items]
  (tmp_path / "out.partial" / "dense" / "00001.orbax-checkpoint-tmp-1").mkdir(parents=True)
  result = convert(str(source), str(tmp_path / "out"))
  err = capsys.readouterr().err
  assert (f"goes on where a run was killed, {num_items} of {len(every)} items" in err) == (
    num_items > 0
  )
  assert "starts anew" not in err
  assert parts.saved == every[num_items:]
  assert result == whole | {"output": str(tmp_path / "out"), "num_resumed": num_items}
  assert _names(tmp_path) == ["out", "source", "whole"]
  assert _arrays(tmp_path / "out") == _arrays(tmp_path / "whole")
  for folder in (".", "dense", "banks", "banks/experts.0"):
    assert _names(tmp_path / "out" / folder) == _names(tmp_path / "whole" / folder)


def test_items_that_are_written_at_once(source, tmp_path, monkeypatch, parts):
  """Several threads write what one writes, and list it in its order."""
  results = []
  for name, count in (("one", 1), ("many", 4)):
    monkeypatch.setattr(convert_lib, "_WORKERS", count)
    results.append(convert(str(source), str(tmp_path / name), show_progress=False))
  assert _arrays(tmp_path / "many") == _arrays(tmp_path / "one")
  assert results[1] == results[0] | {"output": str(tmp_path / "many")}


def test_items_that_are_torn_are_written_again(source, tmp_path, parts):
  """The last line of the journal, and a file of an item, are cut short."""
  done = _interrupt(source, tmp_path / "out", parts, 4)
  journal = tmp_path / "out.partial" / writer.JOURNAL
  journal.write_text(journal.read_text()[:-9])
  first = tmp_path / "out.partial" / done[0]
  largest = max((p for p in first.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:-1])
  assert convert(str(source), str(tmp_path / "out"), show_progress=False)["num_resumed"] == 2
  assert done[0] in parts.saved and done[3] in parts.saved
  assert not {done[1], done[2]} & set(parts.saved)
  assert store.is_store(tmp_path / "out")


@pytest.mark.parametrize("files", [None, [], {"a" * 300: 1}])
def test_a_line_of_the_journal_that_is_no_item(source, tmp_path, parts, files):
  done = _interrupt(source, tmp_path / "out", parts, 3)
  journal = tmp_path / "out.partial" / writer.JOURNAL
  first, line, *others = journal.read_text().split("\n")
  damaged = json.dumps(json.loads(line) | {"files": files})
  journal.write_text("\n".join([first, damaged, "null", "5", *others]))
  assert convert(str(source), str(tmp_path / "out"), show_progress=False)["num_resumed"] == 2
  assert done[0] in parts.saved
  assert not {done[1], done[2]} & set(parts.saved)


def test_an_item_that_has_rotted_is_found(source, tmp_path, parts):
  done = _interrupt(source, tmp_path / "out", parts, 3)
  first = tmp_path / "out.partial" / done[0]
  largest = max((p for p in first.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1
  largest.write_bytes(data)
  with pytest.raises(ValueError, match=f"{done[0]}.*convert again"):
    convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize("change", ["dtype", "weights", "time"])
def test_what_another_run_left_is_not_used(source, tmp_path, capsys, parts, change):
  done, settings = _interrupt(source, tmp_path / "out", parts, 3), {}
  file = sorted(source.glob("*.safetensors"))[0]
  if change == "weights":
    tensors = safetensors.numpy.load_file(file)
    tensors[next(iter(tensors))] += 1
    safetensors.numpy.save_file(tensors, file)
  elif change == "time":
    os.utime(file, ns=(1, 1))
  else:
    settings = {"dtype": "bfloat16"}
  result = convert(str(source), str(tmp_path / "out"), **settings)
  assert "was left by a run of another source or other settings" in capsys.readouterr().err
  assert result["num_resumed"] == 0
  assert parts.saved[: len(done)] == done
  stored = store.StoredCheckpoint(tmp_path / "out")
  assert sum(map(stored.verify, stored.items)) == result["num_bytes"]


def test_foreign_leftovers_are_removed(source, tmp_path):
  partial = tmp_path / "out.partial"
  (partial / "banks" / "experts.9").mkdir(parents=True)
  (partial / store.MANIFEST).write_text("{}")
  (partial / writer.JOURNAL).write_text("of another run")
  convert(str(source), str(tmp_path / "out"), show_progress=False)
  assert _names(tmp_path) == ["out", "source"]
  assert _names(tmp_path / "out" / "banks") == ["experts.0", "mtp_experts.0"]
  checkpoint.load(str(tmp_path / "out"), dtype=jnp.float32, expert_format="float32")


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_no_conversion_wrote_is_not_removed(source, tmp_path, kind):
  partial, theirs = tmp_path / "out.partial", tmp_path / "theirs"
  theirs.mkdir()
  (theirs / "notes").write_text("precious")
  if kind == "folder":
    theirs.rename(partial)
  elif kind == "link":
    partial.symlink_to(theirs)
  else:
    partial.write_text("precious")
  with pytest.raises(ValueError, match="no conversion has written what is there"):
    convert(str(source), str(tmp_path / "out"), show_progress=False)
  kept = partial if kind == "file" else partial / "notes"
  assert kept.read_text() == "precious"


def test_a_disk_that_fills_up_keeps_what_is_written(source, tmp_path, monkeypatch, capsys):
  arguments = ["convert", f"--input={source}", f"--output={tmp_path / 'out'}"]

  def fail(self, target, args):
    raise ValueError(f"RESOURCE_EXHAUSTED: {os.strerror(errno.ENOSPC)}")

  class Full:
    save, close = fail, lambda self: None

  with monkeypatch.context() as patch:
    opened, checkpointer = itertools.count(), writer.checkpointer
    patch.setattr(writer, "checkpointer", lambda: Full() if next(opened) else checkpointer())
    assert main.main(arguments) == 2
  assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
  assert main.main(arguments) == 0
  assert "goes on where a run was killed, 1 of" in capsys.readouterr().err


@pytest.mark.parametrize("dtypes", [(np.float16, ml_dtypes.bfloat16), (np.float16, np.float32)])
def test_weights_of_several_dtypes(source, tmp_path, dtypes):
  """Of one expert, and of the two halves of one kernel."""
  keys = [f"model.layers.2.mlp.{part}.up_proj.weight" for part in ("experts.3", "shared_experts")]
  for key in keys:
    for name, dtype in zip((key, key.replace("up_proj", "gate_proj")), dtypes, strict=True):
      file = _shard_of(source, name)
      tensors = safetensors.numpy.load_file(file)
      tensors[name] = tensors[name].astype(dtype)
      safetensors.numpy.save_file(tensors, file)
  expected = checkpoint.load(str(source), dtype=jnp.float32, expert_format="float32")
  convert(str(source), str(tmp_path / "out"), show_progress=False)
  got = checkpoint.load(str(tmp_path / "out"), dtype=jnp.float32, expert_format="float32")
  jax.tree.map(np.testing.assert_array_equal, got.banks, expected.banks)
  jax.tree.map(np.testing.assert_array_equal, got.params, expected.params)


def test_numbers_too_large_for_the_format_are_refused(source, tmp_path):
  file = _shard_of(source, EXPERT)
  tensors = safetensors.numpy.load_file(file)
  tensors[EXPERT][0, 0] = np.finfo(np.float32).max
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match=r"experts\.3\..*too large for bfloat16"):
    convert(str(source), str(tmp_path / "out"), expert_format="bfloat16", show_progress=False)
  assert _names(tmp_path) == ["source"]


@pytest.mark.parametrize("kind", ["converted", "within"])
def test_inputs_and_outputs_that_are_mixed_up(source, tmp_path, kind):
  words, out = "is within the input", source / "out"
  if kind == "converted":
    convert(str(source), str(tmp_path / "done"), show_progress=False)
    source, words, out = tmp_path / "done", "converted already", tmp_path / "out"
  with pytest.raises(ValueError, match=words):
    convert(str(source), str(out), show_progress=False)


def test_two_runs_do_not_write_one_output(source, tmp_path):
  partial = tmp_path / "out.partial"
  partial.mkdir()
  (partial / writer.JOURNAL).write_text("being written")
  handle = os.open(partial, os.O_RDONLY)
  try:
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another conversion is writing it"):
      convert(str(source), str(tmp_path / "out"), show_progress=False)
  finally:
    os.close(handle)
  assert _names(partial) == [writer.JOURNAL]


def test_killed_at_any_moment_and_run_again(tmp_path):
  """No folder of the output's name appears before it is whole; the next run completes."""
  config = tiny_config(hidden_size=256, moe_intermediate_size=64, n_routed_experts=128)
  source = write_checkpoint(tmp_path / "source", config, shard_bytes=8_000_000)
  command = [sys.executable, "-m", "moecore_jax.cli.main", "convert"]
  command += [f"--input={source}", f"--output={tmp_path / 'out'}"]
  seen_partial = 0
  for wait_s in (0.0, 0.2):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "out.partial").exists():
      time.sleep(0.01)
    time.sleep(wait_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (tmp_path / "out").exists():
      break
    seen_partial += (tmp_path / "out.partial").exists()
  assert seen_partial > 0
  if (tmp_path / "out").exists():
    shutil.rmtree(tmp_path / "out")
  subprocess.run(command, check=True, capture_output=True)
  assert _names(tmp_path) == ["out", "source"]
  stored = store.StoredCheckpoint(tmp_path / "out")
  assert sum(map(stored.verify, stored.items)) > 50_000_000


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "--input=INPUT is missing"),
    (["--input={source}"], "--output=OUTPUT is missing"),
    (["--input={new}", "--output={new}2"], "the checkpoint folder does not exist"),
    (["--input={source}", "--output={source}"], "the output exists"),
    (["--input={source}", "--output={new}", "--quantization=int3"], "quantization"),
    (["--input={source}", "--output={new}", "--dtype=int8"], "dtype"),
    (["--input={source}", "--output={new}/deep/er"], "its folder does not exist"),
    (["--input={source}", "--output={new}", "--json=/nowhere/x.json"], "/nowhere/x.json"),
  ],
)
def test_the_verb_refuses_wrong_input(source, tmp_path, capsys, arguments, words):
  before = sorted(tmp_path.rglob("*"))
  values = {"source": str(source), "new": str(tmp_path / "new")}
  assert main.main(["convert", *[a.format(**values) for a in arguments]]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1
  assert words in err
  assert sorted(tmp_path.rglob("*")) == before


EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


def _shard_of(folder, key):
  return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][key]


def _damage(folder, kind):
  """Puts a fault in a published folder; returns the file that is at fault."""
  file = _shard_of(folder, EXPERT)
  tensors = safetensors.numpy.load_file(file)
  index = json.loads((folder / INDEX_FILE).read_text())
  expert = tensors[EXPERT]
  if kind == "truncated":
    file.write_bytes(file.read_bytes()[:-1])
    return file
  if kind == "pickled":
    file.write_bytes(pickle.dumps(dict(tensors)))
    return file
  if kind == "path-escaping":
    index["weight_map"][EXPERT] = "../outside.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder
  if kind == "missing":
    del tensors[EXPERT]
  elif kind == "extra":
    tensors["extra"], index["weight_map"]["extra"] = expert, file.name
    (folder / INDEX_FILE).write_text(json.dumps(index))
  else:
    tensors[EXPERT] = {
      "wrong": expert.astype(np.int32),
      "NaN": expert * np.float32(np.nan),
      "mis-shaped": np.ascontiguousarray(expert.T),
    }[kind]
  safetensors.numpy.save_file(tensors, file)
  return file


DAMAGES = {
  "wrong": f"{{file}}: tensor {EXPERT}: dtype is I32, expected F32",
  "missing": f"{{file}}: tensor '{EXPERT}' is missing, the index says it is there",
  "extra": "1 tensors are unknown, e.g. extra in {file.name}",
  "truncated": "{file}: the file is truncated",
  "NaN": f"{{file}}: tensor {EXPERT}: has NaN or infinite values",
  "mis-shaped": f"{{file}}: tensor {EXPERT}: shape is (16, 32), config.json expects (32, 16)",
  "path-escaping": "{file}: weight file '../outside.safetensors' is outside the checkpoint folder",
  "pickled": "{file}: is a pickle, which is never read",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_verb_refuses_damaged_checkpoints(source, tmp_path, capsys, kind):
  """Exit code 2, one sentence that names file and tensor, and nothing is written."""
  file = _damage(source, kind)
  before = sorted(tmp_path.rglob("*"))
  assert main.main(["convert", f"--input={source}", f"--output={tmp_path / 'out'}"]) == 2
  (*_, sentence) = capsys.readouterr().err.splitlines()
  assert sentence.startswith("moecore convert: ")
  assert DAMAGES[kind].format(file=file) in sentence
  assert sorted(tmp_path.rglob("*")) == before


def test_the_verb(source, tmp_path, capsys):
  arguments = [f"--input={source}", f"--output={tmp_path / 'out'}", "--quantization=bfloat16"]
  assert main.main(["convert", *arguments, f"--json={tmp_path / 'result.json'}"]) == 0
  assert str(tmp_path / "out") in capsys.readouterr().out
  assert json.loads((tmp_path / "result.json").read_text())["expert_format"] == "bfloat16"
  assert store.StoredCheckpoint(tmp_path / "out").expert_format == "bfloat16"
