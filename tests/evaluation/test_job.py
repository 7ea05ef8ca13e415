"""The batch evaluation with a real engine: whole, resumed, killed, refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import moecore_jax as moecore
from moecore_jax.evaluation import job, tasks
from moecore_jax.evaluation.results import ResultLog

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUM_ITEMS = 3
TASKS = ("math", "agent")
SYSTEMS = ("moecore", "lod")
OVERRIDES = {
  "residency.profiles": "",
  "residency.slots_per_layer": 4,
  "engine.context_tokens": 1024,
  "engine.prefill_buckets": (64,),
  "eval.tasks": ",".join(TASKS),
  "eval.systems": ",".join(SYSTEMS),
  "eval.items_per_task": NUM_ITEMS,
  "eval.max_new_tokens": 4,
}


def _overrides(checkpoint, changes):
  return [f"{k}={v}" for k, v in (OVERRIDES | {"model.checkpoint": checkpoint} | changes).items()]


def _config(checkpoint, changes=None):
  return moecore.load_config("configs/demo.py", overrides=_overrides(checkpoint, changes or {}))


def _rows(workdir):
  return [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]


def _keys(rows):
  return [(row["system"], row["task"], row["id"]) for row in rows]


def _refuse(path, config):
  raise AssertionError("an engine was built")


ALL_KEYS = {
  (system, task, item.id)
  for system in SYSTEMS
  for task in TASKS
  for item in tasks.load_items(task, NUM_ITEMS)
}


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
  """A workdir whose run was never interrupted, and its summary."""
  workdir = tmp_path_factory.mktemp("finished") / "run"
  return workdir, job.run(_config(checkpoint), workdir)


def test_every_item_is_answered_once(finished):
  workdir, _ = finished
  rows = _rows(workdir)
  assert set(_keys(rows)) == ALL_KEYS
  assert len(rows) == len(ALL_KEYS)
  for row in rows:
    assert row["error"] is None
    assert 1 <= row["metrics"]["output_tokens"] <= 4


def test_systems_answer_alike(finished):
  """Residency does not change a token."""
  texts = {}
  for row in _rows(finished[0]):
    texts.setdefault((row["task"], row["id"]), set()).add(row["text"])
  assert {len(found) for found in texts.values()} == {1}


def test_figures_agree_with_the_rows(finished):
  workdir, summary = finished
  assert json.loads((workdir / "metrics.json").read_text()) == summary
  rows = _rows(workdir)
  order = [(result["task"], result["system"]) for result in summary["results"]]
  assert order == [(task, system) for task in TASKS for system in SYSTEMS]
  for result in summary["results"]:
    part = [
      row for row in rows if (row["task"], row["system"]) == (result["task"], result["system"])
    ]
    steps = sum(row["metrics"]["output_tokens"] - 1 for row in part)
    layers = {name: np.array(values) for name, values in result["counters"].items()}
    assert layers["decode_invocations"].tolist() == [4 * steps, 4 * steps]
    assert result["hit_rate"] == layers["decode_hits"].sum() / (8 * steps)
    assert result["misses_per_token"] == pytest.approx(layers["decode_misses"].sum() / steps)
    expert_bytes = 3 * 64 * 16 * 4
    loads = layers["decode_misses"] + layers["decode_prefetches"]
    assert (layers["decode_moved_bytes"] == loads * expert_bytes).all()
    assert result["loads_per_token"] == pytest.approx(loads.sum() / steps)
    predicts = result["system"] == "moecore"
    assert [layer["recall_frac"] is not None for layer in result["layers"]] == [False, predicts]
    assert (layers["prefill_staged"].sum() > 0) == predicts
    assert result["num_processes"] == 1
    assert result["ttft_ms"]["mean"] < result["e2el_ms"]["mean"]
  memory = summary["memory_bytes"]["lod"]
  assert memory["host"]["expert_bank"] == 2 * 16 * expert_bytes
  assert memory["device"]["expert_slots"] < memory["host"]["expert_bank"]


def test_a_finished_run_needs_no_engine(finished, checkpoint):
  workdir, summary = finished
  before = (workdir / "results.jsonl").read_bytes()
  assert job.run(_config(checkpoint), workdir, open_engine=_refuse) == summary
  assert (workdir / "results.jsonl").read_bytes() == before


def test_a_torn_run_goes_on(finished, checkpoint, tmp_path):
  """Half of one system's answers are lost, the last of them in the middle of its line."""
  workdir, summary = finished
  lines = (workdir / "results.jsonl").read_bytes().splitlines(keepends=True)
  kept = lines[: 2 * NUM_ITEMS + 2]
  for name in ("config.json", "systems.json"):
    (tmp_path / name).write_bytes((workdir / name).read_bytes())
  (tmp_path / "results.jsonl").write_bytes(b"".join(kept) + lines[len(kept)][:40])
  opened = []

  def open_engine(path, config):
    opened.append(config.residency.policy)
    return moecore.Engine.from_checkpoint(path, config)

  resumed = job.run(_config(checkpoint), tmp_path, open_engine)
  assert opened == ["lru"]
  content = (tmp_path / "results.jsonl").read_bytes()
  assert content.startswith(b"".join(kept))
  rows = _rows(tmp_path)
  assert sorted(_keys(rows)) == sorted(ALL_KEYS)
  assert {row["process"] for row in rows[len(kept) :]} == {2}
  texts = {key: row["text"] for key, row in zip(_keys(rows), rows, strict=True)}
  whole = _rows(workdir)
  assert texts == {key: row["text"] for key, row in zip(_keys(whole), whole, strict=True)}
  for before, after in zip(summary["results"], resumed["results"], strict=True):
    assert after["accuracy"] == before["accuracy"]
    if (after["system"], after["task"]) != ("lod", TASKS[0]):  # the other three were left whole
      assert after["counters"]["decode_invocations"] == before["counters"]["decode_invocations"]
    # Steps that were repeated count as tokens and as misses alike.
    layers = {name: sum(values) for name, values in after["counters"].items()}
    tokens = layers["decode_invocations"] / 8
    assert after["misses_per_token"] == pytest.approx(layers["decode_misses"] / tokens)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({}, r"line \d+ answers again"),
    ({"id": "math-999"}, r"line \d+ answers what was not asked: \w+ \w+ math-999"),
    ({"process": None}, r"line \d+ is damaged \(its process"),
  ],
)
def test_a_log_with_lines_of_another_hand_is_refused(finished, checkpoint, tmp_path, change, words):
  workdir, _ = finished
  for name in ("config.json", "systems.json", "results.jsonl"):
    (tmp_path / name).write_bytes((workdir / name).read_bytes())
  with open(tmp_path / "results.jsonl", "a") as f:
    f.write(json.dumps(_rows(workdir)[0] | change) + "\n")
  before = (tmp_path / "results.jsonl").read_bytes()
  with pytest.raises(ValueError, match=words):
    job.run(_config(checkpoint), tmp_path, open_engine=_refuse)
  assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "systems.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_file_is_named(finished, checkpoint, tmp_path, name, content):
  workdir, _ = finished
  for file in ("config.json", "systems.json", "results.jsonl"):
    (tmp_path / file).write_bytes((workdir / file).read_bytes())
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=name):
    job.run(_config(checkpoint), tmp_path, open_engine=_refuse)


