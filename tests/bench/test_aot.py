"""The engine's own programs, compiled for each target: bank on the host, state in place, little
temporary memory."""

import json
import pathlib

import pytest

from bench import aot, described
from moecore_jax.config import (
  DeviceConfig,
  EngineConfig,
  ModelConfig,
  PrefetchConfig,
  ResidencyConfig,
  RunConfig,
  StagingConfig,
)
from moecore_jax.config_loading import load_config
from tests.bench.conftest import require_compiler

_LAYERS, _DENSE, _EXPERTS, _DIM, _EXPERT_DIM = 3, 1, 16, 4096, 2048
_PUBLISHED = {
  "model_type": "deepseek_v3",
  "vocab_size": 4096,
  "hidden_size": _DIM,
  "num_hidden_layers": _LAYERS,
  "num_nextn_predict_layers": 0,
  "first_k_dense_replace": _DENSE,
  "intermediate_size": 8192,
  "moe_intermediate_size": _EXPERT_DIM,
  "n_routed_experts": _EXPERTS,
  "n_shared_experts": 1,
  "num_experts_per_tok": 4,
  "n_group": 4,
  "topk_group": 2,
  "norm_topk_prob": True,
  "scoring_func": "sigmoid",
  "routed_scaling_factor": 2.5,
  "num_attention_heads": 16,
  "q_lora_rank": 512,
  "kv_lora_rank": 512,
  "qk_nope_head_dim": 32,
  "qk_rope_head_dim": 32,
  "v_head_dim": 32,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10000,
  "max_position_embeddings": 65536,
  "tie_word_embeddings": False,
  "eos_token_id": 1,
}


_SCANNED = {"layer_loop": "scanned", "layers": 6}  # so deep that the scan stays a loop
_VARIANTS = {
  "base": {},
  "prefetch": {"prefetch": 1},
  "scanned": {"prefetch": 2, **_SCANNED},
  "larger": {"slots": 12, "context": 65536},
  "float32": {"dtype": "float32", "expert_format": "float32"},
  "w4a8": {"expert_format": "w4a8", "slots": 12, "bucket": 256, "prefetch": 1},
}
_STAGED = {
  "staged": {"layers": 4, "is_staged": True},
  "staged, scanned": {"is_staged": True, **_SCANNED},
}
_SLOW = {"scanned, one": {"prefetch": 1, **_SCANNED}, "two": {"prefetch": 2}}


def _config(
  target,
  slots=4,
  context=4096,
  dtype="",
  expert_format="bfloat16",
  layer_loop="unrolled",
  prefetch=0,
  layers=_LAYERS,
  is_staged=False,
  bucket=64,
):
  """A small model with experts of real size. A CPU engine holds float32: the CPU has no other
  arithmetic."""
  return RunConfig(
    model=ModelConfig(published_config=_PUBLISHED | {"num_hidden_layers": layers}),
    residency=ResidencyConfig(
      slots_per_layer=slots,
      prefetch=PrefetchConfig(max_experts=prefetch),
      staging=StagingConfig(enabled=is_staged),
    ),
    engine=EngineConfig(
      context_tokens=context,
      prefill_buckets=(bucket,),
      dtype=dtype or ("float32" if target == "cpu" else "bfloat16"),
      expert_format=expert_format,
      layer_loop=layer_loop,
    ),
    device=DeviceConfig(memory_bytes=2_000_000_000),
  )


def _rows(target, programs):
  require_compiler(target)
  tasks = [aot.Task(_config(target, **variants[v]), target, name) for variants, v, name in programs]
  keys = [(variant, name) for _, variant, name in programs]
  return dict(zip(keys, aot.run(tasks), strict=True))


@pytest.fixture(scope="module", params=described.TARGETS)
def rows(request) -> dict[tuple[str, str], dict]:
  """Rows by variant and program, compiled in one process for each target."""
  is_cpu = request.param == "cpu"
  left_out = "w4a8" if is_cpu else "float32"
  programs = [(_VARIANTS, variant, "decode") for variant in _VARIANTS if variant != left_out]
  programs += [(_VARIANTS, "base", "prefill_64")]
  if not is_cpu:
    programs += [(_VARIANTS, "w4a8", "prefill_256")]
    programs += [(_STAGED, variant, "staged_64") for variant in _STAGED]
  return _rows(request.param, programs)


