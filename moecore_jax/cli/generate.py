"""`moecore generate`: streams the completion of one prompt, then its latencies and hit rate."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from moecore_jax.cli import options
from moecore_jax.config import RunConfig
from moecore_jax.evaluation import tasks
from moecore_jax.evaluation.results import write_atomic
from moecore_jax.residency import profiles
from moecore_jax.runtime.engine import Engine
from moecore_jax.runtime.requests import Request, prompt_tokens

ABOUT = """Streams the completion of a prompt, then prints its TTFT, TPOT and hit rate."""


def main(argv: Sequence[str]) -> int:
  """Runs the verb.

  Args:
    argv: the arguments after the verb.

  Returns:
    The exit code.

  Raises:
    ValueError: the prompt, the domain or the config is not what it should be.
  """
  values = options.parse("generate", ABOUT, argv, _define, required=("prompt",))
  config, domain = values.config, values.domain
  _check_domain(domain, config)
  engine = Engine.from_checkpoint(config.model.checkpoint or None, config)
  if engine.tokenizer is None:
    raise ValueError(
      f"checkpoint {config.model.checkpoint} has no tokenizer.json, which the prompt's text needs; "
      "copy the model's into the folder"
    )
  request = Request("prompt", values.prompt, values.max_new_tokens, domain)
  vocab_size, context_tokens = engine.model_spec.vocab_size, engine.spec.context_tokens
  prompt_tokens(request, engine.tokenizer, vocab_size, context_tokens, engine.domains)
  engine.warm_up()  # compiles, after all that can be refused, so that TTFT leaves it out
  (completion,) = engine.generate([request], on_token=_print_piece)
  metrics = completion.metrics
  if metrics is None:
    raise ValueError(completion.error)
  if metrics.tpot_ms is None:
    decoding = "a single token, so no TPOT"
  else:
    decoding = f"TPOT {metrics.tpot_ms:.2f} ms, hit rate {metrics.hit_rate:.3f}"
  print(
    f"\n\nTTFT {metrics.ttft_ms:.2f} ms, {decoding}, "
    f"{metrics.prompt_tokens} prompt + {metrics.output_tokens} output tokens, "
    f"ended by {completion.finish_reason}"
  )
  if values.json:
    result = json.dumps(dataclasses.asdict(completion), indent=1)
    write_atomic(Path(values.json), result + "\n")
  return 0


def _check_domain(domain: str | None, config: RunConfig) -> None:
  """Refuses a domain that the config's profiles, or the demo model's tasks, do not have."""
  if domain is None:
    return
  if path := config.residency.profiles:
    known = profiles.load(path).domains
  else:
    known = () if config.model.checkpoint else tasks.task_names()
  if domain not in known:
    hint = f"choose one of {', '.join(known)}" if known else "there are no profiles, leave it out"
    raise ValueError(f"--domain={domain}: got an unknown domain; {hint}")


def _define(values: flags.FlagValues) -> None:
  flags.DEFINE_string("prompt", None, "the text to complete", flag_values=values)
  flags.DEFINE_string("domain", None, "domain of the prompt, such as math", flag_values=values)
  flags.DEFINE_integer(
    "max_new_tokens", 64, "longest completion in tokens", lower_bound=1, flag_values=values
  )


def _print_piece(_: str, piece: str) -> None:
  print(piece, end="", flush=True)
