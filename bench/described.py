"""Compiles for a device that is described, not attached: an H200, one chip of a TPU v5p.

The compilers come with the `aot` extra. Because they look for devices when they start, and because
an extra meant for compiling must not change what other programs of the process see, compilation
belongs in a process of its own that was started with `environment()`; see `bench.aot`.

Two jax-internal imports are used: the public path drops memory kinds for a GPU that is only
described.
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

TARGETS = ("h200", "v5p", "cpu")

_H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200" model_str: "sm_9.0a" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
    dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin:
    232448
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  pcie_bandwidth: 34359738368 device_address_bits: 64 ecc_enabled: true
  device_interconnect_info { active_links: 18 }
}
"""

MEMORY_BYTES = {"h200": 151_397_597_184, "v5p": 95 << 30}
"""Device memory of one device, in bytes."""

_COMPILERS = {
  "h200": ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"),
  "v5p": ("libtpu",),
  "cpu": (),
}


def missing_compiler(target: str) -> str:
  """Returns the module that `target` needs and this Python lacks, "" if it can compile."""
  for module in _COMPILERS[target]:
    try:
      if importlib.util.find_spec(module) is None:
        return module
    except ModuleNotFoundError:
      return module
  return ""


def environment() -> dict[str, str]:
  """Returns the environment of a process that compiles for described devices; set before jax is
  imported."""
  flags = os.environ.get("XLA_FLAGS", "")
  return os.environ | {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    # A described GPU cannot time candidates.
    "XLA_FLAGS": f"{flags} --xla_gpu_autotune_level=0".strip(),
  }


@contextlib.contextmanager
def one_at_a_time(target: str) -> Iterator[None]:
  """Waits for other compilations for a TPU on this machine: its library does not bear two
  processes."""
  if target != "v5p":
    yield
    return
  path = os.path.join(tempfile.gettempdir(), f"moecore-libtpu-{os.getuid()}.lock")
  with open(path, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    hlo: its text, in schedule order.
    lower_s: seconds to trace and lower it, which no compilation cache saves.
    compile_s: seconds that XLA took.
    argument_bytes: device arguments, donated ones included.
    alias_bytes: outputs that take the memory of donated arguments.
    output_bytes: device outputs, aliased ones included.
    temp_bytes: device memory beyond arguments and outputs at the peak.
    host_argument_bytes: arguments in pinned host memory.
    host_temp_bytes: host memory beyond those.
  """

  hlo: str
  lower_s: float
  compile_s: float
  argument_bytes: int
  alias_bytes: int
  output_bytes: int
  temp_bytes: int
  host_argument_bytes: int
  host_temp_bytes: int

  @property
  def device_bytes(self) -> int:
    """Device memory that the program needs while it runs."""
    return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def described_device(target: str) -> Any:
  """Returns the device to compile for; for the CPU the one that is attached."""
  import jax
  from jax.experimental import topologies

  if target == "h200":
    topology = topologies.get_topology_desc("", "cuda", target_config=_H200, topology="1x1x1")
    return topology.devices[0]
  if target == "v5p":
    return topologies.get_topology_desc("v5p:2x2x1", "tpu").devices[0]
  return jax.devices("cpu")[0]


def tracing_device(target: str) -> Any:
  """Returns the device that abstract arguments are placed on while tracing.

  A described GPU has no memory spaces of its own yet; the CPU has the same names for them.
  """
  import jax

  return described_device(target) if target == "v5p" else jax.devices("cpu")[0]


def compile_for(target: str, jitted: Any, args: tuple[Any, ...]) -> Program:
  """Compiles `jitted(*args)` for `target`.

  Args:
    target: one of TARGETS.
    jitted: what `jax.jit` returns.
    args: `jax.ShapeDtypeStruct`s whose shardings live on `tracing_device(target)` and carry memory
      kinds, or static values.
  """
  start = time.perf_counter()
  traced = jitted.trace(*args)
  if target == "h200":
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    lowered = time.perf_counter()
    hlo, memory = _compile_cuda(module)
  else:
    lowering = traced.lower()
    lowered = time.perf_counter()
    executable = lowering.compile()
    hlo, memory = executable.as_text(), executable.memory_analysis()
  compiled = time.perf_counter()
  host_bytes = memory.host_argument_size_in_bytes
  argument_bytes = memory.argument_size_in_bytes
  if target == "cpu":  # counts host memory as device memory
    host_bytes = _host_argument_bytes(args)
    argument_bytes -= host_bytes
  return Program(
    hlo=hlo,
    lower_s=lowered - start,
    compile_s=compiled - lowered,
    argument_bytes=argument_bytes,
    alias_bytes=memory.alias_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    host_argument_bytes=host_bytes,
    host_temp_bytes=memory.host_temp_size_in_bytes,
  )


def _compile_cuda(module: Any) -> tuple[str, Any]:
  import numpy as np
  from jax._src.lib import xla_client

  device = described_device("h200")
  options = xla_client.CompileOptions()
  options.num_replicas = options.num_partitions = 1
  build = options.executable_build_options
  build.use_shardy_partitioner = True
  build.device_assignment = xla_client.DeviceAssignment.create(np.array([[0]]))
  executable = device.client.compile(module, xla_client.DeviceList((device,)), options)
  modules = getattr(executable, "get_hlo_modules", None) or executable.hlo_modules
  return modules()[0].to_string(), executable.get_compiled_memory_stats()


def _host_argument_bytes(args: tuple[Any, ...]) -> int:
  import jax

  return sum(
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(args)
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.memory_kind == "pinned_host"
  )
