"""Trace file, version 1: a trace as an npz archive of plain arrays.

Names are those of `Trace`; `event_step`, `event_kind` and `event_row` hold the events, `residency`
and `meta` are JSON text.
"""

import dataclasses
import json
import os
import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np

from moecore_jax.config import from_plain
from moecore_jax.specs import ResidencySpec
from moecore_jax.traces.trace import OPTIONAL_PER_TOKEN, PER_TOKEN, Events, Trace

VERSION = 1
_REQUIRED = (*PER_TOKEN, "sequence_offsets", "num_experts", "top_k", "expert_bytes")
_OPTIONAL = (*OPTIONAL_PER_TOKEN, "domain")


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
  """Writes a trace file; a reader sees the old content or the whole new one."""
  arrays: dict[str, Any] = {
    "version": np.int32(VERSION),
    "meta": np.array(json.dumps(trace.meta)),
  }
  for name in (*_REQUIRED, *_OPTIONAL):
    if (value := getattr(trace, name)) is not None:
      arrays[name] = value
  if trace.events is not None:
    arrays |= {f"event_{name}": value for name, value in vars(trace.events).items()}
  if trace.residency is not None:
    arrays["residency"] = np.array(json.dumps(dataclasses.asdict(trace.residency)))
  if trace.seed is not None:
    arrays["seed"] = np.int64(trace.seed)
  target = pathlib.Path(path)
  temporary = target.with_name(f".{target.name}.{os.getpid()}")
  try:
    with open(temporary, "wb") as file:
      np.savez_compressed(file, **arrays)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, target)
  finally:
    temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Trace:
  """Reads a trace file.

  Raises:
    ValueError: the file is no trace of this version, or damaged.
  """
  return from_arrays(read_npz(path), str(path))


def from_arrays(arrays: dict[str, np.ndarray], source: str) -> Trace:
  """Returns the trace in the arrays of a trace file.

  Args:
    arrays: by name.
    source: name of the file, for errors.

  Raises:
    ValueError: the arrays are no trace of this version.
  """
  missing = [name for name in ("version", *_REQUIRED) if name not in arrays]
  if missing:
    raise ValueError(
      f"{source}: has no {', '.join(missing)}, expected a trace of version {VERSION}"
    )
  if arrays["version"].shape or arrays["version"] != VERSION:
    raise ValueError(f"{source}: version is {arrays['version'].tolist()!r}, expected {VERSION}")
  names = [f"event_{field.name}" for field in dataclasses.fields(Events)]
  events = [arrays[name] for name in names if name in arrays]
  if events and len(events) < len(names):
    raise ValueError(f"{source}: the event table lacks one of {', '.join(names)}")
  fields: dict[str, Any] = {name: arrays.get(name) for name in (*_REQUIRED, *_OPTIONAL)}
  try:
    return Trace(
      **fields,
      events=Events(*events) if events else None,
      residency=from_plain(ResidencySpec, _json(arrays, "residency")),
      seed=int(arrays["seed"]) if "seed" in arrays else None,
      meta=_json(arrays, "meta") or {},
    )
  except (TypeError, ValueError) as error:
    raise ValueError(f"{source}: {error}") from error


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns the arrays of an npz file; pickled ones are refused.

  Raises:
    ValueError: the file is not one, or damaged.
  """
  with open(path, "rb") as file:
    try:
      with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
    except (
      AttributeError,  # a single array instead of an archive
      EOFError,
      NotImplementedError,  # an unknown compression
      OSError,
      ValueError,
      zipfile.BadZipFile,
      zlib.error,
    ) as error:
      raise ValueError(f"{path}: is no npz archive of plain arrays, or damaged: {error}") from error


def _json(arrays: dict[str, np.ndarray], name: str) -> Any:
  try:
    return json.loads(str(arrays[name])) if name in arrays else None
  except ValueError as error:
    raise ValueError(f"{name} is no JSON: {error}") from error