@pytest.fixture
def device_rows(rows) -> dict[tuple[str, str], dict]:
  """Those of the devices whose copies are asynchronous."""
  if rows["base", "decode"]["target"] == "cpu":
    pytest.skip("the CPU knows one memory only, and its copies are not asynchronous")
  return rows


def _expert_bytes(expert_format: str = "bfloat16") -> int:
  return 3 * _DIM * _EXPERT_DIM * (4 if expert_format == "float32" else 2)


@pytest.mark.parametrize(
  ("variant", "name"),
  [
    ("base", "decode"),
    ("prefetch", "decode"),
    ("scanned", "decode"),
    ("base", "prefill_64"),
  ],
)
def test_bank_is_read_by_rows_and_state_is_in_place(rows, variant, name):
  row = rows[variant, name]
  _check_state_is_in_place(row, _VARIANTS[variant].get("layers", _LAYERS))
  reads = row["bank_reads"]
  assert reads and row["is_bank_read_by_row"], reads
  assert {read["rows"] for read in reads} == {1}
  if row["target"] != "cpu":
    assert all(read["is_async"] for read in reads)


def _check_state_is_in_place(row, layers):
  bank_bytes = (layers - _DENSE) * _EXPERTS * _expert_bytes()
  assert row["host_argument_bytes"] == bank_bytes
  assert row["device_argument_bytes"] < bank_bytes
  assert row["host_compute_ops"] == 0
  assert row["alias_bytes"] >= row["donated_bytes"]


def test_experts_and_attention_hide_every_prefetch(device_rows):
  """On a GPU, that has two slices on the way at most, the second of two experts is copied when the
  experts have run."""
  assert device_rows["base", "decode"]["prefetch_overlap"] is None
  for variant in ("prefetch", "w4a8"):
    assert device_rows[variant, "decode"]["prefetch_overlap"], variant
  scanned = device_rows["scanned", "decode"]
  if scanned["target"] == "h200":
    hidden_by = scanned["prefetch_hidden_by"]
    assert hidden_by.keys() == {"attention", "experts"}
    assert hidden_by["attention"] == hidden_by["experts"]
  else:
    assert scanned["prefetch_overlap"]


def _deepseek_v4(compress_ratios):
  """The first layers of DeepSeek-V4-Flash."""
  config = load_config("configs/deepseek_v4_flash.py")
  config.model.published_config |= {
    "num_hidden_layers": len(compress_ratios),
    "num_nextn_predict_layers": 0,
    "compress_ratios": compress_ratios,
    "vocab_size": 1280,
  }
  config.engine.context_tokens = 32768
  return config


@pytest.mark.parametrize("target", ["h200", "v5p"])
def test_step_of_a_deep_model_with_scanned_layers_and_two_rows(target):
  """Nothing is copied of all layers: neither their int8 weights, to change their layout, nor their
  caches. Prefetches start before the experts though attention takes longer than they do."""
  require_compiler(target)
  config = load_config("configs/glm_5.py")
  config.engine.batch_size, config.engine.context_tokens = 2, 18432
  config.engine.prefill_buckets = (4096,)
  (row,) = aot.run([aot.Task(config, target, "decode")])
  assert row["layer_loop"] == "scanned"
  assert row["prefetch_overlap"], row["prefetch_hidden_by"]
  assert row["is_temp_within_bound"], (row["temp_bytes"], row["temp_bound"])
  assert row["is_bank_read_by_row"] and row["fits"]
  assert row["host_compute_ops"] == 0
  assert row["alias_bytes"] >= row["donated_bytes"]


