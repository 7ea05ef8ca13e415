"""What a platform's compiler is asked for beyond its defaults, for the decode step."""

import functools

import jax
from absl import logging

CompilerOptions = tuple[tuple[str, bool], ...]

COMPILER_OPTIONS: dict[str, CompilerOptions] = {
  # The first schedule starts the copy of an expert's second array when the experts have run. The
  # second one, with the same latencies, starts both before them. Not for prefill, where it would
  # start the copies of staged layers when the experts have run.
  "tpu": (("xla_tpu_rerun_latency_hiding_scheduler_post_sc_assignment", True),),
}
"""By platform; see `bench.aot` for what they bring."""


@functools.cache
def accepted_options(platform: str) -> CompilerOptions:
  """Returns the platform's options, none if its compiler, that is of another version, refuses them.

  Args:
    platform: of the device that is attached, such as "tpu".
  """
  options = COMPILER_OPTIONS.get(platform, ())
  if not options:
    return options
  try:
    jax.jit(lambda x: x, compiler_options=dict(options)).lower(0).compile()
  except jax.errors.JaxRuntimeError as error:
    logging.warning(
      "compiler options %s are refused (%s); prefetches overlap less without them",
      ", ".join(name for name, _ in options),
      str(error).splitlines()[0],
    )
    return ()
  return options