@pytest.mark.parametrize(
  ("content", "words"), [(None, "has no tokenizer"), ("{}", "is no tokenizer")]
)
def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint, tmp_path, content, words):
  folder = tmp_path / "model"
  shutil.copytree(checkpoint, folder)
  (folder / "tokenizer.json").unlink()
  if content is not None:
    (folder / "tokenizer.json").write_text(content)
  with pytest.raises(ValueError, match=words):
    job.run(_config(folder), tmp_path / "workdir")
  assert not (tmp_path / "workdir").exists()


def test_another_config_is_refused(finished, checkpoint):
  workdir, _ = finished
  before = {path.name: path.read_bytes() for path in workdir.iterdir()}
  with pytest.raises(ValueError, match=r"residency\.slots_per_layer = 4, this one has 5"):
    job.run(_config(checkpoint, {"residency.slots_per_layer": 5}), workdir, open_engine=_refuse)
  with pytest.raises(ValueError, match=r"items\.math"):
    # The same config, but the items have changed.
    asked = json.loads(before["config.json"])
    ResultLog(workdir, {**asked, "items": {**asked["items"], "math": "0"}})
  assert {path.name: path.read_bytes() for path in workdir.iterdir()} == before


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"residency.slots_per_layer": 17}, r"residency\.slots_per_layer: got 17, expected 1\.\.16"),
    ({"eval.tasks": "math,maths"}, "maths"),
    ({"model.checkpoint": "/nowhere"}, "/nowhere"),
  ],
)
def test_nothing_is_written_for_wrong_input(checkpoint, tmp_path, change, words):
  workdir = tmp_path / "new"
  with pytest.raises((ValueError, OSError), match=words):
    job.run(_config(checkpoint, change), workdir)
  assert not workdir.exists()


