"""The files of a batch evaluation: an append-only log that outlives its process.

    WORKDIR/config.json    what was asked; a run that asks something else is refused
    WORKDIR/results.jsonl  one line for each answered item, synced before the next one is awaited
    WORKDIR/systems.json   memory and sizes of each system that was started
    WORKDIR/metrics.json   the figures, written when every item is answered

An item is answered when its whole line is in the log. A line that a killed process left unfinished
is cut off when the log is opened again, so each item is answered once. A lock keeps a second
process out.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self


def write_atomic(path: Path, text: str) -> None:
  """Writes a file so that a reader, or the next start, sees its old or its new content whole."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with open(temporary, "w", encoding="utf-8") as f:
      f.write(text)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  _sync_folder(path.parent)


class ResultLog:
  """The log of one workdir, held by one process from `with ResultLog(...)` to its end."""

  def __init__(self, workdir: Path, asked: Mapping[str, Any]):
    """Opens or creates the workdir.

    Args:
      workdir: folder; created with its parents where missing.
      asked: everything that determines the answers, in JSON types.

    Raises:
      ValueError: another process holds the workdir, it belongs to a different run, or its log is
        damaged.
    """
    self.workdir = workdir
    if workdir.exists() and not workdir.is_dir():
      raise ValueError(f"workdir {workdir} is a file; choose a folder")
    workdir.mkdir(parents=True, exist_ok=True)
    self._lock = open(workdir / ".lock", "ab")  # noqa: SIM115  held until close
    try:
      _lock(self._lock, workdir)
      _check_asked(workdir, asked)
      self._path = workdir / "results.jsonl"
      _drop_torn_line(self._path)
      self.rows = _read_rows(self._path)
      self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  held until close
    except BaseException:
      self._lock.close()
      raise
    _sync_folder(workdir)

  def append(self, row: Mapping[str, Any]) -> None:
    """Adds one answer and returns when it is on the disk."""
    data = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    while data:
      data = data[self._file.write(data) :]
    os.fsync(self._file.fileno())
    self.rows.append(dict(row))

  def write(self, name: str, content: Any) -> None:
    """Replaces one of the workdir's JSON files at once."""
    write_atomic(self.workdir / name, json.dumps(content, indent=1, allow_nan=False) + "\n")

  def read(self, name: str) -> Any:
    """Returns the object in one of the workdir's JSON files, None where there is no such file.

    Raises:
      ValueError: the file is damaged.
    """
    path = self.workdir / name
    return _read_object(path) if path.exists() else None

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self._file.close()
    self._lock.close()


def _lock(file: BinaryIO, workdir: Path) -> None:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    raise ValueError(
      f"workdir {workdir} is in use by another process; wait for it or choose another"
    ) from e


def _check_asked(workdir: Path, asked: Mapping[str, Any]) -> None:
  path = workdir / "config.json"
  if not path.exists():
    if (workdir / "results.jsonl").exists():
      raise ValueError(f"workdir {workdir} has results.jsonl but no config.json; choose another")
    write_atomic(path, json.dumps(asked, indent=1) + "\n")
    return
  difference = _difference(_read_object(path), json.loads(json.dumps(asked)))
  if difference:
    name, before, now = difference
    raise ValueError(
      f"workdir {workdir} belongs to a run with {name} = {before!r}, this one has {now!r}; "
      "choose another workdir, or delete it"
    )


def _difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
  """Returns (name, before, now) of the first leaf that differs."""
  if not (isinstance(before, dict) and isinstance(now, dict)):
    return None if before == now else (name, before, now)
  for key in [*before, *(key for key in now if key not in before)]:
    found = _difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    if found:
      return found
  return None


def _drop_torn_line(path: Path) -> None:
  """Cuts off what follows the last line end, in one system call."""
  if not path.exists():
    return
  with open(path, "r+b") as f:
    data = f.read()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
      f.truncate(whole)
      os.fsync(f.fileno())


def _read_rows(path: Path) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  rows = []
  for number, line in enumerate(path.read_bytes().splitlines(), 1):
    try:
      rows.append(json.loads(line))
      if not isinstance(rows[-1], dict):
        raise ValueError("it is no object")
    except ValueError as e:
      raise ValueError(
        f"{path} line {number} is damaged ({e}); remove the line or choose another workdir"
      ) from e
  return rows


def _read_object(path: Path) -> dict[str, Any]:
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as e:
    raise ValueError(f"{path} is not JSON ({e}); choose another workdir") from e
  if not isinstance(content, dict):
    raise ValueError(f"{path} holds no JSON object; choose another workdir")
  return content


def _sync_folder(folder: Path) -> None:
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
