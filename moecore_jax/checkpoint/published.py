"""Reads a checkpoint folder as published: config.json, and model.safetensors or indexed shards.

Every key is checked against the family's key map before the first weight is read; every weight is
checked when it is read.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moecore_jax import families
from moecore_jax.checkpoint import safetensors_file, sources
from moecore_jax.families.keymap import KeyMap, check_sources
from moecore_jax.specs import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FINGERPRINT_BYTES = 4096


class PublishedCheckpoint:
  """An open published folder.

  Attributes:
    folder: the folder.
    spec: the model.
    keymap: rules from published keys to our arrays.
    tensors: {key: Entry} of all shards.
  """

  folder: pathlib.Path
  spec: ModelSpec
  keymap: KeyMap
  tensors: Mapping[str, safetensors_file.Entry]

  def __init__(self, path: str | pathlib.Path):
    """Opens a folder and checks its config, files, keys, shapes and dtypes; reads no weights.

    Raises:
      ValueError: anything is missing, corrupt or does not match; names the file and the tensor.
    """
    self.folder = pathlib.Path(path)
    self.spec = read_spec(self.folder)
    self.keymap = families.key_map(self.spec)
    self.tensors = _tensors(self.folder)
    self._sources = {
      key: source
      for key in self.keymap.shapes
      if (source := sources.find(key, self.tensors, key in self.keymap.id_tables)) is not None
    }
    read = {key: key for key in self._sources}
    read |= {part: key for key, source in self._sources.items() for part in source.keys}
    try:
      check_sources(self.keymap, {read.get(key, key) for key in self.tensors})
    except ValueError as error:
      raise ValueError(f"{self.folder}: {error}") from None
    for key, shape in self.keymap.shapes.items():
      source = self._sources[key]
      if source.shape != tuple(shape):
        file = self.tensors[source.keys[0]].file
        raise ValueError(
          f"{file}: tensor {key}: shape is {source.shape}, config.json expects {tuple(shape)}"
        )

  def read(self, key: str, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Reads rows of one weight, all if none are named: the values that it stands for.

    Raises:
      ValueError: the tensor cannot be read or has NaN or infinite values.
    """
    return self._sources[key].read(start, stop)

  def dtype_of(self, key: str) -> np.dtype:
    """Returns the dtype in which a weight's values are exact."""
    return self._sources[key].dtype

  def fingerprint(self) -> str:
    """Returns a hash of config.json and each needed tensor's name, dtype, shape and first 4096
    bytes.

    It tells one set of weights from another, however they are sharded.

    Raises:
      ValueError: a file has become shorter.
    """
    digest = hashlib.sha256((self.folder / "config.json").read_bytes())
    for key in sorted(part for source in self._sources.values() for part in source.keys):
      entry = self.tensors[key]
      digest.update(f"{key} {entry.dtype} {entry.shape}\n".encode())
      digest.update(safetensors_file.first_bytes(key, entry, _FINGERPRINT_BYTES))
    return digest.hexdigest()


def read_spec(folder: str | pathlib.Path) -> ModelSpec:
  """Reads the model described by a folder's config.json; no weights.

  Raises:
    ValueError: the folder or the file is missing, is not JSON, or describes no supported model.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise ValueError(f"{folder}: the checkpoint folder does not exist")
  file = folder / "config.json"
  config = read_json(file)
  try:
    return families.model_spec(config)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from None
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f"{file}: a field is missing or malformed: {error!r}") from None


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ValueError: the file is missing, unreadable or not a JSON object.
  """
  try:
    value = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{file}: the file is missing") from None
  except OSError as error:
    raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
  except ValueError as error:
    raise ValueError(f"{file}: is not JSON: {error}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{file}: is not a JSON object")
  return value


def _tensors(folder: pathlib.Path) -> dict[str, safetensors_file.Entry]:
  if (folder / SINGLE_FILE).exists():
    return safetensors_file.read_header(_inside(folder, SINGLE_FILE))
  if not (folder / INDEX_FILE).exists():
    raise ValueError(_no_weights(folder))
  file = folder / INDEX_FILE
  weight_map = read_json(file).get("weight_map")
  if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
    raise ValueError(f"{file}: weight_map does not map tensors to files")
  tensors: dict[str, safetensors_file.Entry] = {}
  shards = {name: _inside(folder, name) for name in sorted(set(weight_map.values()))}
  for shard, path in shards.items():
    for key, entry in safetensors_file.read_header(path).items():
      if key in tensors:
        raise ValueError(f"{folder}: tensor {key} is in both {tensors[key].file.name} and {shard}")
      if weight_map.get(key) != shard:
        raise ValueError(
          f"{entry.file}: tensor {key}: the index says it is in {weight_map.get(key)}"
        )
      tensors[key] = entry
  for key, shard in weight_map.items():
    if key not in tensors:
      raise ValueError(f"{folder / shard}: tensor {key} is missing, the index says it is there")
  return tensors


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a weight file, which must lie in the folder.

  A snapshot of a download cache links to the blobs beside it; these count as its own.
  """
  file = folder / name
  if pathlib.PurePath(name).suffix in _PICKLES:
    raise ValueError(f"{file}: is a pickle, which is never read; expected safetensors")
  roots = [folder.resolve()]
  if roots[0].parent.name == "snapshots":
    roots.append(roots[0].parent.parent / "blobs")
  if not any(file.resolve().is_relative_to(root) for root in roots):
    raise ValueError(f"{folder}: weight file {name!r} is outside the checkpoint folder")
  return file


def _no_weights(folder: pathlib.Path) -> str:
  names = sorted(p.name for p in folder.iterdir())
  pickles = [n for n in names if n.endswith(_PICKLES)]
  if pickles:
    return f"{folder / pickles[0]}: is a pickle, which is never read; expected {SINGLE_FILE}"
  if any(n.endswith(".safetensors") for n in names):
    return f"{folder / INDEX_FILE}: the index of the shards is missing"
  return f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}"
