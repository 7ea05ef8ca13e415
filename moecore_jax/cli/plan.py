"""`moecore plan`: what a config needs of a device's memory, and what would fit."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from moecore_jax import checkpoint, families
from moecore_jax.cli import options
from moecore_jax.config import RunConfig
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.planner import show
from moecore_jax.reporting import table
from moecore_jax.runtime import calibrate, plan
from moecore_jax.runtime.engine import DEMO
from moecore_jax.specs import ModelSpec

ABOUT = """Plans the memory of a config by region; loads no weights.

The budget is device.memory_bytes * device.usable_frac, or what the present device has. A config
that does not fit is refused with the bytes of each region and with what would fit. With --calibrate
the link and the phases of a decode step are timed on the present device.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the config does not fit; by region.
  """
  values = options.parse("plan", ABOUT, argv, _define)
  config = values.config
  model = read_model(config)
  residency, engine, device = plan.freeze(config, model)
  result = plan.make_plan(model, residency, engine, device, plan.slots_field(config)).to_dict()
  if values.calibrate:
    result["calibration"] = calibrate.calibrate(model, residency, engine)
  if values.json:
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  print(_text(result))
  return 0


def read_model(config: RunConfig) -> ModelSpec:
  """Returns the model of a config: its published config, else its checkpoint's, else the demo."""
  if config.model.published_config:
    return families.model_spec(config.model.published_config)
  return checkpoint.read_spec(config.model.checkpoint or DEMO)


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_bool(
    "calibrate", False, "time link and phases on the present device", flag_values=values
  )


def _text(result: Mapping[str, Any]) -> str:
  slots, budget = result["slots"], result["budget_bytes"]
  regions = [[name, show(size)] for name, size in result["regions_bytes"].items()]
  regions += [["needed", show(result["needed_bytes"])]]
  regions += [["budget", show(budget) if budget else "not known: no limit"]]
  regions += [["host expert_bank", show(result["expert_bank_bytes"])]]
  answers = [
    ["slots per layer", f"{min(slots)}..{max(slots)}" if min(slots) < max(slots) else slots[0]],
    ["most uniform slots per layer", result["most_uniform_slots"]],
    ["longest context in tokens", result["longest_context_tokens"]],
    ["largest batch", result["largest_batch"]],
  ]
  frees = [[name, show(size)] for name, size in result["frees_bytes"].items()]
  parts = [
    table.render(["region", "bytes"], regions),
    table.render(["answer", "value"], answers),
    table.render(["setting", "frees"], frees),
  ]
  if "calibration" in result:
    parts.append(_calibration_text(result["calibration"]))
  return "\n\n".join(parts)


def _calibration_text(figures: Mapping[str, Any]) -> str:
  bandwidth, tau_us = figures["bandwidth_bytes_per_s"] / 1e9, figures["tau_s"] * 1e6
  bounds = figures["link_experts"]
  rows = [
    [layer, *(1e6 * seconds for seconds in times.values())]
    for layer, times in enumerate(figures["layers"])
  ]
  headers = ["layer", "attention us", "router us", "experts us", "dense us"]
  return (
    f"{figures['device']}: {bandwidth:.2f} GB/s from the host, {tau_us:.1f} us a transfer\n"
    f"{table.render(headers, rows)}\n"
    f"transfers between prediction and routing: {', '.join(map(str, bounds))}"
  )
