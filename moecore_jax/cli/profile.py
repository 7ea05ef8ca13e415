"""`moecore profile`: records which experts each domain likes while a workload runs."""

import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from moecore_jax import traces
from moecore_jax.cli import options
from moecore_jax.cli.plan import read_model
from moecore_jax.config import RunConfig
from moecore_jax.evaluation import tasks
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.reporting import table
from moecore_jax.residency.profiles import ProfileSet, ScoreSum
from moecore_jax.runtime.engine import Engine
from moecore_jax.runtime.requests import Request

ABOUT = """Runs a workload and writes the profile of each of its domains: the mean selection scores
of all tokens, prompts and completions. Runs take the file as --config.residency.profiles=FILE and
start each request with the experts that its domain likes.

The workload is the items of config.eval.tasks, or the lines of --prompts, JSON objects with
"prompt", "domain", "max_new_tokens" and, where wanted, "stop". Measure on other text than that.
Exits 1 when requests failed.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the workload or the config is not what it should be.
  """
  values = options.parse("profile", ABOUT, argv, _define, required=("output",))
  for flag in ("output", "trace"):
    if path := values[flag].value:
      options.check_writable(flag, path)
  paths = [path for flag in ("output", "trace", "json") if (path := values[flag].value)]
  if len({os.path.realpath(path) for path in paths}) < len(paths):
    raise ValueError(f"--output, --trace and --json name one file twice: {', '.join(paths)}")
  requests = [
    request for path in values.prompts for request in read_prompts(path)
  ] or task_requests(values.config)
  sums: dict[str, ScoreSum] = {}

  def add(domain: str, scores: np.ndarray) -> None:
    sums.setdefault(domain, ScoreSum(num_experts)).add(scores)

  recorder = traces.TraceRecorder(values.scores, add)
  config = copy.deepcopy(values.config)
  config.residency.profiles = ""  # what is recorded does not depend on it
  model = read_model(config)
  num_experts = [
    model.expert_groups[model.group_of(layer)[0]].num_experts for layer in model.moe_layers
  ]
  engine = Engine.from_checkpoint(config.model.checkpoint or None, config, recorder)
  faults = []
  for completion in tqdm(engine.generate(requests), total=len(requests), unit="request"):
    if completion.error:
      faults.append(f"{completion.id}: {completion.error}")
  recorder.flush()
  if not sums:
    raise ValueError(f"no request of the workload ran; the first: {faults[0]}")
  profiles = ProfileSet({name: part.profile() for name, part in sums.items()}, engine.fingerprint)
  profiles.save(values.output)
  if values.trace:
    traces.save(recorder.trace(engine), values.trace)
  result = _describe(profiles, requests, values, faults)
  if values.json:
    write_atomic(Path(values.json), json.dumps(result, indent=1) + "\n")
  rows = [[name, row["requests"], row["tokens"]] for name, row in result["domains"].items()]
  print(table.render(["domain", "requests", "tokens"], rows))
  for fault in faults:
    print(f"moecore profile: request {fault}", file=sys.stderr)
  return 1 if faults else 0


def task_requests(config: RunConfig) -> list[Request]:
  """Returns the items of a config's tasks as requests.

  Raises:
    ValueError: a task is unknown.
  """
  cap = config.eval.max_new_tokens
  return [
    Request(f"{task} {i.id}", i.prompt, cap or i.max_new_tokens, i.domain, i.stop)
    for task in config.eval.tasks
    for i in tasks.load_items(task, config.eval.items_per_task)
  ]


def read_prompts(path: str) -> list[Request]:
  """Returns the requests of a JSON-lines file.

  Raises:
    ValueError: a line is no object with the fields of a prompt, or there is none.
  """
  requests = []
  with open(path, encoding="utf-8", errors="surrogateescape") as file:
    for number, line in enumerate(file, 1):
      if line.strip():
        requests.append(_read_prompt(f"{path} line {number}", line))
  if not requests:
    raise ValueError(f"{path}: has no prompts, expected one JSON object a line")
  return requests


def _read_prompt(name: str, line: str) -> Request:
  try:
    fields = json.loads(line)
  except ValueError as error:
    raise ValueError(f"{name}: is no JSON: {error}") from None
  kinds = {
    "prompt": (str, "a text"),
    "domain": (str, "a text"),
    "max_new_tokens": (int, "1 or more"),
  }
  for field, (kind, expected) in kinds.items():
    value = fields.get(field) if isinstance(fields, dict) else None
    is_wrong = type(value) is not kind or not value
    if is_wrong or (isinstance(value, int) and value < 1):
      raise ValueError(
        f"{name}: {field} is {value!r}, expected {expected}; each line is an object with "
        f"{', '.join(kinds)}"
      )
  stop = fields.get("stop", [])
  if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
    raise ValueError(f"{name}: stop is {stop!r}, expected a list of texts")
  return Request(name, fields["prompt"], fields["max_new_tokens"], fields["domain"], tuple(stop))


def _describe(
  profiles: ProfileSet, requests: Sequence[Request], values: flags.FlagValues, faults: Sequence[str]
) -> dict[str, Any]:
  return {
    "output": values.output,
    "trace": values.trace,
    "fingerprint": profiles.fingerprint,
    "domains": {
      name: {
        "requests": sum(request.domain == name for request in requests),
        "tokens": profiles.lookup(name).num_tokens,
      }
      for name in profiles.domains
    },
    "faults": list(faults),
  }


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("output", None, "the profile file to write", flag_values=values)
  flags.DEFINE_list("prompts", [], "files of prompts, FILE or FILE,FILE,...", flag_values=values)
  flags.DEFINE_string("trace", None, "write the routing trace, too", flag_values=values)
  flags.DEFINE_bool(
    "scores",
    False,
    "keep the selection scores in the trace, in memory until then",
    flag_values=values,
  )
