"""Linear maps in int8: the same bits whatever is resident, and close to float."""

import jax
import numpy as np
import pytest

from moecore_jax.checkpoint.template import dense_template, total_bytes
from moecore_jax.models.quantized import quantize_layers, quantize_params
from moecore_jax.specs import EngineSpec, ResidencySpec
from moecore_jax.testing import tiny
from tests.runtime.test_exactness import assert_same

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("quick_compilation")]

SPEC = tiny.tiny_spec(num_moe_layers=2, num_dense_layers=1, num_experts=8)
ENGINE = EngineSpec(
  batch_size=2,
  context_tokens=32,
  prefill_buckets=(16,),
  kv_block_tokens=16,
  expert_format="w8a8",
  dense_format="w8a8",
)


@pytest.fixture(scope="module")
def model():
  made = tiny.random_model(SPEC, ENGINE)
  params = made.params | {"layers": dict(made.params["layers"])}
  return made._replace(params=quantize_layers(params))


def run(model, slots, engine=ENGINE):
  made = tiny.make_engine(model, ResidencySpec("lru", (slots,) * 2), engine)
  return tiny.decode_all(made, tiny.random_prompts(SPEC, (5, 9)), 4)


def test_the_template_has_the_parameters(model):
  template = dense_template(SPEC, np.dtype(np.float32), "w8a8")
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), template["layers"])
  assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.params["layers"])
  whole = total_bytes(dense_template(SPEC, np.dtype(np.float32))["layers"])
  assert total_bytes(template["layers"]) < 0.6 * whole


def test_exact_whatever_is_resident_and_close_to_float(model):
  few, all_resident = run(model, 2), run(model, 8)
  assert_same(few, all_resident)
  floats = EngineSpec(**{**vars(ENGINE), "expert_format": "float32", "dense_format": "float"})
  plain = run(tiny.random_model(SPEC, floats), 8, floats)
  got, wanted = (np.concatenate(t.prompt_logits) for t in (few, plain))
  errors = np.sqrt(np.mean((got - wanted) ** 2, -1) / np.mean(wanted**2, -1))
  assert 1e-4 < np.median(errors) < 0.05, errors  # of single tokens the routes differ


def test_routers_stay_and_biases_come_along():
  rng = np.random.default_rng(0)
  layer = {
    "router": {"kernel": rng.normal(size=(8, 4)).astype(np.float32)},
    "attention": {
      "q_proj": {
        "kernel": rng.normal(size=(8, 12)).astype(np.float32),
        "bias": np.ones(12, np.float32),
      },
      "gate": {"kernel": np.ones((8, 1), np.float32)},
    },
  }
  out = quantize_params(layer)
  assert out["router"] is layer["router"]
  assert out["attention"]["gate"]["kernel"] is layer["attention"]["gate"]["kernel"]
  assert out["attention"]["q_proj"]["words"].shape == (8 + 4 + 4, 3)
