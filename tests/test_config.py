"""Configs: every field is checked, and every fault is one sentence."""

import copy
import dataclasses
import itertools
import json

import pytest
from absl import flags

import moecore_jax as moecore
from moecore_jax import config as config_lib
from moecore_jax import config_loading, specs

DEMO = "configs/demo.py"


def _model_spec(num_experts: int = 32, num_layers: int = 4) -> specs.ModelSpec:
  attention = specs.MLASpec(2, None, 8, 4, 4, 4, specs.RopeSpec(4))
  moe = specs.LayerSpec(attention, specs.MoESpec(specs.RouterSpec(num_experts, 4), 8, 8))
  dense = specs.LayerSpec(attention, specs.DenseSpec(16))
  return specs.ModelSpec("test", 64, 16, (dense, *([moe] * num_layers)), max_context_tokens=512)


@pytest.mark.parametrize(
  ("preset", "policy", "slots", "systems"),
  [
    ("", "rhac", (12,) * 4, config_lib.SYSTEMS),
    (":moecore", "rhac", (12,) * 4, ("moecore",)),
    (":lod", "lru", (12,) * 4, ("lod",)),
    (":layer_prefetch", "static", (32, 0, 0, 0), ("layer_prefetch",)),
    (":all_resident", "rhac", (32,) * 4, ("all_resident",)),
  ],
)
def test_demo_presets_freeze(preset, policy, slots, systems):
  config = moecore.load_config(DEMO + preset)
  residency, engine, device = config.freeze(_model_spec())
  assert residency.policy == policy
  assert residency.slots == slots
  is_moecore = preset in ("", ":moecore")
  assert (residency.prefetch.max_experts, residency.staging.enabled) == (is_moecore, is_moecore)
  assert bool(config.residency.profiles) == is_moecore
  assert config.eval.systems == systems
  assert engine == specs.EngineSpec(2, 256, (64,), kv_block_tokens=128, layer_loop="scanned")
  assert device == specs.DeviceSpec()
  assert hash((residency, engine, device)) == hash(config.freeze(_model_spec()))


@pytest.mark.parametrize("preset", ["", ":substitution"])
def test_every_ablation_is_another_system(preset):
  config = moecore.load_config("configs/ablation.py" + preset)
  model = _model_spec(num_layers=8)
  systems = [config.for_system(name) for name in config.eval.systems]
  assert set(config.eval.systems) - {"moecore"} == set(config.eval.variants)
  assert len({repr(system.residency) for system in systems}) == len(systems)
  assert len({system.freeze(model)[1] for system in systems}) == 1
  with pytest.raises(ValueError, match="preset 'x' is unknown"):
    moecore.load_config("configs/ablation.py:x")


def test_overrides_reach_every_leaf():
  """Every field takes a value of its type from text; bools and floats get another one."""
  skipped = {"model.published_config", "eval.variants"}  # dicts, not for the command line
  for name, kind, value in config_lib.leaves(moecore.load_config(DEMO)):
    if name in skipped:
      continue
    if kind is bool:
      value = not value
    elif kind is float:
      value = 0.25 if value <= 1 else value + 0.25
    changed = moecore.load_config(DEMO, overrides=(f"{name}={value}",))
    assert {n: v for n, _, v in config_lib.leaves(changed)}[name] == value, name


def test_overrides_apply_in_order():
  overrides = ("residency.slots_per_layer=4", "residency.policy=lfu", "residency.slots_per_layer=5")
  config = moecore.load_config(DEMO + ":lod", overrides=overrides)
  assert (config.residency.slots_per_layer, config.residency.policy) == (5, "lfu")
  assert moecore.load_config(DEMO).residency.slots_per_layer == 12


@pytest.mark.parametrize("text", ["math,qa", "('math','qa')", "math, qa"])
def test_names_may_be_listed_with_commas(text):
  assert moecore.load_config(DEMO, (f"eval.tasks={text}",)).eval.tasks == ("math", "qa")


