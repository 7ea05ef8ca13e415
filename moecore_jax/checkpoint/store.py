"""Our checkpoint folder: Orbax items small enough to stream, and a manifest that names them.

    config.json, tokenizer.json ..    as published
    dense/00000 ..                    Orbax items, dense parameters {path joined by dots: array}
    banks/experts.0/00000 ..          Orbax items, consecutive rows of a bank {"gate_up", "down"}
    moecore_checkpoint.json           the manifest, written last

A folder without the manifest is no checkpoint. Items hold at most 256 MB, or one expert that is
larger, so that neither writing nor reading needs a second copy of anything: a dense parameter of
more than 64 MB, were it float32, is cut in pieces of several items.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from moecore_jax import families
from moecore_jax.checkpoint.assemble import BankChunk, DensePiece, num_entries
from moecore_jax.checkpoint.published import read_json, read_spec
from moecore_jax.checkpoint.template import BANK_NAMES, expert_groups
from moecore_jax.families.config_reader import shown
from moecore_jax.families.keymap import Path
from moecore_jax.models.experts import bank_layout
from moecore_jax.quantization import formats
from moecore_jax.specs import ExpertFormat, ModelSpec

MANIFEST = "moecore_checkpoint.json"
VERSION = 2
_MAX_NAME = 250


@dataclasses.dataclass(frozen=True)
class Item:
  """One Orbax item.

  Attributes:
    folder: relative to the checkpoint's folder.
    bank: "" for dense parameters, else "experts" or "mtp_experts".
    group: index of the expert group.
    start: first row.
    rows: number of rows.
    cuts: {array name: [axis, start, stop]}, which entries of each dense parameter are here.
    checksums: {array name: CRC-32 of its bytes in C order}.
    files: {file name: bytes} of what Orbax wrote for it.
  """

  folder: str
  bank: str = ""
  group: int = 0
  start: int = 0
  rows: int = 0
  cuts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  checksums: dict[str, int] = dataclasses.field(default_factory=dict)
  files: dict[str, int] = dataclasses.field(default_factory=dict)

  @classmethod
  def from_json(cls, value: Any) -> "Item":
    """Returns what `dataclasses.asdict` and JSON made of an item, as it was.

    Raises:
      ValueError: it is none; says why.
    """
    _check_fields("an item", value, _ITEM_FIELDS)
    return cls(**value)

  def file_fault(self, root: pathlib.Path) -> str:
    """Returns what is wrong with the files of the item in a checkpoint folder, "" if nothing is."""
    for name, size in self.files.items():
      file = root / self.folder / name
      if not file.is_file():
        return f"{file}: the file is missing"
      if (got := file.stat().st_size) != size:
        return f"{file}: has {got} bytes, expected {size}"
    return ""


class StoredCheckpoint:
  """An open checkpoint folder.

  Attributes:
    folder: the folder.
    spec: the model.
    fingerprint: names the weights.
    expert_format: of the stored banks.
    items: all Orbax items, dense first, then the banks in row order.
  """

  folder: pathlib.Path
  spec: ModelSpec
  fingerprint: str
  expert_format: ExpertFormat
  items: tuple[Item, ...]

  def __init__(self, path: str | pathlib.Path):
    """Opens a folder and checks that its manifest is complete; reads no weights.

    Raises:
      ValueError: the manifest or config.json is missing, damaged, or does not match the other.
    """
    self.folder = pathlib.Path(path)
    file = self.folder / MANIFEST
    manifest = read_json(file)
    if manifest.get("version") != VERSION:
      got = manifest.get("version")
      raise ValueError(f"{file}: version is {got!r}, expected {VERSION}; convert again")
    self.spec = read_spec(self.folder)
    try:
      _check_fields("the manifest", manifest, _MANIFEST_FIELDS)
      self.items = tuple(map(Item.from_json, manifest["items"]))
    except ValueError as error:
      raise ValueError(f"{file}: is damaged: {error}; convert again") from None
    self.fingerprint, self.expert_format = manifest["fingerprint"], manifest["expert_format"]
    if manifest["config_sha256"] != sha256(self.folder / "config.json"):
      raise ValueError(f"{self.folder / 'config.json'}: was changed after the conversion")
    self._keymap = families.key_map(self.spec)
    self._check_dense(file)
    self._check_banks(file)

  def dense_pieces(self) -> Iterator[DensePiece]:
    """Yields the dense parameters, a piece at a time; a piece belongs to its receiver.

    Raises:
      ValueError: an item is missing or damaged.
    """
    paths = {dotted(rule.target): rule.target for rule in self._keymap.dense}
    with contextlib.closing(checkpointer()) as reader:
      for item in self.items:
        if not item.bank:
          arrays = self._read(reader, item)
          for name, (axis, start, _) in item.cuts.items():
            yield DensePiece(paths[name], axis, start, arrays.pop(name))

  def bank_chunks(self, fmt: ExpertFormat) -> Iterator[BankChunk]:
    """Yields the banks, chunk by chunk, in the given format; a chunk belongs to its receiver.

    Raises:
      ValueError: an item is missing or damaged.
    """
    with contextlib.closing(checkpointer()) as reader:
      for item in self.items:
        if item.bank:
          arrays = self._read(reader, item)
          if fmt != self.expert_format:
            has_bias = expert_groups(self.spec, item.bank)[item.group].has_bias
            for name in arrays:
              rows = formats.unpack_host(arrays[name], self.expert_format, has_bias)
              arrays[name] = formats.pack(rows, fmt, has_bias)
          yield BankChunk(item.bank, item.group, item.start, arrays)
          del arrays

  def verify(self, item: Item) -> int:
    """Reads an item back and compares checksums; returns its bytes.

    Raises:
      ValueError: it is missing or damaged.
    """
    with contextlib.closing(checkpointer()) as reader:
      num_bytes = sum(array.nbytes for array in self._read(reader, item).values())
    leave_page_cache(self.folder / item.folder)
    return num_bytes

  def _check_dense(self, file: pathlib.Path) -> None:
    covered: dict[str, tuple[int, int]] = {}
    for item in self.items:
      if not (self.folder / item.folder).resolve().is_relative_to(self.folder.resolve()):
        raise ValueError(f"{file}: item {item.folder!r} is outside the checkpoint folder")
      if item.cuts.keys() != (set() if item.bank else item.checksums.keys()):
        raise ValueError(f"{file}: arrays of {item.folder} are not what it says; convert again")
      for name, (axis, start, stop) in item.cuts.items():
        if (axis, start) != covered.get(name, (axis, 0)):
          raise ValueError(f"{file}: pieces of {name} do not follow; convert again")
        covered[name] = (axis, stop)
    wanted = {
      dotted(rule.target): (rule.axis, num_entries(self._keymap, rule))
      for rule in self._keymap.dense
    }
    if covered != wanted:
      raise ValueError(f"{file}: dense parameters do not match config.json; convert again")

  def _check_banks(self, file: pathlib.Path) -> None:
    banks = [item for item in self.items if item.bank]
    covered: dict[tuple[str, int], int] = {}
    for item in banks:
      key = (item.bank, item.group)
      if item.start != covered.get(key, 0) or sorted(item.checksums) != ["down", "gate_up"]:
        raise ValueError(f"{file}: rows of bank {item.folder} do not follow; convert again")
      covered[key] = item.start + item.rows
    groups = {
      (bank, g): group
      for bank in BANK_NAMES
      for g, group in enumerate(expert_groups(self.spec, bank))
    }
    if covered != {key: group.num_rows for key, group in groups.items()}:
      raise ValueError(f"{file}: bank rows do not match config.json; convert again")
    try:
      self._layouts = {k: bank_layout(group, self.expert_format) for k, group in groups.items()}
    except ValueError:  # its values do not fill words or groups
      raise ValueError(
        f"{file}: expert_format {self.expert_format} does not match config.json; convert again"
      ) from None

  def _read(self, reader: ocp.Checkpointer, item: Item) -> dict[str, np.ndarray]:
    folder = self.folder / item.folder
    if fault := item.file_fault(self.folder):  # Orbax itself fails noisily
      raise ValueError(f"{fault}; convert again")
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in item.checksums}
    try:
      arrays = reader.restore(
        folder.resolve(),
        args=ocp.args.PyTreeRestore(item=dict.fromkeys(args, 0), restore_args=args),
      )
    except Exception as error:  # of any kind, depending on what is damaged
      reason = str(error).strip().partition("\n")[0][:200]
      raise ValueError(f"{folder}: cannot be restored: {reason}; convert again") from error
    for name, expected in item.checksums.items():
      if checksum(arrays[name]) != expected:
        raise ValueError(f"{folder}: array {name}: its checksum is wrong; convert again")
      self._check_shape(item, name, arrays[name])
    return arrays

  def _check_shape(self, item: Item, name: str, array: np.ndarray) -> None:
    """Refuses an array that is not what the manifest says of it."""
    if item.bank:
      shape, dtype = self._layouts[item.bank, item.group][name]
      got, wanted = (array.shape, array.dtype), ((item.rows, *shape[1:]), dtype)
      what = f"{item.rows} rows in {self.expert_format}"
    else:
      axis, start, stop = item.cuts[name]
      got, wanted = array.shape[axis : axis + 1], (stop - start,)
      what = f"{stop - start} entries"
    if got != wanted:
      raise ValueError(
        f"{self.folder / MANIFEST}: is damaged: array {name} of {item.folder} has shape "
        f"{array.shape} and dtype {array.dtype}, which is not {what}; convert again"
      )


def is_store(path: str | pathlib.Path) -> bool:
  """Tells whether a folder is a converted checkpoint."""
  return (pathlib.Path(path) / MANIFEST).is_file()


def known_fingerprint(folder: str | pathlib.Path) -> str:
  """Returns the fingerprint of a converted folder's weights, "" where they must be read for it."""
  return StoredCheckpoint(folder).fingerprint if is_store(folder) else ""


