"""Turns a published checkpoint into one of ours, streaming.

What is written goes to a sibling folder, OUTPUT.partial, is read back and compared, and is renamed
at the end: a folder that bears the output's name is always whole. A partial folder that a killed
run left behind is emptied by the next run; one that another run is still writing is locked.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, cast, get_args

import ml_dtypes
import numpy as np
import tqdm

from moecore_jax import memory
from moecore_jax.checkpoint import assemble, store, template
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.families.keymap import Path
from moecore_jax.quantization.formats import expert_bytes
from moecore_jax.specs import ExpertFormat

_FLOATS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DENSE_DTYPES = tuple(_FLOATS)
EXPERT_FORMATS: tuple[ExpertFormat, ...] = get_args(ExpertFormat)
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

  Host memory: a few times the largest of 256 MB and one weight.

  Args:
    source: the published folder.
    output: folder to create; may exist if it is empty.
    expert_format: storage of routed experts; "": bfloat16 if published so, else float32.
    dtype: storage of dense weights, float32 or bfloat16, the routers float32 always; "": each as
      published.
    show_progress: draw a progress bar on stderr.

  Returns:
    {"output", "expert_format", "num_bytes", "num_items", "fingerprint", "skipped"}: where, how and
    how much was written, and the published keys that were left out, with reasons.

  Raises:
    ValueError: the source is missing or corrupt, the output exists, another run writes it, or the
      disk is full; nothing is left behind.
  """
  _one_of("expert_format", expert_format, ("", *EXPERT_FORMATS))
  _one_of("dtype", dtype, ("", *DENSE_DTYPES))
  checkpoint = PublishedCheckpoint(source)
  fmt = cast(ExpertFormat, expert_format) if expert_format else _published_format(checkpoint)
  plan = _dense_plan(checkpoint, dtype)
  total = _output_bytes(checkpoint, plan, fmt)
  target = pathlib.Path(output)
  _check_output(target, total)
  with _partial_folder(target) as partial, memory.returning_freed_blocks():
    with _progress("convert", total, show_progress) as bar:
      _write(checkpoint, partial, plan, fmt, bar)
    stored = store.StoredCheckpoint(partial)
    with _progress("verify", total, show_progress) as bar:
      for read in stored.verify():
        bar.update(read)
    os.rename(partial, target)
    _sync_folder(target.parent)
  skipped = {k: v for k, v in checkpoint.keymap.skipped.items() if k in checkpoint.tensors}
  return {
    "output": str(target),
    "expert_format": fmt,
    "num_bytes": total,
    "num_items": len(stored.items),
    "fingerprint": stored.fingerprint,
    "skipped": skipped,
  }


class _Dense(NamedTuple):
  """Where a dense parameter goes, with what shape, stored as what."""

  path: Path
  shape: tuple[int, ...]
  dtype: np.dtype


def _write(
  checkpoint: PublishedCheckpoint,
  folder: pathlib.Path,
  plan: dict[Path, _Dense],
  fmt: ExpertFormat,
  bar: tqdm.tqdm,
) -> None:
  with contextlib.closing(store.StoreWriter(folder)) as writer:
    for written in writer.write_dense(_dense_leaves(checkpoint, plan)):
      bar.update(written)
    for chunk in assemble.expert_chunks(checkpoint.keymap, checkpoint.read, checkpoint.spec, fmt):
      bar.update(writer.write_chunk(chunk))
      del chunk
    writer.finish(checkpoint.folder, fmt, checkpoint.fingerprint())


def _dense_plan(checkpoint: PublishedCheckpoint, dtype: str) -> dict[Path, _Dense]:
  wanted = template.dense_template(checkpoint.spec, _FLOATS[dtype or "float32"])
  plan = {}
  for rule in checkpoint.keymap.dense:
    leaf: Any = wanted
    for part in rule.target:
      leaf = leaf[part]
    published = np.result_type(*map(checkpoint.dtype_of, rule.sources))
    plan[rule.target] = _Dense(
      rule.target, leaf.shape, np.dtype(leaf.dtype) if dtype else published
    )
  return plan


def _dense_leaves(
  checkpoint: PublishedCheckpoint, plan: dict[Path, _Dense]
) -> Iterator[tuple[Path, np.ndarray]]:
  for path, array in assemble.dense_leaves(checkpoint.keymap, checkpoint.read):
    yield path, array.astype(plan[path].dtype, copy=False)
    del array


def _published_format(checkpoint: PublishedCheckpoint) -> ExpertFormat:
  keys = [key for rule in checkpoint.keymap.experts for key in rule.sources]
  narrow = all(checkpoint.dtype_of(key) == _FLOATS["bfloat16"] for key in keys)
  return "bfloat16" if narrow else "float32"


def _output_bytes(
  checkpoint: PublishedCheckpoint, plan: dict[Path, _Dense], fmt: ExpertFormat
) -> int:
  groups = [*checkpoint.spec.expert_groups, *checkpoint.spec.mtp_expert_groups]
  banks = sum(g.num_rows * expert_bytes(g.embed_dim, g.expert_dim, fmt) for g in groups)
  return banks + sum(memory.num_bytes(leaf.shape, leaf.dtype) for leaf in plan.values())


def _check_output(target: pathlib.Path, num_bytes: int) -> None:
  parent = target.resolve().parent
  if not parent.is_dir():
    raise ValueError(f"{target}: its folder does not exist; create it first")
  is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
  if target.is_symlink() or not is_free:
    raise ValueError(f"{target}: the output exists; remove it or choose another folder")
  needed = int(num_bytes * (1 + _SPARE_DISK_FRAC)) + _SPARE_DISK_BYTES
  free = shutil.disk_usage(parent).free
  if free < needed:
    raise ValueError(
      f"{target}: the output needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free"
    )


@contextlib.contextmanager
def _partial_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives an empty, locked folder beside the output; removes it unless it was renamed."""
  partial = target.resolve().with_name(target.name + ".partial")
  partial.mkdir(exist_ok=True)
  lock = os.open(partial, os.O_RDONLY)
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f"{partial}: another conversion is writing it; wait for it to end") from None
    if not partial.exists() or os.fstat(lock).st_ino != partial.stat().st_ino:
      raise ValueError(f"{target}: another conversion has just ended; look at its output")
    for leftover in partial.iterdir():
      shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    try:
      yield partial
    except BaseException:
      shutil.rmtree(partial, ignore_errors=True)
      raise
  finally:
    os.close(lock)


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
