"""Loading against arrays that plain NumPy builds from the published tensors, key by key."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moecore_jax import checkpoint, families, memory
from moecore_jax.checkpoint import assemble, loading, published, template
from moecore_jax.testing.random_checkpoint import tiny_config, write_checkpoint

# Shapes that coincide: a layout guessed from them would go unnoticed in one and break in another.
CONFIGS = {
  "plain": {},
  "hidden == expert_dim": {"moe_intermediate_size": 32},
  "hidden == 2 expert_dim": {"moe_intermediate_size": 16, "hidden_size": 32},
  "2 hidden == expert_dim": {"moe_intermediate_size": 64, "intermediate_size": 32},
  "all square": {
    "hidden_size": 16,
    "moe_intermediate_size": 16,
    "intermediate_size": 16,
    "vocab_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_routed_experts": 16,
  },
  "direct queries": {"q_lora_rank": None},
  "tied": {"tie_word_embeddings": True, "num_nextn_predict_layers": 0},
  "two drafts, no shared expert": {"num_nextn_predict_layers": 2, "n_shared_experts": 0},
  "all MoE": {"first_k_dense_replace": 0},
}


def _expected(folder, config):
  """Returns ({dotted path: array}, {bank: {"gate_up", "down"}}) in the published dtype."""
  t = safetensors.numpy.load_file(folder / "model.safetensors")
  heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
  rank, v_dim = config["kv_lora_rank"], config["v_head_dim"]
  dense, banks = {}, {"experts": [], "mtp_experts": []}

  def mlp(path, key):
    gate, up = t[f"{key}gate_proj.weight"], t[f"{key}up_proj.weight"]
    dense[f"{path}gate_up_proj.kernel"] = np.concatenate([gate.T, up.T], axis=1)
    dense[f"{path}down_proj.kernel"] = t[f"{key}down_proj.weight"].T

  def layer(path, key, bank):
    attn, our = f"{key}self_attn.", f"{path}attention."
    dense[f"{path}attention_norm.scale"] = t[f"{key}input_layernorm.weight"]
    dense[f"{path}mlp_norm.scale"] = t[f"{key}post_attention_layernorm.weight"]
    if config["q_lora_rank"] is None:
      dense[f"{our}q_proj.kernel"] = t[f"{attn}q_proj.weight"].T
    else:
      dense[f"{our}q_a_proj.kernel"] = t[f"{attn}q_a_proj.weight"].T
      dense[f"{our}q_a_norm.scale"] = t[f"{attn}q_a_layernorm.weight"]
      dense[f"{our}q_b_proj.kernel"] = t[f"{attn}q_b_proj.weight"].T
    dense[f"{our}kv_a_proj.kernel"] = t[f"{attn}kv_a_proj_with_mqa.weight"].T
    dense[f"{our}kv_a_norm.scale"] = t[f"{attn}kv_a_layernorm.weight"]
    both = t[f"{attn}kv_b_proj.weight"]
    rows = [both[h * (nope + v_dim) : (h + 1) * (nope + v_dim)] for h in range(heads)]
    dense[f"{our}k_up_proj"] = np.stack([r[:nope] for r in rows])
    dense[f"{our}v_up_proj"] = np.stack([r[nope:] for r in rows])
    assert dense[f"{our}k_up_proj"].shape == (heads, nope, rank)
    dense[f"{our}o_proj.kernel"] = t[f"{attn}o_proj.weight"].T
    if bank is None:
      mlp(f"{path}mlp.", f"{key}mlp.")
      return
    dense[f"{path}mlp.router.kernel"] = t[f"{key}mlp.gate.weight"].T
    dense[f"{path}mlp.router.bias"] = t[f"{key}mlp.gate.e_score_correction_bias"]
    if config["n_shared_experts"]:
      mlp(f"{path}mlp.shared.", f"{key}mlp.shared_experts.")
    for e in range(config["n_routed_experts"]):
      part = {p: t[f"{key}mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")}
      gate_up = np.concatenate([part["gate"].T, part["up"].T], axis=1)
      banks[bank].append({"gate_up": gate_up, "down": part["down"].T})

  dense["embed.embedding"] = t["model.embed_tokens.weight"]
  dense["norm.scale"] = t["model.norm.weight"]
  if not config["tie_word_embeddings"]:
    dense["lm_head.kernel"] = t["lm_head.weight"].T
  num_layers = config["num_hidden_layers"]
  for i in range(num_layers):
    bank = "experts" if i >= config["first_k_dense_replace"] else None
    layer(f"layers.{i}.", f"model.layers.{i}.", bank)
  for d in range(config["num_nextn_predict_layers"]):
    key = f"model.layers.{num_layers + d}."
    dense[f"mtp.{d}.embed_norm.scale"] = t[f"{key}enorm.weight"]
    dense[f"mtp.{d}.hidden_norm.scale"] = t[f"{key}hnorm.weight"]
    dense[f"mtp.{d}.merge_proj.kernel"] = t[f"{key}eh_proj.weight"].T
    dense[f"mtp.{d}.final_norm.scale"] = t[f"{key}shared_head.norm.weight"]
    layer(f"mtp.{d}.block.", key, "mtp_experts")
  stacked = {
    name: {part: np.stack([e[part] for e in rows]) for part in ("gate_up", "down")}
    for name, rows in banks.items()
    if rows
  }
  return dense, stacked


def _flatten(params):
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def _as_bits(stored):
  """A stored bfloat16 bank as 16-bit patterns: low halves are the left columns, high the right."""
  words = np.asarray(stored)
  assert words.dtype == np.uint32
  return np.concatenate([words & 0xFFFF, words >> 16], axis=-1).astype(np.uint16)


def check_loaded(loaded, dense, banks, fmt, dtype=np.float32):
  got = _flatten(loaded.params)
  assert got.keys() == dense.keys()
  for name, want in dense.items():
    leaf_dtype = np.float32 if ".router." in name else dtype
    assert got[name].dtype == leaf_dtype, name
    np.testing.assert_array_equal(np.asarray(got[name]), want.astype(leaf_dtype), err_msg=name)
  for name, groups in {"experts": loaded.banks, "mtp_experts": loaded.mtp_banks}.items():
    assert len(groups) == (name in banks)
    for group in groups:
      for part, stored in group.items():
        want = banks[name][part]
        if fmt == "float32":
          assert stored.dtype == np.float32
          np.testing.assert_array_equal(np.asarray(stored), want.astype(np.float32))
        else:
          bits = want.astype(ml_dtypes.bfloat16).view(np.uint16)
          np.testing.assert_array_equal(_as_bits(stored), bits)


def check_memory_kinds(loaded):
  for leaf in jax.tree.leaves(loaded.params):
    assert leaf.sharding.memory_kind == "device"
  for leaf in jax.tree.leaves((loaded.banks, loaded.mtp_banks)):
    assert leaf.sharding.memory_kind == "pinned_host"
    assert jax.typeof(leaf).memory_space == jax.memory.Space.Host


@pytest.mark.parametrize("name", CONFIGS)
def test_every_array_is_exact(tmp_path, name):
  config = tiny_config(**CONFIGS[name])
  folder = write_checkpoint(tmp_path / "c", config)
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  check_loaded(loaded, *_expected(folder, config), "float32")
  check_memory_kinds(loaded)
  assert loaded.spec == families.model_spec(config)
  assert loaded.tokenizer_path is None


@pytest.mark.parametrize("published_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("fmt", ["float32", "bfloat16"])
def test_formats(tmp_path, published_dtype, fmt):
  """A published bfloat16 stays bit for bit, in either storage; float32 rounds once, to even."""
  folder = write_checkpoint(tmp_path / "c", dtype=published_dtype)
  loaded = checkpoint.load(str(folder), dtype=jnp.bfloat16, expert_format=fmt)
  check_loaded(loaded, *_expected(folder, tiny_config()), fmt, ml_dtypes.bfloat16)
  check_memory_kinds(loaded)


def test_experts_that_are_no_whole_cache_lines_wide(tmp_path):
  config = tiny_config(hidden_size=48, moe_intermediate_size=40)
  folder = write_checkpoint(tmp_path / "c", config)
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="bfloat16")
  check_loaded(loaded, *_expected(folder, config), "bfloat16")


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 30])
def test_chunks_of_any_size_give_the_same_bank(tmp_path, monkeypatch, chunk_bytes):
  monkeypatch.setattr(assemble, "MIN_CHUNK_BYTES", chunk_bytes)
  monkeypatch.setattr(assemble, "MAX_CHUNK_BYTES", chunk_bytes)
  config = tiny_config(n_routed_experts=6, n_group=1, first_k_dense_replace=0)
  folder = write_checkpoint(tmp_path / "c", config)
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  check_loaded(loaded, *_expected(folder, config), "float32")


@pytest.mark.parametrize("piece_bytes", [1, 1000])
@pytest.mark.parametrize("name", ["plain", "direct queries"])
def test_pieces_of_any_size_give_the_same_dense_weights(tmp_path, monkeypatch, name, piece_bytes):
  """Cut along rows and along columns, within gate and up and across both."""
  monkeypatch.setattr(assemble, "MAX_PIECE_BYTES", piece_bytes)
  config = tiny_config(**CONFIGS[name])
  folder = write_checkpoint(tmp_path / "c", config)
  cuts = list(assemble.dense_cuts(published.PublishedCheckpoint(folder).keymap))
  assert {cut.rule.axis for cut in cuts if cut.start} == {0, 1}
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  check_loaded(loaded, *_expected(folder, config), "float32")
  check_memory_kinds(loaded)


def test_rows_per_chunk():
  mb = 1 << 20
  assert assemble.rows_per_chunk(8, 1024) == 8  # a small bank is one chunk
  assert assemble.rows_per_chunk(2048, 2 * mb) == 16  # 4 GB: 1/128
  assert assemble.rows_per_chunk(100_000, 10 * mb) == 25  # at most 256 MB
  assert assemble.rows_per_chunk(10, 300 * mb) == 1  # at least a row


def test_every_source_is_read_and_every_target_written_once(tmp_path):
  opened = published.PublishedCheckpoint(write_checkpoint(tmp_path / "c"))
  keymap, spec = opened.keymap, opened.spec
  reads = []

  def read(key, *rows):
    reads.append(key)
    return opened.read(key, *rows)

  paths = [piece.path for piece in assemble.dense_pieces(keymap, read)]
  rows = [(c.bank, c.group, c.start + i)
          for c in assemble.bank_chunks(keymap, read, spec, "float32")
          for i in range(len(c.arrays["down"]))]  # fmt: skip
  assert set(reads) == set(keymap.shapes)
  assert set(opened.tensors) - set(reads) == {
    "model.layers.3.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight",
  }
  assert set(opened.tensors) - set(reads) <= set(keymap.skipped)
  twice = {key for key in reads if reads.count(key) > 1}
  assert all(key.endswith("kv_b_proj.weight") for key in twice)  # its halves are two parameters
  wanted = _flatten(template.dense_template(spec, jnp.float32))
  assert sorted(".".join(map(str, path)) for path in paths) == sorted(wanted)
  assert rows == [("experts", 0, r) for r in range(16)] + [("mtp_experts", 0, r) for r in range(8)]


def test_values_that_are_not_finite_are_refused(tmp_path):
  folder = write_checkpoint(tmp_path / "c")
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  for key in ("lm_head.weight", "model.layers.3.mlp.experts.7.up_proj.weight"):
    bad = {**tensors, key: tensors[key] * np.float32(np.nan)}
    safetensors.numpy.save_file(bad, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {key}: has NaN"):
      checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")


def test_an_odd_expert_width_cannot_be_packed(tmp_path):
  config = tiny_config(hidden_size=33)
  folder = write_checkpoint(tmp_path / "c", config)
  with pytest.raises(ValueError, match="33 columns does not fill bfloat16 words"):
    checkpoint.load(str(folder), dtype=jnp.float32, expert_format="bfloat16")


_LOADS = """
import json, pathlib, sys
import jax
import jax.numpy as jnp
from moecore_jax import checkpoint
from moecore_jax.checkpoint.template import total_bytes