@pytest.mark.parametrize(
  ("config", "overrides", "words"),
  [
    (DEMO, ("residency.polcy=lru",), ("residency.polcy", "residency.policy")),
    (DEMO, ("residency=lru",), ("residency", "does not exist")),
    (DEMO, ("nothing.like.this=1",), ("nothing.like.this",)),
    (DEMO, ("residency.policy=lr",), ("residency.policy", "'lr'", "rhac, lru")),
    (DEMO, ("residency.slots_per_layer=0",), ("residency.slots_per_layer", "0", "at least 1")),
    (DEMO, ("residency.slots=(3,0)",), ("residency.slots[1]", "at least 1")),
    (DEMO, ("residency.slots=(3,'x')",), ("residency.slots", "tuple of int")),
    (DEMO, ("engine.batch_size=two",), ("engine.batch_size", "two")),
    (DEMO, ("engine.batch_size=-1",), ("engine.batch_size", "-1")),
    (DEMO, ("engine.context_tokens=200",), ("engine.context_tokens", "128", "256")),
    (DEMO, ("engine.prefill_buckets=(64,32)",), ("engine.prefill_buckets", "ascending")),
    (DEMO, ("engine.prefill_buckets=(64,512)",), ("engine.prefill_buckets", "256")),
    (
      DEMO,
      ("engine.prefill_buckets=(64,100)", "engine.prefill_block_tokens=64"),
      ("use 128 for 100",),
    ),
    (DEMO, ("engine.dtype=float16",), ("engine.dtype", "float16", "bfloat16")),
    (DEMO, ("engine.expert_format=int3",), ("engine.expert_format", "int3")),
    (DEMO, ("engine.dtype=bfloat16",), ("engine.expert_format", "float32", "set both")),
    (DEMO, ("residency.rhac.window=33",), ("residency.rhac.window", "1..32")),
    (DEMO, ("residency.rhac.decay=1.0",), ("residency.rhac.decay", "1.0")),
    (DEMO, ("residency.rhac.average_weight=nan",), ("residency.rhac.average_weight", "nan")),
    (DEMO, ("sampling.top_p=0",), ("sampling.top_p",)),
    (DEMO, ("eval.systems=moecore,fast",), ("eval.systems", "fast")),
    (DEMO, ("eval.tasks=math,math",), ("eval.tasks", "distinct")),
    (DEMO, ("residency.layer_prefetch.streamed_layers=1",), ("streamed_layers", "0..0")),
    (DEMO, ("residency.layer_prefetch.prefetch_step=3",), ("prefetch_step", "scanned", "unrolled")),
    (DEMO + ":all_resident", ("residency.layer_prefetch.enabled=1",), ("all_resident", "drop one")),
    (DEMO + ":fast", (), ("demo.py", "fast", "all_resident")),
    ("configs/nowhere.py", (), ("configs/nowhere.py",)),
    ("configs", (), ("configs",)),
    ("", (), ("no file",)),
  ],
)
def test_faults_are_one_sentence(config, overrides, words):
  with pytest.raises(ValueError) as e:
    moecore.load_config(config, overrides=overrides)
  message = str(e.value)
  assert "\n" not in message and "Traceback" not in message
  assert len(message) < 300
  for word in words:
    assert word in message


@pytest.mark.parametrize(
  "content",
  [
    "def get_config(:\n",
    "import nothing_of_that_name\n",
    "x = 1\n",
    "def get_config():\n  return {}\n",
    "def get_config():\n  return None\n",
    "def get_config():\n  raise RuntimeError('in the file')\n",
  ],
)
def test_faulty_files_are_one_sentence(tmp_path, content):
  path = tmp_path / "faulty.py"
  path.write_text(content)
  with pytest.raises(ValueError, match=r"faulty\.py") as e:
    moecore.load_config(str(path))
  assert "\n" not in str(e.value)


@pytest.mark.parametrize(
  ("residency", "words"),
  [
    ({"slots_per_layer": 33}, ("residency.slots_per_layer", "33", "1..32")),
    ({"slots": (8, 8, 8)}, ("residency.slots", "4 MoE layers")),
    ({"slots": (8, 8, 8, 40)}, ("residency.slots[3]", "40", "1..32")),
  ],
)
def test_freeze_checks_against_the_model(residency, words):
  config = config_lib.RunConfig(residency=config_lib.ResidencyConfig(**residency))
  with pytest.raises(ValueError) as e:
    config.freeze(_model_spec())
  for word in words:
    assert word in str(e.value)


def test_freeze_checks_the_context():
  config = config_lib.RunConfig()
  config.engine.context_tokens = 1024
  with pytest.raises(ValueError, match=r"engine\.context_tokens.*512, the model's context"):
    config.freeze(_model_spec())


def test_freeze_keeps_each_layers_slots():
  config = config_lib.RunConfig(residency=config_lib.ResidencyConfig(slots=(1, 2, 3, 32)))
  assert config.freeze(_model_spec())[0].slots == (1, 2, 3, 32)
  lod, _, _ = config.for_system("lod").freeze(_model_spec())
  assert (lod.policy, lod.slots) == ("lru", (9, 9, 9, 9))
  assert config.for_system("all_resident").freeze(_model_spec())[0].slots == (32,) * 4
  assert config.residency.slots == (1, 2, 3, 32)


def test_a_variant_is_a_system():
  config = config_lib.RunConfig(residency=config_lib.ResidencyConfig(slots=(1, 2, 3, 33)))
  config.eval.variants = {"lfu": {"residency.policy": "lfu", "residency.slots": (4, 4, 4, 4)}}
  config.eval.systems = ("moecore", "lfu")
  residency, _, _ = config.for_system("lfu").freeze(_model_spec())
  assert (residency.policy, residency.slots) == ("lfu", (4, 4, 4, 4))
  assert config.for_system("lfu").for_system("lfu") == config.for_system("lfu")
  assert config.for_system("moecore") == config
  assert config.residency.policy == "rhac"
  assert config.to_dict()["eval"]["variants"]["lfu"]["residency.slots"] == [4, 4, 4, 4]


