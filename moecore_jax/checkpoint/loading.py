"""Loads a checkpoint: dense weights to the device, expert banks straight to pinned host memory."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moecore_jax import memory
from moecore_jax.checkpoint import assemble, store, template
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.families.keymap import Path
from moecore_jax.models.experts import ExpertArrays
from moecore_jax.specs import ExpertFormat, ModelSpec


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model in memory.

  Attributes:
    spec: its shapes.
    params: dense parameters, a nested dict of arrays in device memory, with the paths of the
      model's nnx state.
    banks: {"gate_up", "down"} of each of `spec.expert_groups`, in pinned host memory.
    mtp_banks: likewise of each of `spec.mtp_expert_groups`.
    tokenizer_path: the folder's tokenizer.json, or None.
    fingerprint: names the weights; a published folder and what it was converted to have the same.
  """

  spec: ModelSpec
  params: dict[str, Any]
  banks: tuple[ExpertArrays, ...]
  mtp_banks: tuple[ExpertArrays, ...]
  tokenizer_path: str | None
  fingerprint: str


def load(path: str, *, dtype: jnp.dtype, expert_format: ExpertFormat) -> Loaded:
  """Loads a published-format or a converted folder.

  Beside the bank itself, a few chunks of at most 256 MB and one dense weight are in host memory at
  a time.

  Args:
    path: the folder.
    dtype: dense parameters; the routers stay float32.
    expert_format: storage of the banks.

  Raises:
    ValueError: the folder is missing, corrupt or does not match its config, or the bank does not
      fit pinned host memory; names the file and the tensor.
  """
  if store.is_store(path):
    stored = store.StoredCheckpoint(path)
    leaves, chunks = stored.dense_leaves(), stored.bank_chunks(expert_format)
    return _load(
      stored.folder, stored.spec, leaves, chunks, lambda: stored.fingerprint, dtype, expert_format
    )
  published = PublishedCheckpoint(path)
  leaves = assemble.dense_leaves(published.keymap, published.read)
  chunks = assemble.expert_chunks(published.keymap, published.read, published.spec, expert_format)
  return _load(
    published.folder, published.spec, leaves, chunks, published.fingerprint, dtype, expert_format
  )


def _load(
  folder: pathlib.Path,
  spec: ModelSpec,
  leaves: Iterable[tuple[Path, np.ndarray]],
  chunks: Iterable[assemble.BankChunk],
  fingerprint: Callable[[], str],
  dtype: jnp.dtype,
  fmt: ExpertFormat,
) -> Loaded:
  wanted = template.bank_template(spec, fmt)
  memory.check_host_limit(template.total_bytes(wanted))
  with memory.returning_freed_blocks():
    params = place_dense(leaves, template.dense_template(spec, dtype))
    banks = fill_banks(chunks, wanted)
  tokenizer = folder / "tokenizer.json"
  return Loaded(
    spec=spec,
    params=params,
    banks=banks["experts"],
    mtp_banks=banks["mtp_experts"],
    tokenizer_path=str(tokenizer) if tokenizer.is_file() else None,
    fingerprint=fingerprint(),
  )


def place_dense(
  leaves: Iterable[tuple[Path, np.ndarray]], wanted: dict[str, Any]
) -> dict[str, Any]:
  """Puts dense parameters on the device, one at a time.

  Args:
    leaves: (path, array in NumPy) of every parameter; released one by one.
    wanted: nested dict of ShapeDtypeStruct with shardings.

  Returns:
    The nested dict of arrays.
  """
  params: dict[str, Any] = {}
  for path, array in leaves:
    node: Any = params
    at: Any = wanted
    for part in path[:-1]:
      node, at = node.setdefault(part, {}), at[part]
    leaf = at[path[-1]]
    host = np.array(
      array, leaf.dtype, order="C"
    )  # a copy of its own: a device on the host may keep it
    node[path[-1]] = jax.device_put(host, leaf.sharding)
    node[path[-1]].block_until_ready()
  template.check_against(params, wanted)
  return params


def fill_banks(
  chunks: Iterable[assemble.BankChunk], wanted: dict[str, tuple[dict[str, Any], ...]]
) -> dict[str, tuple[ExpertArrays, ...]]:
  """Allocates the banks in pinned host memory and writes the chunks into them as they come.

  Each chunk is waited for: writes that queue up would hold all their chunks at once.

  Args:
    chunks: cover every row of every bank once, bank by bank in row order.
    wanted: ShapeDtypeStructs with shardings.

  Returns:
    The filled banks, structured as `wanted`.
  """
  banks = {name: tuple({} for _ in groups) for name, groups in wanted.items()}
  written = {(name, g): 0 for name, groups in wanted.items() for g in range(len(groups))}
  for chunk in chunks:
    arrays, key = banks[chunk.bank][chunk.group], (chunk.bank, chunk.group)
    assert chunk.start == written[key], f"rows of {key} from {chunk.start}, not {written[key]}"
    written[key] += len(chunk.arrays["down"])
    for name, leaf in wanted[chunk.bank][chunk.group].items():
      rows = chunk.arrays.pop(name)
      if chunk.start == 0:
        arrays[name] = memory.first_rows(rows, leaf.shape[0])
      else:
        arrays[name] = memory.write_rows(arrays[name], rows, np.int32(chunk.start))
      del rows
      arrays[name].block_until_ready()
  for (name, g), rows in written.items():  # what is not written is undefined
    expected = wanted[name][g]["down"].shape[0]
    assert rows == expected, f"{rows} of {expected} rows of {name} {g} were written"
  template.check_against(banks, wanted)
  return banks
