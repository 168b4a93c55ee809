"""Lets accelerate shard on the CPU, for tests: put this folder on PYTHONPATH.

accelerate 1.15 takes FSDP and DeepSpeed for accelerators alone: ``AcceleratorState`` looks for
FSDP where the processes are of type MULTI_GPU, MULTI_XPU, ..., and not MULTI_CPU, and
``PartialState`` knows no backend for DeepSpeed's CPU accelerator. Told that one type and that one
backend (gloo),
all code of theirs that shards runs unmodified. Nothing else is changed here.
"""

import importlib.abc
import importlib.machinery
import os
import sys


def let_cpu_shard(state):
    original = state.AcceleratorState.__init__

    def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        on_cpu = self.distributed_type == state.DistributedType.MULTI_CPU
        if on_cpu and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = state.DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = with_fsdp
    prepare = state.PartialState._prepare_backend

    def with_gloo(self, cpu=False, sagemaker_dp=False, backend=None):
        found = prepare(self, cpu, sagemaker_dp, backend)
        uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        if uses_deepspeed and not cpu and "LOCAL_RANK" in os.environ:
            return "gloo", state.DistributedType.MULTI_CPU
        return found

    state.PartialState._prepare_backend = with_gloo


class Finder(importlib.abc.MetaPathFinder):
    """Patches accelerate.state once it has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "accelerate.state":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            let_cpu_shard(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
