"""What is made of a checkpoint once the training is over: a merged or quantized model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from swift_provider.config.values import StrictModel

_NO_MODEL = "what it makes is no model in Hugging Face form, which is what is checked and mirrored"
#: Arguments of ``swift export`` that follow from the run, or that make something else than a model.
OWNED_EXPORT_ARGUMENTS = {
    "model": "it follows from the recipe and the checkpoint",
    "adapters": "they follow from the checkpoint",
    "output_dir": "it follows from the cluster and the run",
    "exist_ok": "what an earlier try left is removed first",
    "push_to_hub": "the result goes to checkpoints.backup",
    "to_cached_dataset": _NO_MODEL,
    "to_ollama": _NO_MODEL,
    "to_mcore": _NO_MODEL,
    "to_hf": "megatron commands save Hugging Face weights by themselves",
    "safe_serialization": "only safetensors can be proven to be whole",
}


class ExportSection(StrictModel):
    """``swift export`` of one checkpoint of the run, after its training."""

    args: dict[str, Any] = Field(description="arguments of `swift export` without the leading dashes")
    checkpoint: Literal["newest", "best"] = Field(
        default="newest", description="the newest whole checkpoint, or the best one by checkpoints.keep_best"
    )

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        problems = [f"{name}: leave it out, {why}" for name, why in OWNED_EXPORT_ARGUMENTS.items() if name in args]
        problems += [f"{name}: write it without dashes" for name in args if name.startswith("-")]
        if not (args.get("merge_lora") or args.get("quant_method")):
            problems.append("say what to make: merge_lora: true, or quant_method with quant_bits")
        if args.get("quant_method") not in (None, "fp8") and not args.get("quant_bits"):
            problems.append(f"quant_bits: is needed with quant_method {args['quant_method']}")
        if args.get("quant_method") in ("awq", "gptq", "gptq_v2") and not args.get("dataset"):
            problems.append(f"dataset: quant_method {args['quant_method']} needs rows to calibrate with")
        if problems:
            raise ValueError("; ".join(problems))
        return args