def test_failed_requests_are_logged(checkpoint, tmp_path):
  """Prompts that do not fit the context fail with a reason; the others go on."""
  changes = {"engine.context_tokens": 128, "eval.systems": "lod", "eval.items_per_task": 6}
  config = _config(checkpoint, changes)
  results = {row["task"]: row for row in job.run(config, tmp_path)["results"]}
  lengths = {t: [len(i.prompt) for i in tasks.load_items(t, 6)] for t in TASKS}
  for task in TASKS:
    assert results[task]["num_errors"] == sum(n + 4 > 128 for n in lengths[task])
  assert 0 < sum(result["num_errors"] for result in results.values()) < 12
  failed = [row for row in _rows(tmp_path) if row["error"]]
  assert all("context" in row["error"] and row["metrics"] is None for row in failed)


def test_killed_processes_answer_every_item_once(checkpoint, tmp_path):
  """`moecore eval` is killed at random instants until enough is answered, then left to finish."""
  workdir = tmp_path / "run"
  command = [sys.executable, "-m", "moecore_jax.cli.main", "eval", "--config=configs/demo.py"]
  changes = {"eval.items_per_task": 12, "eval.systems": "lod"}
  command += [f"--config.{override}" for override in _overrides(checkpoint, changes)]
  command += [f"--workdir={workdir}", "--layers"]
  cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
  cache["JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  log = workdir / "results.jsonl"

  def answered():
    return log.read_bytes().count(b"\n") if log.exists() else 0

  rng = random.Random(0)
  num_items = 12 * len(TASKS)
  num_kills, seen = 0, b""
  while num_kills < 2:
    before = answered()
    process = subprocess.Popen(command, env=os.environ | cache, stderr=subprocess.DEVNULL)
    goal = min(before + rng.randint(1, 6), num_items - 2)
    while answered() < goal and process.poll() is None:
      time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    num_kills += 1
    content = log.read_bytes()
    assert content.startswith(seen)
    seen = content[: content.rfind(b"\n") + 1]
  last = subprocess.run(
    command, env=os.environ | cache, capture_output=True, text=True, check=False
  )
  assert last.returncode == 0, last.stderr
  assert log.read_bytes().startswith(seen)
  rows = _rows(workdir)
  items = [("lod", task, item.id) for task in TASKS for item in tasks.load_items(task, 12)]
  assert sorted(_keys(rows)) == sorted(items)
  assert "misses/token" in last.stdout and "wasted/token" in last.stdout
  for result in json.loads((workdir / "metrics.json").read_text())["results"]:
    assert result["n"] == 12
    layers = {name: sum(values) for name, values in result["counters"].items()}
    assert layers["decode_hits"] < layers["decode_invocations"]
    assert layers["decode_moved_bytes"] == layers["decode_misses"] * 3 * 64 * 16 * 4


def test_other_weights_at_the_same_path_are_refused(checkpoint, finished, tmp_path):
  """As a checkpoint that was replaced between two runs in one workdir."""
  model, workdir = tmp_path / "model", tmp_path / "run"
  shutil.copytree(checkpoint, model)
  shutil.copytree(finished[0], workdir)
  config = _config(model)
  asked = job._asked(config, {task: tasks.load_items(task, NUM_ITEMS) for task in TASKS})
  (workdir / "config.json").write_text(json.dumps(asked))
  assert job.run(config, workdir, _refuse) == finished[1]  # all is answered
  weights = bytearray((model / "model.safetensors").read_bytes())
  weights[-1] ^= 1
  (model / "model.safetensors").write_bytes(weights)
  with pytest.raises(ValueError, match=r"belongs to a run with model\.fingerprint"):
    job.run(config, workdir, _refuse)
