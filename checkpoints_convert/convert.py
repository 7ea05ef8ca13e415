"""Turns a published checkpoint into one of ours, streaming.

What is written goes to a sibling folder, OUTPUT.partial, is read back and compared, and is renamed
at the end: a folder that bears the output's name is always whole. A partial folder that a killed
run left behind is taken up by the next run of the same source and settings, and emptied by another;
one that another run is still writing is locked.
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple, cast, get_args

import ml_dtypes
import numpy as np
import tqdm

from moecore_jax import memory
from moecore_jax.checkpoint import assemble, store, template, writer
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.models.experts import expert_bytes
from moecore_jax.quantization.formats import narrowed
from moecore_jax.specs import ExpertFormat

_FLOATS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DENSE_DTYPES = tuple(_FLOATS)
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)
_WORKERS = 2  # each with an item and what Orbax makes of it
_SPARE_DISK_FRAC, _SPARE_DISK_BYTES = 0.01, 16 << 20


def convert(
  source: str,
  output: str,
  *,
  expert_format: str = "",
  dtype: str = "",
  show_progress: bool = True,
) -> dict[str, Any]:
  """Converts a published folder.

  Host memory: a few times 256 MB, or one expert that is larger.

  Args:
    source: the published folder.
    output: folder to create; may exist if it is empty.
    expert_format: storage of routed experts; "": bfloat16 if published so, else float32.
    dtype: storage of dense weights, float32 or bfloat16, the routers float32 always; "": each as
      published.
    show_progress: draw a progress bar on stderr.

  Returns:
    {"output", "expert_format", "num_bytes", "num_items", "num_resumed", "fingerprint", "skipped"}:
    where, how and how much was written, how many items a killed run had written before, and the
    published keys that were left out, with reasons.

  Raises:
    ValueError: the source is missing or corrupt, the output exists, another run writes it, or the
      disk has no room for it; nothing is left behind. What is interrupted leaves OUTPUT.partial.
    OSError: it cannot be written; OUTPUT.partial is left, and the next run goes on from there.
  """
  _one_of("expert_format", expert_format, ("", *EXPERT_FORMATS))
  _one_of("dtype", dtype, ("", *DENSE_DTYPES))
  if store.is_store(source):
    raise ValueError(f"{source}: the input is converted already; give the published folder")
  checkpoint = PublishedCheckpoint(source)
  fmt = cast(ExpertFormat, expert_format) if expert_format else _published_format(checkpoint)
  parts = [*_dense_parts(checkpoint, dtype), *_bank_parts(checkpoint, fmt)]
  total = sum(part.num_bytes for part in parts)
  target = pathlib.Path(output)
  _check_output(target, checkpoint.folder, total)
  identity = _identity(checkpoint, fmt, dtype)
  with _partial_folder(target) as partial, memory.returning_freed_blocks(), _workers() as pool:
    written = writer.StoreWriter(partial, identity)
    if show_progress and (written.resumed or written.has_leftovers):
      print(_what_is_there(partial, written, len(parts)), file=sys.stderr)
    with _progress("convert", total, show_progress) as bar:
      items = []
      for item in pool.map(lambda part: written.write(part.item, part.make), parts):
        bar.update(parts[len(items)].num_bytes)
        items.append(item)
    written.finish(items, checkpoint.folder, fmt, identity["fingerprint"])
    stored = store.StoredCheckpoint(partial)
    with _progress("verify", total, show_progress) as bar:
      for num_bytes in pool.map(stored.verify, stored.items):
        bar.update(num_bytes)
    (partial / writer.JOURNAL).unlink()
    os.rename(partial, target)
    _sync_folder(target.parent)
  skipped = {k: v for k, v in checkpoint.keymap.skipped.items() if k in checkpoint.tensors}
  return {
    "output": str(target),
    "expert_format": fmt,
    "num_bytes": total,
    "num_items": len(stored.items),
    "num_resumed": len(written.resumed),
    "fingerprint": stored.fingerprint,
    "skipped": skipped,
  }


@contextlib.contextmanager
def _workers() -> Iterator[futures.Executor]:
  """Gives threads for items; after a fault those that have not begun do not begin."""
  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    try:
      yield pool
    finally:
      pool.shutdown(cancel_futures=True)


class _Part(NamedTuple):
  """What becomes one item.

  Attributes:
    item: without checksums and files.
    num_bytes: of its arrays.
    make: makes the arrays.
  """

  item: store.Item
  num_bytes: int
  make: Callable[[], dict[str, np.ndarray]]


def _dense_parts(checkpoint: PublishedCheckpoint, dtype: str) -> Iterator[_Part]:
  """Yields items of dense parameters, at most 256 MB each, were they float32."""
  wanted = template.dense_template(checkpoint.spec, _FLOATS[dtype or "float32"])
  cuts: dict[str, _Dense] = {}
  size = num_items = 0
  for cut in assemble.dense_cuts(checkpoint.keymap):
    leaf: Any = wanted
    for step in cut.rule.target:
      leaf = leaf[step]
    name, axis = store.dotted(cut.rule.target), cut.rule.axis
    shape = (*leaf.shape[:axis], cut.stop - cut.start, *leaf.shape[axis + 1 :])
    published = assemble.common_dtype(map(checkpoint.dtype_of, cut.rule.sources))
    stored = np.dtype(leaf.dtype) if dtype else published
    as_float32 = memory.num_bytes(shape, np.dtype(np.float32))
    if cuts and (name in cuts or size + as_float32 > assemble.MAX_CHUNK_BYTES):
      yield _dense_part(checkpoint, num_items, cuts)
      cuts, size, num_items = {}, 0, num_items + 1
    cuts[name], size = _Dense(cut, shape, stored), size + as_float32
  yield _dense_part(checkpoint, num_items, cuts)


class _Dense(NamedTuple):
  """Entries of a dense parameter, their shape, and what they are stored as."""

  cut: assemble.DenseCut
  shape: tuple[int, ...]
  dtype: np.dtype


def _dense_part(checkpoint: PublishedCheckpoint, index: int, cuts: dict[str, _Dense]) -> _Part:
  def make() -> dict[str, np.ndarray]:
    arrays = {}
    for name, (cut, _, dtype) in cuts.items():
      array = cut.read(checkpoint.keymap, checkpoint.read)
      with assemble.telling(cut.rule.sources[0]):
        arrays[name] = narrowed(array, dtype)
    return arrays

  places = {name: [d.cut.rule.axis, d.cut.start, d.cut.stop] for name, d in cuts.items()}
  num_bytes = sum(memory.num_bytes(d.shape, d.dtype) for d in cuts.values())
  return _Part(store.Item(f"dense/{index:05d}", cuts=places), num_bytes, make)


def _bank_parts(checkpoint: PublishedCheckpoint, fmt: ExpertFormat) -> Iterator[_Part]:
  spec = checkpoint.spec
  read = assemble.ExpertReader(checkpoint.keymap, checkpoint.read, spec, fmt)
  for cut in assemble.bank_cuts(spec, fmt):
    group, rows = template.expert_groups(spec, cut.bank)[cut.group], cut.stop - cut.start
    folder = f"banks/{cut.bank}.{cut.group}/{cut.start:06d}"
    item = store.Item(folder, cut.bank, cut.group, cut.start, rows)
    num_bytes = rows * expert_bytes(group, fmt)
    yield _Part(item, num_bytes, functools.partial(read, cut))


def _identity(checkpoint: PublishedCheckpoint, fmt: ExpertFormat, dtype: str) -> dict[str, Any]:
  """Returns what must be the same for one run to go on where another was killed."""
  files = {entry.file for entry in checkpoint.tensors.values()}
  return {
    "fingerprint": checkpoint.fingerprint(),
    "files": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(files)],
    "expert_format": fmt,
    "dtype": dtype,
  }


def _what_is_there(partial: pathlib.Path, written: writer.StoreWriter, num_parts: int) -> str:
  if written.resumed:
    return f"{partial}: goes on where a run was killed, {len(written.resumed)} of {num_parts} items"
  return f"{partial}: was left by a run of another source or other settings; starts anew"


def _published_format(checkpoint: PublishedCheckpoint) -> ExpertFormat:
  keys = [key for rule in checkpoint.keymap.experts for key in rule.sources]
  narrow = all(checkpoint.dtype_of(key) == _FLOATS["bfloat16"] for key in keys)
  return "bfloat16" if narrow else "float32"


def _check_output(target: pathlib.Path, source: pathlib.Path, num_bytes: int) -> None:
  parent, partial = target.resolve().parent, _partial_path(target)
  if not parent.is_dir():
    raise ValueError(f"{target}: its folder does not exist; create it first")
  is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
  if target.is_symlink() or not is_free:
    raise ValueError(f"{target}: the output exists; remove it or choose another folder")
  if target.resolve().is_relative_to(source.resolve()):
    raise ValueError(f"{target}: the output is within the input; choose another folder")
  if partial.is_symlink() or (partial.exists() and not writer.is_partial(partial)):
    raise ValueError(
      f"{partial}: no conversion has written what is there; remove it or choose another output"
    )
  needed = int(num_bytes * (1 + _SPARE_DISK_FRAC)) + _SPARE_DISK_BYTES
  left = partial.rglob("*")  # by a killed run; used again or removed
  free = shutil.disk_usage(parent).free + sum(p.stat().st_size for p in left if p.is_file())
  if free < needed:
    raise ValueError(
      f"{target}: the output needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free"
    )


@contextlib.contextmanager
def _partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a locked folder beside the output; removes it if a fault is found, but not if it cannot
  be written, as on a full disk."""
  partial = _partial_path(target)
  partial.mkdir(exist_ok=True)
  lock = os.open(partial, os.O_RDONLY)
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"{partial}: another conversion is writing it; wait for it to end") from None
    if not partial.exists() or os.fstat(lock).st_ino != partial.stat().st_ino:
      raise ValueError(f"{target}: another conversion has just ended; look at its output")
    try:
      yield partial
    except OSError:
      raise
    except Exception:
      shutil.rmtree(partial, ignore_errors=True)
      raise
  finally:
    os.close(lock)


def _partial_path(target: pathlib.Path) -> pathlib.Path:
  return target.resolve().with_name(target.name + ".partial")


def _progress(what: str, total: int, show: bool) -> tqdm.tqdm:
  return tqdm.tqdm(
    desc=what, total=total, unit="B", unit_scale=True, file=sys.stderr, disable=not show
  )


def _sync_folder(folder: pathlib.Path) -> None:
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _one_of(name: str, got: str, known: tuple[str, ...]) -> None:
  if got not in known:
    choices = ", ".join(filter(None, known))
    raise ValueError(f"--{name}={got}: expected one of {choices}")
