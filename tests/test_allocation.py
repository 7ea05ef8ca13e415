"""The allocation file: what is written is read, and reaches the specs; all else is refused."""

import json

import pytest

from moecore_jax import allocation
from moecore_jax import config as config_lib
from moecore_jax.testing.tiny import tiny_spec

MODEL = tiny_spec(num_moe_layers=3, num_experts=8)


def config_with(path, content):
  path.write_text(json.dumps(content))
  return config_lib.RunConfig(
    residency=config_lib.ResidencyConfig(allocation=str(path)),
    engine=config_lib.EngineConfig(context_tokens=256),
  )


def test_an_allocation_reaches_the_specs(tmp_path):
  made = allocation.Allocation((2, 5, 3), "abc")
  config = config_with(tmp_path / "a.json", {**made.to_dict(), "hit_rate": 0.5})
  assert allocation.read(tmp_path / "a.json") == made
  assert config.freeze(MODEL)[0].slots == (2, 5, 3)
  assert config.freeze(MODEL, "abc")[0].slots == (2, 5, 3)
  lod = config.for_system("lod").freeze(MODEL)[0]
  assert (lod.slots, lod.policy) == ((3, 3, 3), "lru")
  assert config.for_system("all_resident").freeze(MODEL)[0].slots == (8, 8, 8)


@pytest.mark.parametrize(
  ("made", "words"),
  [
    (allocation.Allocation((2, 5)), "residency.allocation: got (2, 5), expected one number for"),
    (allocation.Allocation((2, 9, 3)), "residency.allocation[1]: got 9, expected 1..8"),
    (allocation.Allocation((2, 5, 3), "other"), "weights abc, not other"),
  ],
)
def test_an_allocation_of_another_model_is_refused(tmp_path, made, words):
  config = config_with(tmp_path / "a.json", made.to_dict())
  with pytest.raises(ValueError) as e:
    config.freeze(MODEL, "abc")
  assert words in str(e.value)


def test_an_allocation_beside_slots_is_refused(tmp_path):
  config = config_with(tmp_path / "a.json", allocation.Allocation((1, 1, 1)).to_dict())
  config.residency.slots = (1, 1, 1)
  with pytest.raises(ValueError, match=r"residency\.allocation.*beside residency\.slots"):
    config.validate()


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("{", "is not JSON"),
    ("[]", "version 1"),
    ('{"version": 2, "slots": [1]}', "version 1"),
    ('{"version": 1}', "slots is no list"),
    ('{"version": 1, "slots": []}', "slots is no list"),
    ('{"version": 1, "slots": [1, 0]}', "slots is no list"),
    ('{"version": 1, "slots": [true]}', "slots is no list"),
    ('{"version": 1, "slots": [1], "fingerprint": 3}', "slots is no list"),
  ],
)
def test_other_files_are_refused(tmp_path, text, words):
  path = tmp_path / "a.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=words) as e:
    allocation.read(path)
  assert str(path) in str(e.value)


def test_a_missing_file_is_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot be read: No such file"):
    allocation.read(tmp_path / "none.json")
