"""What an engine and a device ask of the arguments: defaults that must hold, and combinations that cannot work."""

from __future__ import annotations

from typing import Any

from swift_provider.config.errors import Fault, shorten

#: DeepSpeed on CPU needs its process group before ``from_pretrained`` builds the ZeRO-3 config: loaded through
#: ms-swift's own ``external_plugins``, this starts it in time.
CPU_PLUGIN_NAME = "cpu_process_group.py"
CPU_PLUGIN = """\
import deepspeed

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
"""
#: A lost peer would otherwise hang for ms-swift's default of 18,000,000 s (208 days).
DDP_TIMEOUT_S = 1800


def apply_engine(args: dict[str, Any], files: dict[str, str], device: str, shown: str) -> list[Fault]:
    """Completes ``args`` and ``files`` in place for the device and engine.

    Args:
        args: ms-swift arguments.
        files: files of the job's folder; a name is referred to as ``{job_dir}/name``.
        device: ``gpu`` or ``cpu``.
        shown: what the arguments' file is called in messages.

    Returns:
        Combinations that cannot work.
    """
    faults = []
    if args.get("deepspeed") and args.get("fsdp"):
        faults.append(Fault(shown, "swift.args.fsdp", "excludes deepspeed; keep one of the two"))
    args.setdefault("ddp_timeout", DDP_TIMEOUT_S)
    if device == "cpu":
        faults += _apply_cpu(args, files, shown)
    return faults


def _apply_cpu(args: dict[str, Any], files: dict[str, str], shown: str) -> list[Fault]:
    faults = []
    if args.get("fsdp"):
        problem = "does not work on a CPU cluster: it would train plain DDP without a word; use deepspeed"
        faults.append(Fault(shown, "swift.args.fsdp", f"{problem} (got {shorten(args['fsdp'])})"))
    if str(args.get("torch_dtype", "bfloat16")) == "float16" or args.get("fp16"):
        faults.append(Fault(shown, "swift.args.torch_dtype", "float16 does not train on a CPU cluster; use bfloat16"))
    # Without it each rank believes in a world of one and trains alone, exit status 0.
    args["use_cpu"] = True
    args.setdefault("ddp_backend", "gloo")
    args.setdefault("torch_dtype", "bfloat16")
    if args["torch_dtype"] == "float32":
        args.setdefault("fp16", False)
        args.setdefault("bf16", False)
    if args.get("deepspeed"):
        files[CPU_PLUGIN_NAME] = CPU_PLUGIN
        plugins = args.get("external_plugins") or []
        plugins = [plugins] if isinstance(plugins, str) else list(plugins)
        args["external_plugins"] = [f"{{job_dir}}/{CPU_PLUGIN_NAME}", *plugins]
    return faults
