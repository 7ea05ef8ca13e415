"""Writes a checkpoint folder item by item, so that a run that is killed can be taken up again.

The journal, one JSON line an item, says what is there; it goes when the checkpoint is whole.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from moecore_jax.checkpoint.store import (
  MANIFEST,
  VERSION,
  Item,
  checkpointer,
  checksum,
  leave_page_cache,
  sha256,
)
from moecore_jax.specs import ExpertFormat

JOURNAL = "moecore_conversion.jsonl"
COPIED_FILES = (
  "config.json",
  "generation_config.json",
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "chat_template.jinja",
)


class StoreWriter:
  """Writes a checkpoint into a folder; it becomes one when `finish` returns.

  Attributes:
    folder: the folder.
    resumed: items that an earlier run of the same identity left, by their folders.
    has_leftovers: something else was there, and was removed.
  """

  folder: pathlib.Path
  resumed: Mapping[str, Item]
  has_leftovers: bool

  def __init__(self, folder: pathlib.Path, identity: dict[str, Any]):
    """Opens a folder.

    Args:
      folder: exists, and belongs to the writer.
      identity: of the source and the settings, in JSON types; what was written under another one is
        removed.
    """
    self.folder = folder
    self._lock = threading.Lock()
    first = json.dumps({"version": VERSION, **identity})
    resumed = _written(folder, first)
    self.resumed = resumed or {}
    self.has_leftovers = resumed is None and any(folder.iterdir())
    if resumed is None:
      for leftover in folder.iterdir():
        _remove(leftover)
      (folder / JOURNAL).write_text(first)
    self._keep_only(self.resumed)  # the kill has torn others

  def write(self, item: Item, make: Callable[[], dict[str, np.ndarray]]) -> Item:
    """Writes an item, unless an earlier run has; several threads may each write one.

    Args:
      item: without checksums and files.
      make: makes the arrays; called only if they are needed.

    Returns:
      The item, with checksums and files.
    """
    there = self.resumed.get(item.folder)
    if there and dataclasses.replace(there, checksums={}, files={}) == item:
      return there
    target = self.folder / item.folder
    _remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in make().items()}
    checksums = {name: checksum(array) for name, array in arrays.items()}
    self._save(target, arrays)
    leave_page_cache(target)
    files = {str(p.relative_to(target)): p.stat().st_size for p in _files(target)}
    item = dataclasses.replace(item, checksums=checksums, files=files)
    with self._lock, open(self.folder / JOURNAL, "a", encoding="utf-8") as f:
      f.write("\n" + json.dumps(dataclasses.asdict(item)))  # a torn line does not spoil the next
    return item

  def finish(
    self,
    items: Sequence[Item],
    source: pathlib.Path,
    expert_format: ExpertFormat,
    fingerprint: str,
  ) -> None:
    """Copies config and tokenizer, then writes the manifest.

    Args:
      items: all that were written, dense first, then the banks in row order.
      source: the published folder.
      expert_format: of the written banks.
      fingerprint: of the published weights.
    """
    self._keep_only(item.folder for item in items)
    for name in COPIED_FILES:
      if (source / name).is_file():
        shutil.copyfile(source / name, self.folder / name)
    manifest = {
      "version": VERSION,
      "fingerprint": fingerprint,
      "config_sha256": sha256(self.folder / "config.json"),
      "expert_format": expert_format,
      "items": [dataclasses.asdict(item) for item in items],
    }
    with open(self.folder / MANIFEST, "w", encoding="utf-8") as f:
      json.dump(manifest, f, indent=1)
      f.flush()
      os.fsync(f.fileno())

  def _keep_only(self, items: Iterable[str]) -> None:
    kept = {self.folder / item for item in items}
    for folder in (*self.folder.glob("dense/*"), *self.folder.glob("banks/*/*")):
      if folder not in kept:
        _remove(folder)

  def _save(self, target: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    try:
      with contextlib.closing(checkpointer()) as writer:
        writer.save(target.resolve(), args=ocp.args.PyTreeSave(arrays))
    except Exception as error:
      reason = os.strerror(errno.ENOSPC)
      if reason not in str(error):
        raise
      raise OSError(errno.ENOSPC, reason, str(target)) from error


def is_partial(folder: pathlib.Path) -> bool:
  """Tells whether a folder is what a run has left: one with a journal, or an empty one."""
  return folder.is_dir() and ((folder / JOURNAL).is_file() or not any(folder.iterdir()))


def _written(folder: pathlib.Path, first: str) -> dict[str, Item] | None:
  """Returns the items that a journal of this first line tells of and whose files are there, None
  where there is no such journal."""
  try:
    lines = (folder / JOURNAL).read_text(encoding="utf-8").split("\n")
  except (FileNotFoundError, UnicodeDecodeError):
    return None
  if lines[0] != first:
    return None
  items = {}
  for line in lines[1:]:
    try:
      item = Item.from_json(json.loads(line))
    except ValueError:
      continue  # torn by the kill
    if not item.file_fault(folder):
      items[item.folder] = item
  return items


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def _remove(path: pathlib.Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)