def status(name):
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

jax.device_put(0.0).block_until_ready()  # starts the backend
before = status("VmRSS")
loaded = checkpoint.load(sys.argv[1], dtype=jnp.float32, expert_format="float32")
used = status("VmHWM") - before - total_bytes(loaded.params)
print(json.dumps([total_bytes(loaded.banks), used]))
"""


def test_a_bank_is_in_host_memory_once(tmp_path):
  """Beside it a few chunks of 16 MB and what the libraries take; `bench.loading` measures banks
  that make this little. In a process of its own, for a peak of its own.
  """
  config = tiny_config(
    hidden_size=512, moe_intermediate_size=512, n_routed_experts=40, num_nextn_predict_layers=0
  )
  folder = write_checkpoint(tmp_path / "c", config, dtype="bfloat16", shard_bytes=40 << 20)
  command = [sys.executable, "-c", _LOADS, str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  bank_bytes, used_bytes = json.loads(done.stdout)
  assert bank_bytes == 80 * 3 * 512 * 512 * 4
  assert bank_bytes <= used_bytes <= bank_bytes + 120e6


def test_the_host_limit_is_checked_before_weights_are_read(tmp_path, monkeypatch):
  folder = write_checkpoint(tmp_path / "c")
  monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
  monkeypatch.setenv(memory.CUDA_HOST_LIMIT_VARIABLE, "0.0001")
  reads = []
  monkeypatch.setattr(published.PublishedCheckpoint, "read", lambda self, *key: reads.append(key))
  with pytest.raises(ValueError, match=r"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1$"):
    checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  assert reads == []


def test_the_tokenizer_is_found(tmp_path):
  folder = write_checkpoint(tmp_path / "c")
  (folder / "tokenizer.json").write_text("{}")
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  assert loaded.tokenizer_path == str(folder / "tokenizer.json")


def test_templates_carry_memory_kinds(tmp_path):
  spec = families.model_spec(tiny_config())
  dense = template.dense_template(spec, jnp.bfloat16)
  banks = template.bank_template(spec, "bfloat16")
  assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(dense)} == {"device"}
  assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(banks)} == {"pinned_host"}
  kernel = dense["layers"][1]["mlp"]["router"]["kernel"]
  assert (kernel.dtype, kernel.shape) == (jnp.float32, (32, 8))
  assert dense["embed"]["embedding"].dtype == jnp.bfloat16
  assert template.total_bytes(banks) == 24 * 3 * 32 * 16 * 2


def test_a_bank_on_the_device_is_found():
  spec = families.model_spec(tiny_config())
  wanted = template.bank_template(spec, "float32")
  on_device = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), wanted)
  with pytest.raises(AssertionError, match=r"'device'.*expected.*'pinned_host'"):
    template.check_against(on_device, wanted)
  on_host = jax.tree.map(
    lambda leaf: memory.first_rows(np.zeros(leaf.shape, leaf.dtype), leaf.shape[0]), wanted
  )
  template.check_against(on_host, wanted)
  with pytest.raises(AssertionError, match="leaves differ"):
    template.check_against({"experts": on_host["experts"]}, wanted)


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_rows_that_no_chunk_writes_are_found(tmp_path, monkeypatch, lost):
  """What is not written is undefined memory, so a hole must not go unnoticed."""
  monkeypatch.setattr(assemble, "MIN_CHUNK_BYTES", 20_000)
  monkeypatch.setattr(assemble, "MAX_CHUNK_BYTES", 20_000)
  opened = published.PublishedCheckpoint(write_checkpoint(tmp_path / "c"))
  chunks = list(assemble.bank_chunks(opened.keymap, opened.read, opened.spec, "float32"))
  del chunks[lost]
  with pytest.raises(AssertionError, match="rows of"):
    loading.fill_banks(chunks, template.bank_template(opened.spec, "float32"))


def _pieces():
  return [
    assemble.DensePiece(("a", "kernel"), 1, start, np.full((4, 2), start, np.float32))
    for start in (0, 2, 4)
  ]


def _wanted(dtype):
  at = memory.placement("device")
  return {"a": {"kernel": jax.ShapeDtypeStruct((4, 6), dtype, sharding=at)}}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_dense_weights_are_filled_on_either_side(monkeypatch, dtype, is_on_host):
  """In NumPy memory that a device on the host takes over, or on the device."""
  filled = []

  def allocate(leaf, in_pieces):
    assert in_pieces
    array = allocate_array(leaf, in_pieces) if is_on_host else jnp.zeros(leaf.shape, leaf.dtype)
    filled.append(array)
    return filled[-1]

  allocate_array = loading._allocate
  monkeypatch.setattr(loading, "_allocate", allocate)
  kernel = loading.place_dense(_pieces(), _wanted(dtype))["a"]["kernel"]
  np.testing.assert_array_equal(kernel, np.tile([0, 0, 2, 2, 4, 4], (4, 1)).astype(dtype))
  if is_on_host:
    assert kernel.unsafe_buffer_pointer() == filled[0].ctypes.data
  else:
    assert filled[0].is_deleted(), "donated"


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_entries_that_no_piece_writes_are_found(lost):
  pieces = _pieces()
  del pieces[lost]
  with pytest.raises(AssertionError, match="entries"):
    loading.place_dense(pieces, _wanted(jnp.float32))


def test_loaded_is_frozen(tmp_path):
  folder = write_checkpoint(tmp_path / "c")
  loaded = loading.load(str(folder), dtype=jnp.float32, expert_format="float32")
  with pytest.raises(dataclasses.FrozenInstanceError):
    loaded.spec = None