def dotted(path: Path) -> str:
  """Returns the name under which a dense parameter is stored."""
  return ".".join(map(str, path))


def checkpointer() -> ocp.Checkpointer:
  """Uncompressed and without a copy of what is written: weights hardly compress, and either would
  hold an item more in memory.
  """
  handlers = type_handlers.create_type_handler_registry(
    (np.ndarray, type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
    (jax.Array, type_handlers.ArrayHandler()),
  )
  return ocp.Checkpointer(
    ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)
  )


def leave_page_cache(folder: pathlib.Path) -> None:
  """Frees what the page cache holds of an item's files, which are on the disk: they will be read
  from there, and their pages are at hand for what is written next.
  """
  if not hasattr(os, "posix_fadvise"):
    return
  for path in folder.rglob("*"):
    if path.is_file():
      with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checksum(array: np.ndarray) -> int:
  """Returns the CRC-32 of an array's bytes in C order."""
  return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def sha256(file: pathlib.Path) -> str:
  """Returns the SHA-256 of a small file's bytes."""
  return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_fields(what: str, value: Any, fields: Mapping[str, Callable[[Any], bool]]) -> None:
  """Refuses a value that is no JSON object of just these fields, each as its predicate wants it."""
  if not isinstance(value, dict):
    raise ValueError(f"{what} is {shown(value)}, expected an object")
  if missing := sorted(fields.keys() - value.keys()):
    raise ValueError(f"{what} has no field {missing[0]}")
  if unknown := sorted(value.keys() - fields.keys()):
    raise ValueError(f"{what} has an unknown field {shown(unknown[0])}")
  for name, is_valid in fields.items():
    if not is_valid(value[name]):
      raise ValueError(f"{name} of {what} is {shown(value[name])}")


