"""What a CPU cluster asks of the arguments of a ``swift`` command."""

from __future__ import annotations

from typing import Any

from swift_provider.config.errors import shorten
from swift_provider.planning.engines.setting import Finding, Setting, argument, truth

#: DeepSpeed on CPU needs its process group before ``from_pretrained`` builds the ZeRO-3 config: loaded through
#: ms-swift's own ``external_plugins``, this starts it in time.
PLUGIN_NAME = "cpu_process_group.py"
PLUGIN = """\
import deepspeed

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
"""


def complete(args: dict[str, Any], setting: Setting) -> list[Finding]:
    """Completes ``args`` in place; refuses what does not train on CPU."""
    found = []
    if args.get("fsdp"):
        problem = "does not work on a CPU cluster: it would train plain DDP without a word; use deepspeed"
        found.append(argument("fsdp", f"{problem} (got {shorten(args['fsdp'])})"))
    if str(args.get("torch_dtype", "bfloat16")) == "float16" or truth(args.get("fp16")):
        value = shorten(args.get("torch_dtype") or args.get("fp16"))
        found.append(argument("torch_dtype", f"float16 does not train on a CPU cluster; use bfloat16 (got {value})"))
    if str(args.get("attn_impl")).startswith("flash"):
        problem = "flash attention needs a GPU; leave it out, with packing and padding_free"
        found.append(argument("attn_impl", f"{problem} (got {shorten(args['attn_impl'])})"))
    # Without it each rank believes in a world of one and trains alone, exit status 0.
    args["use_cpu"] = True
    args.setdefault("ddp_backend", "gloo")
    args.setdefault("torch_dtype", "bfloat16")
    if args["torch_dtype"] == "float32":
        args.setdefault("fp16", False)
        args.setdefault("bf16", False)
    if args.get("deepspeed"):
        setting.files[PLUGIN_NAME] = PLUGIN
        plugins = args.get("external_plugins") or []
        plugins = [plugins] if isinstance(plugins, str) else list(plugins)
        args["external_plugins"] = [f"{{job_dir}}/{PLUGIN_NAME}", *plugins]
    return found
