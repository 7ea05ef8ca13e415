"""Our checkpoint folder: Orbax items small enough to stream, and a manifest that names them.

    config.json, tokenizer.json ..    as published
    dense/00000 ..                    Orbax items, dense parameters {path joined by dots: array}
    banks/experts.0/00000 ..          Orbax items, consecutive rows of a bank {"gate_up", "down"}
    moecore_checkpoint.json           the manifest, written last

A folder without the manifest is no checkpoint. Items hold at most 256 MB, or one weight that is
larger, so that neither writing nor reading needs a second copy of the model.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import orbax.checkpoint as ocp

from moecore_jax import families
from moecore_jax.checkpoint.assemble import MAX_CHUNK_BYTES, BankChunk
from moecore_jax.checkpoint.published import read_json, read_spec
from moecore_jax.checkpoint.template import BANK_NAMES, expert_groups
from moecore_jax.families.keymap import Path
from moecore_jax.quantization import formats
from moecore_jax.specs import ExpertFormat, ModelSpec

MANIFEST = "moecore_checkpoint.json"
VERSION = 1
COPIED_FILES = (
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class Item:
  """One Orbax item.

  Attributes:
    folder: relative to the checkpoint's folder.
    checksums: {array name: CRC-32 of its bytes in C order}.
    bank: "" for dense parameters, else "experts" or "mtp_experts".
    group: index of the expert group.
    start: first row.
    rows: number of rows.
    files: {file name: bytes} of what Orbax wrote for it.
  """

  folder: str
  checksums: dict[str, int]
  bank: str = ""
  group: int = 0
  start: int = 0
  rows: int = 0
  files: dict[str, int] = dataclasses.field(default_factory=dict)


class StoreWriter:
  """Writes a checkpoint into an empty folder; it becomes one when `finish` returns."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._items: list[Item] = []
    self._checkpointer = _checkpointer()

  def write_dense(self, leaves: Iterable[tuple[Path, np.ndarray]]) -> Iterator[int]:
    """Writes the dense parameters as they come; yields the bytes written after each item."""
    pending: dict[str, np.ndarray] = {}
    for path, array in leaves:
      if pending and array.nbytes + _num_bytes(pending) > MAX_CHUNK_BYTES:
        yield self._write_dense_item(pending)
        pending = {}
      pending[dotted(path)] = np.ascontiguousarray(array)
      del array
    if pending:
      yield self._write_dense_item(pending)

  def write_chunk(self, chunk: BankChunk) -> int:
    """Writes rows of a bank; returns the bytes written."""
    folder = f"banks/{chunk.bank}.{chunk.group}/{chunk.start:06d}"
    rows = chunk.arrays["down"].shape[0]
    item = Item(folder, _checksums(chunk.arrays), chunk.bank, chunk.group, chunk.start, rows)
    return self._write(item, chunk.arrays)

  def finish(self, source: pathlib.Path, expert_format: ExpertFormat, fingerprint: str) -> None:
    """Copies config and tokenizer, then writes the manifest.

    Args:
      source: the published folder.
      expert_format: of the written banks.
      fingerprint: of the published weights.
    """
    self._checkpointer.close()
    for name in COPIED_FILES:
      if (source / name).is_file():
        shutil.copyfile(source / name, self.folder / name)
    manifest = {
      "version": VERSION,
      "fingerprint": fingerprint,
      "config_sha256": _sha256(self.folder / "config.json"),
      "expert_format": expert_format,
      "items": [dataclasses.asdict(item) for item in self._items],
    }
    with open(self.folder / MANIFEST, "w", encoding="utf-8") as f:
      json.dump(manifest, f, indent=1)
      f.flush()
      os.fsync(f.fileno())

  def close(self) -> None:
    """Ends the writer, finished or not."""
    self._checkpointer.close()

  def _write_dense_item(self, arrays: dict[str, np.ndarray]) -> int:
    folder = f"dense/{len(self._items):05d}"
    return self._write(Item(folder, _checksums(arrays)), arrays)

  def _write(self, item: Item, arrays: dict[str, np.ndarray]) -> int:
    target = self.folder / item.folder
    target.parent.mkdir(parents=True, exist_ok=True)
    self._checkpointer.save(target.resolve(), args=ocp.args.PyTreeSave(arrays))
    files = {str(p.relative_to(target)): p.stat().st_size for p in _files(target)}
    self._items.append(dataclasses.replace(item, files=files))
    return _num_bytes(arrays)


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
      self.fingerprint, self.expert_format = manifest["fingerprint"], manifest["expert_format"]
      self.items = tuple(Item(**item) for item in manifest["items"])
      config_sha256 = manifest["config_sha256"]
    except (KeyError, TypeError) as error:
      raise ValueError(f"{file}: is damaged: {error!r}; convert again") from None
    if config_sha256 != _sha256(self.folder / "config.json"):
      raise ValueError(f"{self.folder / 'config.json'}: was changed after the conversion")
    self._paths = {dotted(rule.target): rule.target for rule in families.key_map(self.spec).dense}
    self._check_items(file)

  def dense_leaves(self) -> Iterator[tuple[Path, np.ndarray]]:
    """Yields (path, array in NumPy) of the dense parameters.

    Raises:
      ValueError: an item is missing or damaged.
    """
    with contextlib.closing(_checkpointer()) as checkpointer:
      for item in self.items:
        if not item.bank:
          arrays = self._read(checkpointer, item)
          for name in list(arrays):
            yield self._paths[name], arrays.pop(name)

  def bank_chunks(self, fmt: ExpertFormat) -> Iterator[BankChunk]:
    """Yields the banks, chunk by chunk, in the given format; a chunk belongs to its receiver.

    Raises:
      ValueError: an item is missing or damaged.
    """
    with contextlib.closing(_checkpointer()) as checkpointer:
      for item in self.items:
        if item.bank:
          arrays = self._read(checkpointer, item)
          if fmt != self.expert_format:
            for name in arrays:
              rows = formats.unpack_host(arrays[name], self.expert_format)
              arrays[name] = formats.pack(rows, fmt)
          yield BankChunk(item.bank, item.group, item.start, arrays)
          del arrays

  def verify(self) -> Iterator[int]:
    """Reads everything back and compares checksums; yields the bytes read after each item.

    Raises:
      ValueError: an item is missing or damaged.
    """
    with contextlib.closing(_checkpointer()) as checkpointer:
      for item in self.items:
        yield _num_bytes(self._read(checkpointer, item))

  def _check_items(self, file: pathlib.Path) -> None:
    for item in self.items:
      if not (self.folder / item.folder).resolve().is_relative_to(self.folder.resolve()):
        raise ValueError(f"{file}: item {item.folder!r} is outside the checkpoint folder")
    dense = [name for item in self.items if not item.bank for name in item.checksums]
    if sorted(dense) != sorted(self._paths):
      raise ValueError(f"{file}: dense parameters do not match config.json; convert again")
    banks = [item for item in self.items if item.bank]
    covered: dict[tuple[str, int], int] = {}
    for item in banks:
      key = (item.bank, item.group)
      if item.start != covered.get(key, 0) or sorted(item.checksums) != ["down", "gate_up"]:
        raise ValueError(f"{file}: rows of bank {item.folder} do not follow; convert again")
      covered[key] = item.start + item.rows
    wanted = {
      (bank, g): group.num_rows
      for bank in BANK_NAMES
      for g, group in enumerate(expert_groups(self.spec, bank))
    }
    if covered != wanted:
      raise ValueError(f"{file}: bank rows do not match config.json; convert again")

  def _read(self, checkpointer: ocp.Checkpointer, item: Item) -> dict[str, np.ndarray]:
    folder = self.folder / item.folder
    for name, size in item.files.items():  # Orbax itself fails noisily
      file = folder / name
      if not file.is_file():
        raise ValueError(f"{file}: the file is missing; convert again")
      if file.stat().st_size != size:
        got = file.stat().st_size
        raise ValueError(f"{file}: has {got} bytes, expected {size}; convert again")
    args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in item.checksums}
    try:
      arrays = checkpointer.restore(
        folder.resolve(),
        args=ocp.args.PyTreeRestore(item=dict.fromkeys(args, 0), restore_args=args),
      )
    except Exception as error:  # of any kind, depending on what is damaged
      reason = str(error).strip().partition("\n")[0][:200]
      raise ValueError(f"{folder}: cannot be restored: {reason}; convert again") from error
    for name, checksum in item.checksums.items():
      if zlib.crc32(_as_bytes(arrays[name])) != checksum:
        raise ValueError(f"{folder}: array {name}: its checksum is wrong; convert again")
    return arrays


def is_store(path: str | pathlib.Path) -> bool:
  """Tells whether a folder is a converted checkpoint."""
  return (pathlib.Path(path) / MANIFEST).is_file()


def dotted(path: Path) -> str:
  """Returns the name under which a dense parameter is stored."""
  return ".".join(map(str, path))


def _checkpointer() -> ocp.Checkpointer:
  """Uncompressed: weights hardly compress, and compression would hold a chunk more in memory."""
  return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def _as_bytes(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksums(arrays: dict[str, np.ndarray]) -> dict[str, int]:
  return {name: zlib.crc32(_as_bytes(array)) for name, array in arrays.items()}


def _num_bytes(arrays: dict[str, np.ndarray]) -> int:
  return sum(array.nbytes for array in arrays.values())


def _sha256(file: pathlib.Path) -> str:
  return hashlib.sha256(file.read_bytes()).hexdigest()