@pytest.mark.slow
def test_v5p_hides_prefetches_of_small_experts_beside_large_attention():
  """Without the option for a TPU, the second array starts when the experts have run."""
  require_compiler("v5p")
  (row,) = aot.run([aot.Task(_deepseek_v4([0, 0]), "v5p", "decode")])
  assert row["prefetch_overlap"], row["prefetch_hidden_by"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5p"])
@pytest.mark.parametrize(("name", "batch_size"), [("decode", 1), ("decode", 2), ("staged_4096", 1)])
def test_layers_that_take_turns_are_scanned(name, batch_size, target):
  """All layers of DeepSeek-V4-Flash; each layer's weights are read where they are used."""
  require_compiler(target)
  config = load_config("configs/deepseek_v4_flash.py")
  config.engine.batch_size = batch_size
  (row,) = aot.run([aot.Task(config, target, name)])
  assert row["layer_loop"] == "scanned"
  assert row["prefetch_overlap"] if name == "decode" else row["staging_overlap"]
  assert row["is_temp_within_bound"], (row["temp_bytes"], row["temp_bound"])
  assert row["is_bank_read_by_row"] and row["fits"]


@pytest.mark.slow
def test_v5p_hides_staged_layers_of_small_experts():
  """Prefill is compiled without the options of the decode step."""
  require_compiler("v5p")
  (row,) = aot.run([aot.Task(_deepseek_v4([0, 0, 4, 128, 4]), "v5p", "staged_32768")])
  assert row["staging_overlap"]
  assert row["is_temp_within_bound"], (row["temp_bytes"], row["temp_bound"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5p"])
def test_other_prefetches_are_hidden(target):
  """One expert in a scan, two in an unrolled loop."""
  rows = _rows(target, [(_SLOW, variant, "decode") for variant in _SLOW])
  assert rows["scanned, one", "decode"]["prefetch_overlap"]
  assert "nothing" not in rows["two", "decode"]["prefetch_hidden_by"]
  assert all(row["is_temp_within_bound"] for row in rows.values())


@pytest.mark.parametrize("variant", _STAGED)
def test_experts_and_attention_hide_every_staged_layer(device_rows, variant):
  """Temp is two layers and what one expert, a dense matrix and the activations need."""
  row = device_rows[variant, "staged_64"]
  _check_state_is_in_place(row, _STAGED[variant]["layers"])
  assert row["is_bank_read_by_row"]
  assert {read["rows"] for read in row["bank_reads"]} == {_EXPERTS}
  assert row["staging_overlap"]
  assert row["temp_bytes"] <= row["temp_bound_bytes"], (row["temp_bytes"], row["temp_bound"])


def test_temp_of_the_step_is_bounded(rows):
  steps = {variant: row for (variant, name), row in rows.items() if name == "decode"}
  assert len(steps) == len(_VARIANTS) - 1
  for variant, row in steps.items():
    assert row["temp_bytes"] <= row["temp_bound_bytes"], (
      variant,
      row["temp_bytes"],
      row["temp_bound"],
    )


def test_integer_products_do_not_change_the_layout_of_the_pool(device_rows):
  row = device_rows["w4a8", "prefill_256"]
  assert row["temp_bytes"] <= row["temp_bound_bytes"], (row["temp_bytes"], row["temp_bound"])


def test_temp_of_the_step_grows_with_neither_slots_nor_context(rows):
  base, larger = rows["base", "decode"], rows["larger", "decode"]
  grown = larger["donated_bytes"] - base["donated_bytes"]
  assert grown > 4 * _expert_bytes() + 60000 * 640 * _LAYERS
  assert abs(larger["temp_bytes"] - base["temp_bytes"]) < _expert_bytes() / 8


def test_rows_on_the_command_line(tmp_path, capsys):
  """On the CPU, which every machine compiles for: the contract's fields, and the time of a second
  start."""
  config = tmp_path / "small.py"
  config.write_text(
    "from tests.bench import test_aot\n\ndef get_config():\n  return test_aot._config('cpu')\n"
  )
  json_path = tmp_path / "rows.json"
  code = aot.main(
    [f"--config={config}", "--target=cpu", f"--json={json_path}", "--programs=decode"]
  )
  assert code == 0, capsys.readouterr().err
  (row,) = json.loads(json_path.read_text())
  assert row["second_start_s"] < row["lower_s"] + row["compile_s"]
  assert row["prefetch_overlap"] is None
  assert row["fits"] is True
  assert row["versions"]["jax"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--target=cpu"], "config"),
    (["--config=configs/deepseek_v3.py"], "--target is missing"),
    (["--config=configs/deepseek_v3.py", "--target=h100"], "--target=h100"),
    (["--config=configs/deepseek_v3.py", "--target=cpu", "--programs=x"], "prefill_512"),
    (["--config=configs/demo.py", "--target=cpu"], "model.published_config"),
  ],
)
def test_wrong_input_is_one_sentence(arguments, message, capsys, monkeypatch):
  monkeypatch.chdir(pathlib.Path(__file__).parents[2])
  assert aot.main(arguments) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_a_missing_compiler_is_one_sentence(capsys, monkeypatch):
  monkeypatch.chdir(pathlib.Path(__file__).parents[2])
  monkeypatch.setattr(described, "missing_compiler", lambda target: "libtpu")
  assert aot.main(["--config=configs/deepseek_v3.py", "--target=v5p"]) == 2
  assert "moecore-jax[aot]" in capsys.readouterr().err
