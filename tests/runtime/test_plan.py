"""The plan equals what an engine allocates, byte for byte, and refuses before it allocates."""

import dataclasses
import json
import re

import pytest

import moecore_jax as moecore
from moecore_jax import checkpoint, families, planner
from moecore_jax.config_loading import load_config
from moecore_jax.runtime import plan as plan_lib
from moecore_jax.runtime.engine import DEMO, Engine
from moecore_jax.specs import (
  DeviceSpec,
  EngineSpec,
  LayerSpec,
  MoESpec,
  PrefetchSpec,
  ResidencySpec,
  RouterSpec,
  StagingSpec,
)
from moecore_jax.testing import tiny

ENGINE = EngineSpec(
  batch_size=3, context_tokens=64, prefill_buckets=(8, 16), kv_block_tokens=16, layer_loop="scanned"
)


def two_group_spec():
  """A model whose last layer has other experts, and more of them."""
  spec = tiny.tiny_spec(num_moe_layers=3)
  wide = LayerSpec(spec.layers[0].attention, MoESpec(RouterSpec(12, 3), expert_dim=24))
  return dataclasses.replace(spec, layers=(*spec.layers, wide))


def same_bytes(plan, report):
  """Compares a plan's regions with those of an engine's arrays."""
  parts = planner.regions(plan.demand, plan.settings)
  got = report["device"]
  assert parts["dense_weights"] == got["dense_weights"]
  assert parts["kv_cache"] == got["kv_cache"]
  assert parts["expert_slots"] + parts["in_flight_rows"] == got["expert_slots"]
  assert parts["tables"] == got["tables"]
  assert plan.demand.bank_bytes == report["host"]["expert_bank"]


@pytest.mark.parametrize(
  ("policy", "slots", "in_flight"), [("rhac", (1, 8, 2, 12), 2), ("random", (3, 3, 3, 3), 0)]
)
def test_a_plan_equals_the_engines_arrays(policy, slots, in_flight):
  spec = two_group_spec()
  residency = ResidencySpec(policy, slots, prefetch=PrefetchSpec(in_flight))
  model = tiny.random_model(spec, ENGINE)
  engine = tiny.make_engine(model, residency, ENGINE)
  same_bytes(plan_lib.make_plan(spec, residency, ENGINE, DeviceSpec()), engine.memory_report())
  # Planned for other slots, batch and context, whose answers must hold for these.
  other = dataclasses.replace(ENGINE, batch_size=1, context_tokens=256)
  plan = plan_lib.make_plan(spec, ResidencySpec(policy, (5, 4, 3, 2)), other, DeviceSpec())
  settings = dataclasses.replace(
    plan.settings, slots=slots, batch_size=3, context_tokens=64, in_flight_rows=in_flight
  )
  same_bytes(dataclasses.replace(plan, settings=settings), engine.memory_report())


def test_staging_is_planned_where_layers_are_staged():
  spec, staging = two_group_spec(), StagingSpec(enabled=True)
  some, all_ = (
    plan_lib.make_plan(spec, ResidencySpec("lru", slots, staging=staging), ENGINE, DeviceSpec())
    for slots in ((3, 3, 3, 3), (8, 8, 8, 12))
  )
  largest = 12 * 3 * 32 * 24 * 4
  assert planner.regions(some.demand, some.settings)["layer_buffers"] == 2 * largest
  assert planner.regions(all_.demand, all_.settings)["layer_buffers"] == 0


def test_the_demo_models_plan_equals_its_engine():
  config = moecore.load_config("configs/demo.py")
  spec = checkpoint.read_spec(DEMO)
  plan = plan_lib.make_plan(spec, *plan_lib.freeze(config, spec))
  same_bytes(plan, Engine.from_checkpoint(None, config).memory_report())
  assert plan.bank_bytes > plan.demand.bank_bytes  # MTP experts are loaded, too
  content = json.loads(json.dumps(plan.to_dict()))
  assert content["fits"]
  assert content["budget_bytes"] is None  # a CPU does not tell
  assert content["most_uniform_slots"] == 32
  assert content["longest_context_tokens"] == spec.max_context_tokens


def test_a_config_that_does_not_fit_is_refused_before_loading(monkeypatch):
  spec = checkpoint.read_spec(DEMO)
  config = moecore.load_config("configs/demo.py", ("device.memory_bytes=16000000",))
  monkeypatch.setattr(checkpoint, "load", lambda *_, **__: pytest.fail("weights were loaded"))
  with pytest.raises(ValueError, match=r"the device needs .* there are 15\.20 MB; set") as e:
    Engine.from_checkpoint(None, config)
  # What the sentence says would fit does, and one more does not.
  slots = int(str(e.value).split("residency.slots_per_layer to ")[1].split(",")[0])
  for more in (0, 1):
    config.residency.slots_per_layer = slots + more
    plan = plan_lib.make_plan(spec, *config.freeze(spec))
    assert bool(plan.refusal) == bool(more)


def test_a_refusal_names_the_field_that_outranks_the_one_to_set():
  spec = checkpoint.read_spec(DEMO)
  config = moecore.load_config("configs/demo.py", ("device.memory_bytes=16000000",))
  config.residency.slots = (12,) * 8
  words = r"slots_per_layer to (\d+) without residency\.slots"
  with pytest.raises(ValueError, match=words) as error:
    plan_lib.freeze(config, spec)
  config.residency.slots_per_layer = int(re.search(words, str(error.value)).group(1))
  config.residency.slots = ()
  plan_lib.freeze(config, spec)
  config.residency.all_resident = True
  with pytest.raises(ValueError, match=r"set residency\.all_resident to False and fewer slots"):
    plan_lib.freeze(config, spec)


def test_a_bank_that_does_not_fit_the_host_is_refused():
  config = moecore.load_config("configs/demo.py", ("device.host_memory_bytes=1000000",))
  with pytest.raises(ValueError, match=r"expert bank needs 21\.\d+ MB .*host_memory_bytes"):
    plan_lib.freeze(config, checkpoint.read_spec(DEMO))


@pytest.mark.parametrize(
  ("rows", "name"),
  [
    ("deepseek_v3_decode_h200.json", "deepseek_v3"),
    ("deepseek_v4_flash.json", "deepseek_v4_flash"),
  ],
)
def test_the_plan_covers_what_the_compiler_asked_for(rows, name):
  """On an H200: the decode step's arguments, and an upper bound of its temporary bytes."""
  with open(f"bench/results/{rows}") as f:
    row = next(r for r in json.load(f) if (r["program"], r["target"]) == ("decode", "h200"))
  config = load_config(f"configs/{name}.py")
  model = families.model_spec(config.model.published_config)
  plan = plan_lib.make_plan(model, *config.freeze(model))
  parts = planner.regions(plan.demand, plan.settings)
  arrays = ("dense_weights", "kv_cache", "expert_slots", "in_flight_rows", "tables")
  assert sum(parts[name] for name in arrays) == pytest.approx(
    row["device_argument_bytes"], rel=5e-3
  )
  assert parts["temporaries"] + parts["activations"] >= row["temp_bytes"]
