"""Reads a checkpoint folder as published: config.json, and model.safetensors or indexed shards.

Every key is checked against the family's key map before the first weight is read; every weight is
checked when it is read.
"""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moecore_jax import families
from moecore_jax.checkpoint import safetensors_file, sources
from moecore_jax.families.config_reader import shown
from moecore_jax.families.keymap import KeyMap
from moecore_jax.specs import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FINGERPRINT_BYTES, _MAX_NAME = 4096, 250


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
    self.tensors = _tensors(self.folder)
    self._check_size()
    self.keymap = families.key_map(self.spec)
    self._sources = {
      key: source
      for key in self.keymap.shapes
      if (source := sources.find(key, self.tensors, self.keymap.id_tables.get(key))) is not None
    }
    self._check_keys()
    for key, shape in self.keymap.shapes.items():
      source = self._sources[key]
      if source.shape != tuple(shape):
        file = self.tensors[source.keys[0]].file
        raise ValueError(
          f"{file}: tensor {key}: shape is {source.shape}, config.json expects {tuple(shape)}"
        )

  def _check_keys(self) -> None:
    """Refuses keys that are missing, or that the family neither consumes nor skips."""
    missing = self.keymap.shapes.keys() - self._sources.keys()
    consumed = {part for source in self._sources.values() for part in source.keys}
    unknown = {
      f"{key} in {self.tensors[key].file.name}"
      for key in self.tensors.keys() - consumed - self.keymap.skipped.keys()
    }
    problems = [
      f"{len(keys)} tensors are {what}, e.g. {', '.join(sorted(keys)[:3])}"
      for keys, what in ((missing, "missing"), (unknown, "unknown"))
      if keys
    ]
    if problems:
      raise ValueError(
        f"{self.folder}: checkpoint does not match its config.json: {'; '.join(problems)}"
      )

  def _check_size(self) -> None:
    """Refuses a config of many more experts or layers than there are: to list them takes for ever.

    A value takes half a byte or more, a layer some tensors.
    """
    groups = (*self.spec.expert_groups, *self.spec.mtp_expert_groups)
    num_experts = sum(group.num_rows for group in groups)
    num_values = sum(group.num_rows * group.params_per_expert for group in groups)
    num_bytes = sum(entry.num_bytes for entry in self.tensors.values())
    num_layers = len(self.spec.layers) + len(self.spec.mtp_layers)
    if num_values > 2 * num_bytes or num_layers > len(self.tensors):
      raise ValueError(
        f"{self.folder}: config.json describes {num_experts} experts in {num_layers} layers, there "
        f"are {num_bytes} bytes in {len(self.tensors)} tensors; download the checkpoint again"
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
  config = read_json(folder / "config.json")
  try:
    return families.model_spec(config)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from None


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object.

  Raises:
    ValueError: the file is missing, unreadable, too large or not a JSON object.
  """
  try:
    with safetensors_file.open_regular(file) as f:
      data = f.read(safetensors_file.JSON_LIMIT_BYTES + 1)
    if len(data) > safetensors_file.JSON_LIMIT_BYTES:
      raise ValueError(f"has more than {safetensors_file.JSON_LIMIT_BYTES} bytes")
    value = safetensors_file.parse_json(data)
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
        place = f"in {weight_map[key]}" if key in weight_map else "nowhere"
        raise ValueError(f"{entry.file}: tensor {key}: the index says it is {place}")
      tensors[key] = entry
  for key, shard in weight_map.items():
    if key not in tensors:
      raise ValueError(
        f"{folder / shard}: tensor {shown(key)} is missing, the index says it is there"
      )
  return tensors


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the path of a weight file, which must lie in the folder.

  A snapshot of a download cache links to the blobs beside it; these count as its own.
  """
  file = folder / name
  if len(name) > _MAX_NAME or not name.isprintable():
    raise ValueError(f"{folder}: weight file {shown(name)} is no name of a file")
  if pathlib.PurePath(name).suffix in _PICKLES:
    raise ValueError(f"{file}: is a pickle, which is never read; expected safetensors")
  roots = [folder.resolve()]
  if roots[0].parent.name == "snapshots":
    roots.append(roots[0].parent.parent / "blobs")
  try:
    is_inside = any(file.resolve().is_relative_to(root) for root in roots)
  except (ValueError, OSError, RuntimeError):  # it has odd characters, or is a link to itself
    raise ValueError(f"{folder}: weight file {shown(name)} cannot be found") from None
  if not is_inside:
    raise ValueError(f"{folder}: weight file {shown(name)} is outside the checkpoint folder")
  return file


def _no_weights(folder: pathlib.Path) -> str:
  names = sorted(p.name for p in folder.iterdir())
  pickles = [n for n in names if n.endswith(_PICKLES)]
  if pickles:
    return f"{folder / pickles[0]}: is a pickle, which is never read; expected {SINGLE_FILE}"
  if any(n.endswith(".safetensors") for n in names):
    return f"{folder / INDEX_FILE}: the index of the shards is missing"
  return f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}"