@pytest.mark.parametrize(
  ("variants", "words"),
  [
    ({"lod": {}}, ("eval.variants['lod']", "a name besides moecore, lod")),
    ({"x": {"residency.polcy": "lru"}}, ("eval.variants['x']", "residency fields")),
    ({"x": {"engine.batch_size": 3}}, ("eval.variants['x']", "residency fields")),
    ({"x": 3}, ("eval.variants['x']", "residency fields")),
  ],
)
def test_other_variants_are_refused(variants, words):
  config = config_lib.RunConfig()
  config.eval.variants = variants
  with pytest.raises(ValueError) as e:
    config.validate()
  for word in words:
    assert word in str(e.value)


def test_a_variants_values_are_checked():
  config = config_lib.RunConfig()
  config.eval.variants = {"x": {"residency.policy": "lr"}}
  with pytest.raises(ValueError, match=r"residency\.policy: got 'lr'"):
    config.for_system("x").freeze(_model_spec())


@pytest.mark.parametrize(
  ("changes", "staging", "slots", "numbers"),
  [
    ({}, False, (0, 0, 0, 0), (1, 1)),  # two buffers alone are larger than 48 slots
    ({}, True, (32, 0, 0, 0), (4, 3)),  # one layer and two buffers in 48 slots and two buffers
    ({"prefetch_step": 1}, True, (32, 0, 32, 0), (2, 1)),
    ({"group_layers": 3, "streamed_layers": 2}, True, (32, 0, 0, 32), (3, 2)),
    ({"group_layers": 3}, True, (32, 32, 32, 32), (3, 0)),
  ],
)
def test_layer_prefetch_takes_the_budget_or_the_given_numbers(changes, staging, slots, numbers):
  config = config_lib.RunConfig(residency=config_lib.ResidencyConfig(slots_per_layer=12))
  config.residency.layer_prefetch = config_lib.LayerPrefetchConfig(**changes)
  config.residency.staging.enabled = staging
  config.residency.prefetch.max_experts = 1
  residency = config.for_system("layer_prefetch").freeze(_model_spec())[0]
  assert residency.slots == slots
  got = residency.layer_prefetch
  assert (got.group_layers, got.streamed_layers) == numbers
  assert (residency.prefetch, residency.staging) == (specs.PrefetchSpec(), specs.StagingSpec())
  assert config.freeze(_model_spec())[0].slots == (12,) * 4


def test_wrong_types_from_python_are_named():
  for name, kind, _ in config_lib.leaves(config_lib.RunConfig()):
    config = config_lib.RunConfig()
    *path, last = name.split(".")
    holder = config
    for part in path:
      holder = getattr(holder, part)
    setattr(holder, last, 3 if kind is str else "3")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
      config.validate()


def test_every_field_is_documented():
  queue = [config_lib.RunConfig]
  for cls in queue:
    for field in dataclasses.fields(cls):
      assert f"\n    {field.name}: " in f"\n{cls.__doc__}", f"{cls.__name__}.{field.name}"
      if dataclasses.is_dataclass(field.type):
        queue.append(field.type)
  assert len(queue) == 12


def test_config_dict_is_plain():
  config = moecore.load_config(DEMO)
  plain = config.to_dict()
  assert plain["engine"]["prefill_buckets"] == [64]
  changed = copy.deepcopy(config)
  changed.residency.rhac.window = 3
  assert changed.to_dict() != plain


def test_a_config_comes_back_from_json():
  config = moecore.load_config(DEMO, ("residency.slots=3", "residency.slots=4", "eval.tasks=qa"))
  config.model.published_config = {"rope_scaling": {"factor": 40.0}, "eos_token_id": [1, 2]}
  plain = json.loads(json.dumps(config.to_dict()))
  assert config_lib.from_plain(config_lib.RunConfig, plain) == config
  plain["residency"]["rhac"]["windows"] = 3
  with pytest.raises(ValueError, match="RhacConfig has an unknown field 'windows'"):
    config_lib.from_plain(config_lib.RunConfig, plain)


def test_flag_sets_are_independent():
  """Two command lines parsed in one process do not see each other's overrides."""
  parsed = []
  for slots, policy in itertools.product((2, 3), ("lru", "rhac")):
    argv = ["x", f"--config={DEMO}", f"--config.residency.slots_per_layer={slots}"]
    argv.append(f"--config.residency.policy={policy}")
    values = flags.FlagValues()
    config_loading.define_config_flag(values, argv)
    config_loading.parse_flags(values, argv)
    parsed.append(values["config"].value)
  got = [(c.residency.slots_per_layer, c.residency.policy) for c in parsed]
  assert got == [(2, "lru"), (2, "rhac"), (3, "lru"), (3, "rhac")]
