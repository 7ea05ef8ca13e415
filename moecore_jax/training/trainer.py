"""The training run: resumable from any instant, with a log, held-out evaluations and an export.

WORKDIR/config.json     what was asked; a run that asks something else is refused
WORKDIR/tokenizer.json  trained first, from the same text
WORKDIR/checkpoints/    the whole training state, the last two
WORKDIR/log.jsonl       a line for each held-out evaluation
WORKDIR/export/         the model in published format and the workloads, when all steps are done
"""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tokenizers
from tqdm import tqdm

from moecore_jax import families
from moecore_jax.config import RunConfig
from moecore_jax.training import export, heldout, objective, tokenizer, workloads
from moecore_jax.training.batches import make_batch

NUM_VALIDATION = 32


def run(config: RunConfig, workdir: Path) -> dict[str, Any]:
  """Trains a model, or goes on with a training run, and exports it.

  Args:
    config: its `train` and `model.published_config`.
    workdir: folder of the run, see above; created where missing.

  Returns:
    The last line of the log.

  Raises:
    ValueError: the config has no or a wrong model, or the workdir belongs to another run.
  """
  config.validate()
  train, published = config.train, config.model.published_config
  if not published:
    raise ValueError("config field model.published_config is empty; use configs/demo_train.py")
  spec = families.model_spec(published)
  if spec.vocab_size != tokenizer.VOCAB_SIZE:
    raise ValueError(
      f"config.json: vocab_size is {spec.vocab_size}, the tokenizer has {tokenizer.VOCAB_SIZE}"
    )
  _check_asked(workdir, {"train": vars(train), "model": published})
  words = _tokenizer(workdir, train.seed)
  graphdef, params, biases = objective.create(spec, train.seed)
  optimizer = objective.make_optimizer(train)
  state = objective.TrainState(params, biases, optimizer.init(params), jnp.zeros((), jnp.int32))
  evaluate = heldout.make_evaluate(graphdef, heldout.load(words, NUM_VALIDATION))
  options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
  with ocp.CheckpointManager((workdir / "checkpoints").absolute(), options=options) as manager:
    state, clock = _restore(manager, state)
    log = _Log(workdir / "log.jsonl", int(state.step))
    step = objective.make_step(graphdef, optimizer, train)
    with tqdm(total=train.num_steps, initial=int(state.step), unit="step") as progress:
      for i in range(int(state.step), train.num_steps):
        batch = make_batch(words, train.seed, i, train.batch_rows, train.row_tokens)
        state, metrics = step(state, batch)
        progress.update(int(state.step) - progress.n)  # waits for the step
        if (i + 1) % train.checkpoint_every and i + 1 < train.num_steps:
          continue
        rates, counts = evaluate(state.params, state.biases)
        spent = clock.read()
        row = {
          "step": i + 1,
          "tokens": (i + 1) * train.batch_rows * train.row_tokens,
          **spent,
          **{name: round(float(value), 4) for name, value in metrics._asdict().items()},
          "exact_match": rates,
          "top_quarter_overlap": heldout.top_quarter_overlap(counts),
        }
        log.append(row)
        progress.set_postfix({"loss": row["loss"], **rates})
        manager.save(
          i + 1,
          args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), clock=ocp.args.JsonSave(spent)
          ),
        )
  export.write(workdir / "export", published, spec, state.params, state.biases, words)
  workloads.write(workdir / "export" / "workloads")
  return log.rows[-1]


class _Clock:
  """Wall and CPU seconds of a run, over all its processes."""

  def __init__(self, seconds: float, cpu_seconds: float):
    self._start = seconds - time.monotonic(), cpu_seconds - time.process_time()

  def read(self) -> dict[str, float]:
    wall, cpu = self._start
    return {
      "seconds": round(wall + time.monotonic(), 1),
      "cpu_seconds": round(cpu + time.process_time(), 1),
    }


class _Log:
  """A file of JSON lines; lines of steps that a killed run did not save are dropped."""

  def __init__(self, path: Path, last_step: int):
    self.path = path
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    self.rows = [row for row in rows if row["step"] <= last_step]
    path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

  def append(self, row: dict[str, Any]) -> None:
    self.rows.append(row)
    with open(self.path, "a") as f:
      f.write(json.dumps(row) + "\n")


def _restore(
  manager: ocp.CheckpointManager, state: objective.TrainState
) -> tuple[objective.TrainState, "_Clock"]:
  """Returns the last saved state and its clock, or the given state with a new clock."""
  last = manager.latest_step()
  if last is None:
    return state, _Clock(0.0, 0.0)
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  saved = manager.restore(
    last,
    args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), clock=ocp.args.JsonRestore()),
  )
  return saved["state"], _Clock(**saved["clock"])


def _tokenizer(workdir: Path, seed: int) -> tokenizers.Tokenizer:
  path = workdir / "tokenizer.json"
  if not path.exists():
    tokenizer.train(seed).save(str(path))
  return tokenizers.Tokenizer.from_file(str(path))


def _check_asked(workdir: Path, asked: dict[str, Any]) -> None:
  """Writes config.json into a fresh workdir; refuses one that belongs to another run."""
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f"workdir {workdir} is a file; choose a folder")
  workdir.mkdir(parents=True, exist_ok=True)
  path, text = workdir / "config.json", json.dumps(asked, indent=1) + "\n"
  if not path.exists():
    path.write_text(text)
  elif path.read_text() != text:
    raise ValueError(f"workdir {workdir} belongs to another training run; choose another folder")
