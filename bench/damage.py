"""Published checkpoints as plain data, and faults that are put in them at random."""

import dataclasses
import json
import math
import os
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
Json = Any

_FILE, _INDEX, _CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "F8_E4M3": 1, "F8_E8M0": 1}
_NAN = {"F32": "0000c07f", "F16": "007e", "BF16": "807f"}
_DTYPES = (*_ITEM_BYTES, "U8", "I8", "F64", "BOOL", "F8_E5M2", "F4", "f32", "", "\x00")
_NAMES = ("../x", "/etc/passwd", "", ".", "a\x00b", "n" * 300, "model.bin", "\ud800", "config.json")
_FIELDS = (
  *("head_dim", "rope_scaling", "rope_parameters", "layer_types", "indexer_types"),
  *("compress_ratios", "compress_rates", "mlp_layer_types", "mlp_only_layers"),
  *("decoder_sparse_step", "num_hash_layers", "index_topk_freq", "n_group", "topk_group"),
  *("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "q_lora_rank"),
  *("sliding_window", "qk_rope_head_dim", "partial_rotary_factor", "eos_token_id", "topk_method"),
)
"""Fields that a config of the tests may lack."""


@dataclasses.dataclass
class Published:
  """A checkpoint folder before it is written.

  Attributes:
    config: what config.json says.
    shards: {file name: {key: (dtype, shape, bytes)}}; one shard has no index.
    edits: run on the folder when all is written, in order.
    headers: run on the header of a shard, by its file name, before it is written.
    index: run on the index before it is written.
    text: run on the text of a JSON file, by its name, before it is written.
  """

  config: dict[str, Json]
  shards: dict[str, dict[str, tuple[str, list[int], bytes]]]
  edits: list[Callable[[pathlib.Path], None]] = dataclasses.field(default_factory=list)
  headers: dict[str, list[Callable[[dict], Json]]] = dataclasses.field(default_factory=dict)
  index: list[Callable[[dict], Json]] = dataclasses.field(default_factory=list)
  text: dict[str, list[Callable[[str], str]]] = dataclasses.field(default_factory=dict)

  @classmethod
  def read(cls, folder: pathlib.Path, rng: Rng) -> "Published":
    """Reads a folder of plain weights; some become FP8 or FP4, and some get shards."""
    config = json.loads((folder / _CONFIG).read_text())
    data = (folder / _FILE).read_bytes()
    base = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for key, entry in json.loads(data[8:base]).items():
      if key != "__metadata__":
        begin, end = entry["data_offsets"]
        tensors[key] = (entry["dtype"], entry["shape"], data[base + begin : base + end])
    if rng.random() < 0.5:
      tensors = _quantised(tensors, config["model_type"], rng)
    if rng.random() < 0.5:
      return cls(config, {_FILE: tensors})
    keys, count = list(tensors), int(rng.integers(2, 4))
    parts = [keys[i::count] for i in range(count)]
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return cls(
      config,
      {n: {k: tensors[k] for k in part} for n, part in zip(names, parts, strict=True)},
    )

  def write(self, folder: pathlib.Path) -> None:
    """Writes the folder, which must not exist, with all faults."""
    folder.mkdir()
    weight_map = {key: name for name, tensors in self.shards.items() for key in tensors}
    for name, tensors in self.shards.items():
      _write_shard(folder / name, tensors, self.headers.get(name, []))
    self._write_json(folder / _CONFIG, self.config)
    if list(self.shards) != [_FILE]:
      index: Json = {"metadata": {"total_size": 1}, "weight_map": weight_map}
      for edit in self.index:
        index = edit(index)
      self._write_json(folder / _INDEX, index)
    for edit in self.edits:
      edit(folder)

  def _write_json(self, file: pathlib.Path, value: Json) -> None:
    text = json.dumps(value)
    for edit in self.text.get(file.name, []):
      text = edit(text)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def damage(published: Published, rng: Rng) -> list[str]:
  """Puts one to three faults in a checkpoint; returns their names."""
  names = []
  for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
    fault = _FAULTS[int(rng.choice(len(_FAULTS), p=_WEIGHTS))]
    names.append(f"{fault.__name__.lstrip('_')}: {fault(published, rng)}")
  return names


def _write_shard(file: pathlib.Path, tensors: dict, edits: list[Callable[[dict], Json]]) -> None:
  header, data = {}, b""
  for key, (dtype, shape, part) in tensors.items():
    offsets = [len(data), len(data) + len(part)]
    header[key] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    data += part
  for edit in edits:
    header = edit(header)
  text = header if isinstance(header, str) else json.dumps(header)
  raw = text.encode("utf-8", "surrogatepass")
  file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _quantised(tensors: dict, model_type: str, rng: Rng) -> dict:
  """Returns the tensors with some matrices as their family publishes quantised ones; values are
  random."""
  result = dict(tensors)
  for key, (_, shape, _) in tensors.items():
    fused = model_type == "gpt_oss" and key.endswith("_proj") and len(shape) == 3
    if fused and shape[1] % 32 == 0:
      del result[key]
      count, rows, columns = shape
      blocks = [count, columns, rows // 32, 16]
      result[f"{key}_blocks"] = ("U8", blocks, rng.bytes(math.prod(blocks)))
      result[f"{key}_scales"] = ("U8", blocks[:3], _exponents(math.prod(blocks[:3]), rng))
      continue
    if not key.endswith("proj.weight") and ".w" not in key:
      continue
    if len(shape) != 2 or rng.random() < 0.7 or fused:
      continue
    rows, columns = shape
    blocks = [-(-n // 128) for n in shape]
    values = rng.integers(0, 0x7F, rows * columns) | rng.integers(0, 2, rows * columns) << 7
    codes = ("F8_E4M3", shape, values.astype(np.uint8).tobytes())
    if model_type != "deepseek_v4":
      scales = np.full(blocks, 2.0**-7, np.float32)
      result |= {key: codes, f"{key}_scale_inv": ("F32", blocks, scales.tobytes())}
    elif rng.random() < 0.5 or columns % 32:
      scale = ("F8_E8M0", blocks, _exponents(math.prod(blocks), rng))
      result |= {key: codes, key.removesuffix(".weight") + ".scale": scale}
    else:
      groups = [rows, columns // 32]
      scale = ("F8_E8M0", groups, _exponents(math.prod(groups), rng))
      result[key] = ("I8", [rows, columns // 2], rng.bytes(rows * columns // 2))
      result[key.removesuffix(".weight") + ".scale"] = scale
  return result


def _exponents(count: int, rng: Rng) -> bytes:
  return rng.integers(115, 124, count).astype(np.uint8).tobytes()


# Values.


def _pick(rng: Rng, options: Any) -> Any:
  options = list(options)
  return options[int(rng.integers(len(options)))]


def _whole(rng: Rng) -> int:
  exponent = int(rng.integers(0, 130))
  near = [-1, 0, 1, 2, 3, 5, 7, 63, 64, 65, 127, 1000, 4097, 65536, 10**6, 10**9]
  huge = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63)]
  return _pick(rng, [*near, *near, *huge, 2**exponent, -(2**exponent)])


def _odd(rng: Rng, depth: int = 0) -> Json:
  """Returns a value that hardly fits anywhere."""
  plain = [None, True, False, "", "x", "1", "yarn", "default", "full", "\ud800", "é\u202e\x00" * 3]
  numbers = [0.5, -0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, -0.0, 3.0]
  kind = int(rng.integers(0, 7))
  if kind < 2:
    return _whole(rng)
  if kind == 2:
    return _pick(rng, numbers)
  if kind == 3 or depth > 2:
    return _pick(rng, plain)
  if kind == 4:
    return [_odd(rng, depth + 1) for _ in range(int(rng.integers(0, 4)))]
  if kind == 5:
    keys = ["type", "rope_type", "factor", "rope_theta", "main", "compress", "x", ""]
    return {_pick(rng, keys): _odd(rng, depth + 1) for _ in range(int(rng.integers(0, 4)))}
  return _pick(rng, ["long" * 5000, [0] * 5000, ["moe"] * 300, {str(i): i for i in range(500)}])


def _changed(value: Json, rng: Rng) -> Json:
  """Returns a value like another, or an odd one."""
  if isinstance(value, bool) or rng.random() < 0.3:
    return _odd(rng) if rng.random() < 0.7 else not value
  if isinstance(value, int):
    near = [value + 1, value - 1, 2 * value, value // 2, -value, str(value)]
    return _pick(rng, [*near, float(value) if abs(value) < 1e300 else 0.5, _whole(rng)])
  if isinstance(value, float):
    return _pick(rng, [-value, 0.0, value * 1e300, math.nan, math.inf, int(value), str(value)])
  if isinstance(value, str):
    return _pick(rng, [value + " ", value[:-1], value.upper(), [value], "../" + value, None])
  if isinstance(value, list) and value:
    i = int(rng.integers(len(value)))
    new = _changed(value[i], rng)
    options = [[*value[:i], new, *value[i + 1 :]], value[:-1], value + value, [], value[::-1], new]
    return _pick(rng, options)
  if isinstance(value, dict) and value:
    key = _pick(rng, value)
    if rng.random() < 0.2:
      return {k: v for k, v in value.items() if k != key}
    return value | {key: _changed(value[key], rng)}
  return _odd(rng)


def _short(value: Json) -> str:
  text = repr(value)
  return text if len(text) < 60 else f"{text[:57]}..."


# Faults.


def _config_field(published: Published, rng: Rng) -> str:
  config = published.config
  field = _pick(rng, config)
  config[field] = _changed(config[field], rng)
  return f"{field} = {_short(config[field])}"


def _config_new_field(published: Published, rng: Rng) -> str:
  field = _pick(rng, _FIELDS)
  published.config[field] = _odd(rng)
  return f"{field} = {_short(published.config[field])}"


def _config_lost_field(published: Published, rng: Rng) -> str:
  field = _pick(rng, published.config)
  del published.config[field]
  return field


def _config_text(published: Published, rng: Rng) -> str:
  return _json_text(published, _CONFIG, rng)


def _index_text(published: Published, rng: Rng) -> str:
  return _json_text(published, _INDEX, rng)


def _json_text(published: Published, file: str, rng: Rng) -> str:
  edit = _text_edit(rng)
  published.text.setdefault(file, []).append(edit)
  return edit.__doc__ or ""


def _text_edit(rng: Rng) -> Callable[[str], str]:
  place, kind, depth = rng.random(), int(rng.integers(0, 8)), int(rng.choice([50, 3000, 100_000]))

  def edit(text: str) -> str:
    at = int(place * len(text))
    nested = "[" * depth + "]" * depth
    return [
      text[:at],
      text[:at] + text[at + 1 :],
      text[:at] + "\x00" + text[at:],
      text[:at] + nested + text[at:],
      nested,
      text.replace("{", '{"deep": ' + nested + ", ", 1),
      text.replace("{", '{"hidden_size": 16, "vocab_size": 1, ', 1)
      if place < 0.5
      else "\ufeff" + text,
      text.replace(":", ": 1" + "0" * 5000 + ", ", 1) if place < 0.5 else text + text,
    ][kind]

  edit.__doc__ = f"kind {kind} at {place:.3f}, depth {depth}"
  return edit


def _header_entry(published: Published, rng: Rng) -> str:
  """One field of one tensor."""
  name = _pick(rng, published.shards)
  key, field = _pick(rng, published.shards[name]), _pick(rng, ["dtype", "shape", "data_offsets"])
  seed = int(rng.integers(1 << 30))

  def edit(header: dict) -> Json:
    if not isinstance(header, dict) or not isinstance(header.get(key), dict):
      return header
    inner = np.random.default_rng(seed)
    old = header[key].get(field)
    new = (
      _pick(inner, _DTYPES) if field == "dtype" and inner.random() < 0.8 else _changed(old, inner)
    )
    return header | {key: header[key] | {field: new}}

  published.headers.setdefault(name, []).append(edit)
  return f"{name} {key} {field} {seed}"


def _header_whole(published: Published, rng: Rng) -> str:
  """The header as a whole."""
  name = _pick(rng, published.shards)
  keys = [_pick(rng, published.shards[name]) for _ in range(2)]
  kind, odd = int(rng.integers(0, 9)), _odd(rng)

  def edit(header: dict) -> Json:
    if not isinstance(header, dict) or not header.keys() >= set(keys):
      return header
    a, b = keys
    rest = {k: v for k, v in header.items() if k != a}
    return [
      rest,
      rest | {a + "x": header[a]},
      rest | {"": header[a]},
      header | {a: header[b], b: header[a]},
      header | {a: odd},
      header | {"__metadata__": odd},
      header | {"extra": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
      json.dumps(header)[:-1] + ", " + json.dumps({a: header[a]})[1:],
      odd,
    ][kind]

  published.headers.setdefault(name, []).append(edit)
  return f"{name} {keys} kind {kind}"


def _header_text(published: Published, rng: Rng) -> str:
  name, edit = _pick(rng, published.shards), _text_edit(rng)
  published.headers.setdefault(name, []).append(
    lambda header: edit(header if isinstance(header, str) else json.dumps(header))
  )
  return f"{name} {edit.__doc__}"


def _tensor(published: Published, rng: Rng) -> str:
  """One tensor is another, is missing, has other dtype, shape or values, in a sound file."""
  name = _pick(rng, published.shards)
  key = _pick(rng, published.shards[name])
  dtype, shape, data = published.shards[name][key]
  kind = int(rng.integers(0, 8))
  size = _ITEM_BYTES.get(dtype, 1)
  if kind == 0:
    del published.shards[name][key]
  elif kind == 1:
    published.shards[name][_pick(rng, [key + "_scale_inv", key + "_blocks", "stray"])] = (
      "F32", [1], bytes(4))  # fmt: skip
  elif kind == 2:
    published.shards[name][key] = (dtype, shape[::-1], data)
  elif kind == 3:
    published.shards[name][key] = (dtype, [*shape, 1], data)
  elif kind == 4:
    published.shards[name][key] = (dtype, [0, *shape[1:]], b"")
  elif kind == 5:
    new = _pick(rng, list(_ITEM_BYTES))
    published.shards[name][key] = (new, shape, bytes(_ITEM_BYTES[new] * math.prod(shape)))
  elif kind == 6 and len(data) >= size:
    at = int(rng.integers(len(data) // size)) * size
    bits = {"F32": "0000c07f", "F16": "007e", "BF16": "807f", "F8_E4M3": "ff"}.get(
      dtype, "ff" * size
    )
    published.shards[name][key] = (
      dtype,
      shape,
      data[:at] + bytes.fromhex(bits) + data[at + size :],
    )
  else:
    published.shards[name][key] = (dtype, shape, rng.bytes(len(data)))
  return f"{name} {key} kind {kind}"


def _index(published: Published, rng: Rng) -> str:
  kind, odd, place = int(rng.integers(0, 7)), _odd(rng), rng.random()
  names = [
    "../x",
    "/etc/passwd",
    "",
    ".",
    "a\x00b",
    "n" * 300,
    "model.bin",
    "\ud800",
    "config.json",
  ]
  other = _pick(rng, names)

  def edit(index: dict) -> Json:
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
      return index
    weight_map = index["weight_map"]
    if not weight_map:
      return index
    key = list(weight_map)[int(place * len(weight_map))]
    shard = weight_map[key]
    return [
      odd,
      index | {"weight_map": odd},
      index | {"weight_map": weight_map | {key: odd}},
      index | {"weight_map": weight_map | {key: other}},
      index | {"weight_map": {k: other if v == shard else v for k, v in weight_map.items()}},
      index | {"weight_map": {k: v for k, v in weight_map.items() if k != key}},
      index | {"weight_map": weight_map | {"extra": shard}},
    ][kind]

  published.index.append(edit)
  return f"kind {kind} at {place:.3f} {_short(other)} {_short(odd)}"


def _bytes(published: Published, rng: Rng) -> str:
  """Bytes of one file change, come or go."""
  name = _pick(rng, [*published.shards, _CONFIG, _INDEX])
  kind, place, count = int(rng.integers(0, 6)), rng.random() ** 3, int(rng.integers(1, 9))
  junk = rng.bytes(count)

  def edit(folder: pathlib.Path) -> None:
    file = folder / name
    if not file.is_file():
      return
    data = file.read_bytes()
    at = int(place * len(data))
    file.write_bytes([
      data[:at] + junk + data[at + count :],
      data[:at] + junk + data[at:],
      data[:at] + data[at + count :],
      data[:at],
      junk + data[8:],
      data + junk,
    ][kind])  # fmt: skip

  published.edits.append(edit)
  return f"{name} kind {kind} at {place:.4f} {junk.hex()}"


def _file(published: Published, rng: Rng) -> str:
  """A file is missing, empty, a folder, a link or a pipe."""
  name = _pick(rng, [*published.shards, _CONFIG, _INDEX])
  kind = int(rng.integers(0, 8))

  def edit(folder: pathlib.Path) -> None:
    file = folder / name
    if kind == 7:
      (folder / _FILE).unlink(missing_ok=True)
      (folder / _FILE).symlink_to(name)
      return
    if file.is_symlink() or file.is_file():
      file.unlink()
    elif file.exists():
      return
    if kind == 1:
      file.write_bytes(b"")
    elif kind == 2:
      file.mkdir()
    elif kind == 3:
      file.symlink_to(name)
    elif kind == 4:
      os.mkfifo(file)
    elif kind == 5:
      file.symlink_to("/dev/zero")
    elif kind == 6:
      file.symlink_to(folder)

  published.edits.append(edit)
  return f"{name} kind {kind}"


_FAULTS = (
  _config_field, _config_new_field, _config_lost_field, _config_text, _index_text, _header_entry,
  _header_whole, _header_text, _tensor, _index, _bytes, _file,
)  # fmt: skip
_WEIGHTS = np.array([6, 3, 1, 1, 1, 4, 2, 1, 3, 2, 4, 1]) / 29
