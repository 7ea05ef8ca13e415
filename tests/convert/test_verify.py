"""Our forward pass against reference activations, and that a wrong one is found."""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import verify
from checkpoints_convert.convert import convert
from moecore_jax import checkpoint
from moecore_jax.checkpoint.published import read_spec

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORACLES = pathlib.Path(__file__).parents[1] / "oracles"
FOLDER = ORACLES / "deepseek_v3"
ORACLE = FOLDER / "oracle.npz"
NAMES = {
  "logits",
  "full_logits",
  "decode_logits",
  "greedy_tokens",
  *(f"{prefix}layer{i}_topk_idx" for prefix in ("", "dec_") for i in (1, 2)),
  *("mtp_hidden_in", "mtp_hidden_d1", "mtp_hidden_d2", "mtp_logits", "mtp_tokens"),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
  folder = tmp_path_factory.mktemp("verify") / "converted"
  convert(str(FOLDER), str(folder), show_progress=False)
  return folder


def _run(checkpoint, oracle=ORACLE, *more):
  return verify.main([f"--checkpoint={checkpoint}", f"--oracle={oracle}", *more])


def _names(out):
  """Returns the names of all comparisons in a table, and of those that failed."""
  rows = out.splitlines()[1:-1]
  return {r.split()[0] for r in rows}, {r.split()[0] for r in rows if r.endswith("MISMATCH")}


@pytest.mark.parametrize(("kind", "slots"), [("published", 0), ("converted", 3), ("converted", 1)])
def test_the_reference_is_met(converted, capsys, kind, slots):
  """With all experts resident, with fewer slots than a token's experts, and with one."""
  folder = FOLDER if kind == "published" else converted
  assert _run(folder, ORACLE, *([f"--slots={slots}"] if slots else [])) == 0
  names, failed = _names(capsys.readouterr().out)
  assert names == NAMES
  assert failed == set()


def test_every_kind_of_difference_is_found(tmp_path, capsys):
  arrays = dict(np.load(ORACLE))
  arrays["logits"][1, 3, 5] += 2e-4
  arrays["decode_logits"][0, 7, 1] = np.nan
  arrays["full_logits"][1, 32, 0] -= 1
  arrays["layer2_topk_idx"][0, 24] = [0, 1, 2, 3]
  arrays["dec_layer1_topk_idx"][1, 7] = [0, 1, 2, 3]
  arrays["mtp_logits"][0, 1, 0] += 1
  arrays["mtp_hidden_d2"][0, 0, 0] += 1
  arrays["mtp_tokens"][0, 1] += 1
  np.savez(tmp_path / "o.npz", **arrays)
  assert _run(FOLDER, tmp_path / "o.npz") == 1
  out = capsys.readouterr().out
  names, failed = _names(out)
  assert names == NAMES
  assert failed == {
    *("logits", "decode_logits", "full_logits", "layer2_topk_idx", "dec_layer1_topk_idx"),
    *("mtp_logits", "mtp_hidden_d2", "mtp_tokens"),
  }
  (logits,) = [r.split() for r in out.splitlines() if r.startswith("logits ")]
  assert float(logits[1]) == pytest.approx(2e-4, rel=0.2)
  assert logits[3] == "1,3,5"
  assert "5 of 13 comparisons hold" in out


def test_wrong_picks_are_found():
  folder = ORACLES / "glm_moe_dsa_shared"
  loaded = checkpoint.load(str(folder), dtype=jnp.float32, expert_format="float32")
  oracle = verify.read_oracle(str(folder / "oracle.npz"))
  picks = oracle["layer3_index_topk"]
  picks[1, 20, 0] = min(set(range(21)) - set(picks[1, 20]))
  picks[1, 3, 0] = 24  # in place of key 0: key 24 comes later and does not count
  oracle["layer0_index_topk"][0, 5] = [5, 4, 3, 2, 1, 0, -1, 24]  # no fault
  rows = list(verify.compare_whole(loaded, oracle, 1e-4))
  assert [row.name for row in rows] == [f"layer{i}_index_topk" for i in (0, 1, 3)]
  assert [row for row in rows if not row.ok] == [("layer3_index_topk", 2, 0, (1, 3))]


def test_an_oracle_without_picks_is_refused():
  folder = ORACLES / "deepseek_v4"
  spec, oracle = read_spec(folder), dict(verify.read_oracle(str(folder / "oracle.npz")))
  verify.check_oracle(spec, oracle)
  picks = oracle.pop("layer3_index_topk")
  with pytest.raises(ValueError, match="the oracle lacks layer3_index_topk"):
    verify.check_oracle(spec, oracle)
  with pytest.raises(ValueError, match=r"has the shape \(2, 24, 3\), expected \[2, 25, K\]"):
    verify.check_oracle(spec, oracle | {"layer3_index_topk": picks[:, 1:]})


def test_a_looser_tolerance_is_taken():
  row = verify.close("x", np.zeros(3), np.array([0, 0.5, -0.1]), 0.5)
  assert row == ("x", 0.5, 0.5, (1,))
  assert row.ok
  assert not verify.close("x", np.zeros(3), np.array([0, 0.5, -0.1]), 0.4).ok


def test_shapes_that_differ_are_a_mismatch():
  assert not verify.close("x", np.zeros(3), np.zeros(4), 1.0).ok
  assert not verify.same("x", np.zeros((2, 3), int), np.zeros((2, 4), int)).ok


def test_tokens_that_differ_are_counted_once():
  got = np.zeros((2, 3, 4), int)
  want = got.copy()
  want[1, 2] = 5
  assert verify.same("routes", got, want) == ("routes", 1, 0, (1, 2))
  assert verify.same("tokens", got[0], want[1]) == ("tokens", 4, 0, (2, 0))


def _without(name):
  return lambda arrays: arrays.pop(name)


@pytest.mark.parametrize(
  ("edit", "words"),
  [
    (_without("input_ids"), "lacks input_ids"),
    (_without("layer2_topk_idx"), "lacks layer2_topk_idx"),
    (_without("mtp_hidden_d2"), "lacks mtp_hidden_d2"),
    (lambda a: a.update(logits=a["logits"][..., :7]), "has 7 logits a token, the model 128"),
    (lambda a: a.update(input_ids=a["input_ids"] + 99), "ids outside 0..127"),
    (lambda a: a.update(input_ids=a["input_ids"][0]), "expected int [batch, length]"),
  ],
)
def test_an_oracle_of_something_else(tmp_path, capsys, edit, words):
  arrays = dict(np.load(ORACLE))
  edit(arrays)
  np.savez(tmp_path / "o.npz", **arrays)
  assert _run(FOLDER, tmp_path / "o.npz") == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1
  assert words in err


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([], "--checkpoint"),
    (["--checkpoint=/nowhere", f"--oracle={ORACLE}"], "/nowhere: the checkpoint folder does not"),
    ([f"--checkpoint={FOLDER}", "--oracle=/nowhere.npz"], "/nowhere.npz: the oracle file does not"),
    ([f"--checkpoint={FOLDER}", f"--oracle={FOLDER}"], "is not a npz file"),
    ([f"--checkpoint={FOLDER}", f"--oracle={FOLDER / 'config.json'}"], "is not a npz file"),
    ([f"--checkpoint={FOLDER}", f"--oracle={ORACLE}", "--slots=17"], "got 17, expected 1..16"),
    ([f"--checkpoint={FOLDER}", f"--oracle={ORACLE}", "--slots=0"], "expected 1 or more"),
    ([f"--checkpoint={FOLDER}", f"--oracle={ORACLE}", "--slots=x"], "--slots"),
    ([f"--checkpoint={FOLDER}", f"--oracle={ORACLE}", "--atol=nan"], "--atol"),
    ([f"--checkpoint={FOLDER}", f"--oracle={ORACLE}", "--slot=1"], "--slot=1"),
  ],
)
def test_wrong_input(capsys, arguments, words):
  assert verify.main(arguments) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.splitlines()) == 1, err
  assert words in err


def test_exit_codes_reach_the_shell():
  command = [sys.executable, "-m", "checkpoints_convert.verify", "--checkpoint=/nowhere"]
  run = subprocess.run(
    [*command, f"--oracle={ORACLE}"], capture_output=True, text=True, check=False
  )
  assert run.returncode == 2
  assert run.stderr == "verify: /nowhere: the checkpoint folder does not exist\n"