def _is_count(value: Any) -> bool:
  return type(value) is int and value >= 0


def _is_name(value: Any) -> bool:
  """Tells whether a value can name a file; whether it may is another question."""
  is_text = isinstance(value, str) and value.isascii() and value.isprintable()
  return is_text and 0 < len(value) <= _MAX_NAME


def _is_cut(value: Any) -> bool:
  return isinstance(value, list) and len(value) == 3 and all(map(_is_count, value))


def _maps_names(value: Any, is_valid: Callable[[Any], bool]) -> bool:
  """Tells whether a value is an object of names, each with a valid value."""
  return isinstance(value, dict) and all(_is_name(k) and is_valid(v) for k, v in value.items())


_ITEM_FIELDS: Mapping[str, Callable[[Any], bool]] = {
  "folder": _is_name,
  "bank": lambda value: value in ("", *BANK_NAMES),
  "group": _is_count,
  "start": _is_count,
  "rows": _is_count,
  "cuts": lambda value: _maps_names(value, _is_cut),
  "checksums": lambda value: _maps_names(value, _is_count),
  "files": lambda value: _maps_names(value, _is_count),
}
_MANIFEST_FIELDS: Mapping[str, Callable[[Any], bool]] = {
  "version": lambda value: value == VERSION,
  "fingerprint": lambda value: isinstance(value, str),
  "config_sha256": lambda value: isinstance(value, str),
  "expert_format": lambda value: value in get_args(ExpertFormat),
  "items": lambda value: isinstance(value, list),
}
