"""Loads a checkpoint: dense weights to the device, expert banks straight to pinned host memory."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moecore_jax import memory
from moecore_jax.checkpoint import assemble, store, template
from moecore_jax.checkpoint.published import PublishedCheckpoint
from moecore_jax.families.keymap import Path
from moecore_jax.models.experts import ExpertArrays
from moecore_jax.specs import ExpertFormat, ModelSpec

_CPU_ALIGNMENT = 64


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

  Beside the bank itself, a few chunks of at most 256 MB are in host memory at a time.

  Args:
    path: the folder.
    dtype: dense parameters; the routers stay float32.
    expert_format: storage of the banks.

  Raises:
    ValueError: the folder is missing, corrupt or does not match its config, or the bank does not
      fit pinned host memory; names the file and the tensor.
  """
  if store.is_store(path):
    source = store.StoredCheckpoint(path)
    pieces, chunks = source.dense_pieces(), source.bank_chunks(expert_format)
    name = source.fingerprint
  else:
    source = PublishedCheckpoint(path)
    keymap, read, spec = source.keymap, source.read, source.spec
    pieces = assemble.dense_pieces(keymap, read)
    chunks = assemble.bank_chunks(keymap, read, spec, expert_format)
    name = source.fingerprint()
  wanted = template.bank_template(source.spec, expert_format)
  memory.check_host_limit(template.total_bytes(wanted))
  with memory.returning_freed_blocks():
    params = place_dense(pieces, template.dense_template(source.spec, dtype))
    banks = fill_banks(chunks, wanted)
  tokenizer = source.folder / "tokenizer.json"
  return Loaded(
    spec=source.spec,
    params=params,
    banks=banks["experts"],
    mtp_banks=banks["mtp_experts"],
    tokenizer_path=str(tokenizer) if tokenizer.is_file() else None,
    fingerprint=name,
  )


def fingerprint(folder: str) -> str:
  """Returns what names the weights of a published or converted folder.

  Raises:
    ValueError: the folder is missing or corrupt.
  """
  return store.known_fingerprint(folder) or PublishedCheckpoint(folder).fingerprint()


def place_dense(pieces: Iterable[assemble.DensePiece], wanted: dict[str, Any]) -> dict[str, Any]:
  """Puts dense parameters on the device, a piece at a time.

  Args:
    pieces: cover every entry of every parameter once, in order; released one by one.
    wanted: nested dict of ShapeDtypeStruct with shardings.

  Returns:
    The nested dict of arrays.
  """
  params: dict[str, Any] = {}
  incomplete: dict[Path, int] = {}
  for path, axis, start, array in pieces:
    node: Any = params
    at: Any = wanted
    for part in path[:-1]:
      node, at = node.setdefault(part, {}), at[part]
    name, leaf = path[-1], at[path[-1]]
    assert start == incomplete.pop(path, 0), f"entries of {path} do not follow"
    end = start + array.shape[axis]
    if not start:
      node[name] = _allocate(leaf, in_pieces=end < leaf.shape[axis])
    if isinstance(node[name], np.ndarray):
      node[name][(*[slice(None)] * axis, slice(start, end))] = array
    else:
      entries = np.asarray(array, leaf.dtype, order="C")
      node[name] = _write_entries(node[name], entries, np.int32(start), axis)
      del entries
    del array
    if end < leaf.shape[axis]:
      incomplete[path] = end
    else:
      node[name] = jax.device_put(node[name], leaf.sharding)
    jax.block_until_ready(node[name])
  assert not incomplete, f"entries are missing: {incomplete}"
  template.check_against(params, wanted)
  return params


def _allocate(leaf: jax.ShapeDtypeStruct, in_pieces: bool) -> np.ndarray | jax.Array:
  """Returns an array to fill: NumPy memory, which a device on the host takes over as it is aligned,
  or, for what comes in pieces, another device's own: on its way a whole would be twice on the host.
  """
  (device,) = leaf.sharding.device_set
  if in_pieces and device.platform != "cpu":
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
  num_bytes = memory.num_bytes(leaf.shape, leaf.dtype)
  raw = np.empty(num_bytes + _CPU_ALIGNMENT, np.uint8)
  first = -raw.ctypes.data % _CPU_ALIGNMENT
  return raw[first : first + num_bytes].view(leaf.dtype).reshape(leaf.shape)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write_entries(whole: jax.Array, entries: jax.Array, start: jax.Array, axis: int) -> jax.Array:
  """Overwrites entries of a dense parameter along an axis, in place."""
  return lax.dynamic_update_slice_in_dim(whole, entries, start, axis)


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
