"""The batch evaluation: every item of every task, answered by every system, once, whatever happens.

For each system in turn an engine is built and answers the tasks one after another. Each answer is
logged with the counters that the engine advanced by since the answer before it; so the figures of a
run that was killed and resumed count the work of all its processes, each part once.
"""

import dataclasses
import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from moecore_jax import checkpoint
from moecore_jax.config import RunConfig
from moecore_jax.evaluation import metrics, tasks
from moecore_jax.evaluation.results import ResultLog
from moecore_jax.runtime import plan
from moecore_jax.runtime.engine import Engine, Request

OpenEngine = Callable[[str | None, RunConfig], Engine]


def run(
  config: RunConfig, workdir: Path, open_engine: OpenEngine = Engine.from_checkpoint
) -> dict[str, Any]:
  """Runs, or goes on with, a batch evaluation.

  Args:
    config: the run; `config.eval` names the tasks and systems.
    workdir: folder of the results, see `evaluation.results`.
    open_engine: builds the engine of a checkpoint (None: the demo model) and a config.

  Returns:
    The content of metrics.json, see `metrics.summarize`.

  Raises:
    ValueError: the config does not fit the model, a task is unknown, or the workdir is not usable.
      Nothing was written.
  """
  config.validate()
  items = {task: _load(task, config) for task in config.eval.tasks}
  asked = _asked(config, items)
  engines = {}
  if not (workdir / "config.json").exists():
    # Refuses a config that does not fit model or memory before anything is written.
    first = config.eval.systems[0]
    engines[first] = _open(config, first, open_engine)
    for system in config.eval.systems:
      plan.freeze(config.for_system(system), engines[first].model_spec)
  with ResultLog(workdir, asked) as log:
    _check_rows(log.rows, items, config.eval.systems, workdir)
    process = 1 + max((row["process"] for row in log.rows), default=0)
    total = len(config.eval.systems) * sum(map(len, items.values()))
    with tqdm(total=total, initial=len(log.rows), unit="item") as progress:
      for system in config.eval.systems:
        pending = _pending(items, log.rows, system)
        if not any(pending.values()):
          continue
        progress.set_description(f"{system}, compiling")
        engine = engines.pop(system, None) or _open(config, system, open_engine)
        engine.warm_up()  # so that the first request's latency is that of the others
        log.write("systems.json", {**(log.read("systems.json") or {}), system: _describe(engine)})
        for task, left in pending.items():
          progress.set_description(f"{system} {task}")
          for row in _answer(engine, left, config):
            log.append({"system": system, "task": task, **row, "process": process})
            progress.update()
        del engine
        gc.collect()  # frees the pool and the bank before the next system allocates its own
    summary = metrics.summarize(log.rows, log.read("systems.json"), config.eval)
    log.write("metrics.json", summary)
  return summary


_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
  "system": str,
  "task": str,
  "id": str,
  "process": int,
  "score": (int, float),
  "error": (str, type(None)),
  "metrics": (dict, type(None)),
  "counters": dict,
}


def _check_rows(
  rows: Sequence[Mapping[str, Any]],
  items: Mapping[str, Sequence[tasks.Item]],
  systems: Sequence[str],
  workdir: Path,
) -> None:
  """Refuses a log with lines that are no answers, or answers that this run does not ask for or has
  twice.
  """
  left = {(s, task, item.id) for s in systems for task, part in items.items() for item in part}
  asked = set(left)
  for number, row in enumerate(rows, 1):
    for name, kind in _ROW_FIELDS.items():
      if not isinstance(row.get(name, ...), kind):
        raise ValueError(
          f"{workdir / 'results.jsonl'} line {number} is damaged (its {name} is missing or of the "
          "wrong type); remove the line or choose another workdir"
        )
    key = row["system"], row["task"], row["id"]
    if key not in left:
      fault = "answers again" if key in asked else "answers what was not asked:"
      raise ValueError(
        f"{workdir / 'results.jsonl'} line {number} {fault} {' '.join(key)}; "
        "remove the line or choose another workdir"
      )
    left.remove(key)


def _load(task: str, config: RunConfig) -> list[tasks.Item]:
  items = tasks.load_items(task, config.eval.items_per_task)
  ids = [item.id for item in items]
  if len(set(ids)) < len(ids):
    raise ValueError(f"task {task}: two items have one id; make the ids distinct")
  return items


def _asked(config: RunConfig, items: Mapping[str, Sequence[tasks.Item]]) -> dict[str, Any]:
  """Returns everything that determines the answers."""
  plain = config.to_dict()
  del plain["train"]
  if config.model.checkpoint:
    plain["model"]["checkpoint"] = os.path.abspath(config.model.checkpoint)
    plain["model"]["fingerprint"] = checkpoint.fingerprint(config.model.checkpoint)
  digests = {
    task: hashlib.sha256(json.dumps([dataclasses.asdict(i) for i in part]).encode()).hexdigest()
    for task, part in items.items()
  }
  return {"format": 1, **plain, "items": digests}


def _pending(
  items: Mapping[str, Sequence[tasks.Item]], rows: Sequence[Mapping[str, Any]], system: str
) -> dict[str, list[tasks.Item]]:
  done = {(row["task"], row["id"]) for row in rows if row["system"] == system}
  return {task: [i for i in part if (task, i.id) not in done] for task, part in items.items()}


def _open(config: RunConfig, system: str, open_engine: OpenEngine) -> Engine:
  engine = open_engine(config.model.checkpoint or None, config.for_system(system))
  if engine.tokenizer is None:
    raise ValueError(
      f"checkpoint {config.model.checkpoint} has no tokenizer.json, which the tasks' texts need; "
      "copy the model's into the folder"
    )
  return engine


def _describe(engine: Engine) -> dict[str, Any]:
  """Returns what of an engine goes into systems.json."""
  spec = engine.model_spec
  experts_per_tok = [
    spec.expert_groups[spec.group_of(layer)[0]].num_experts_per_tok for layer in spec.moe_layers
  ]
  predicts = [engine.program.prefetch_count(layer) > 0 for layer in spec.moe_layers]
  return {
    "memory_bytes": engine.memory_report(),
    "experts_per_tok": experts_per_tok,
    "predicts": predicts,
  }


def _answer(
  engine: Engine, items: Sequence[tasks.Item], config: RunConfig
) -> Iterator[dict[str, Any]]:
  """Yields a row for each item as it is answered."""
  by_id = {item.id: item for item in items}
  cap = config.eval.max_new_tokens
  requests = [
    Request(i.id, i.prompt, cap or i.max_new_tokens, domain=i.domain, stop=tuple(i.stop))
    for i in items
  ]
  before = engine.counters()
  for completion in engine.generate(requests):
    after, item = engine.counters(), by_id[completion.id]
    yield {
      "id": completion.id,
      "text": completion.text,
      "score": 0.0 if completion.error else float(tasks.score(item, completion.text)),
      "finish_reason": completion.finish_reason,
      "error": completion.error,
      "metrics": dataclasses.asdict(completion.metrics) if completion.metrics else None,
      "counters": {name: np.subtract(after[name], before[name]).tolist() for name in after},
    }
    before = after
