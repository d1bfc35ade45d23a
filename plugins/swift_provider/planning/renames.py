"""Names that older guides and versions use, and what became of them in the pinned ms-swift."""

from __future__ import annotations

from collections.abc import Mapping

#: For ``swift`` commands. A value is the new name, or a sentence where a name alone would mislead.
SWIFT: Mapping[str, str] = {
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "use_flash_attn": "write attn_impl: flash_attn instead of use_flash_attn: true",
    "log_to_wandb": "write report_to: [wandb] instead of log_to_wandb: true",
    "tensorboard_output_dir": "logging_dir",
    "max_packed_length": "write packing: true and packing_length (needs attn_impl: flash_attn)",
    "check_dataset_strategy": "leave it out: rows that cannot be used are always told",
    "model_id_or_path": "model",
    "model_id": "model",
    "custom_train_dataset_path": "dataset",
    "custom_val_dataset_path": "val_dataset",
    "train_dataset_sample": "write dataset: [path#count]",
    "dataset_test_ratio": "split_dataset_ratio",
    "template_type": "template",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lora_target_modules": "target_modules",
    "lora_dropout_p": "lora_dropout",
    "dtype": "torch_dtype",
    "quantization_bit": "quant_bits",
    "check_model_is_latest": "check_model",
    "deepspeed_config_path": "deepspeed",
    "preprocess_num_proc": "dataset_num_proc",
    "only_save_model": "save_only_model",
    "rlhf_loss_type": "loss_type",
    "tp_degree": "only the megatron commands know it: tensor_model_parallel_size of `megatron sft`",
    "pp_degree": "only the megatron commands know it: pipeline_model_parallel_size of `megatron sft`",
    "ep_degree": "only the megatron commands know it: expert_model_parallel_size of `megatron sft`",
}

#: For ``megatron`` commands: v3 names and those of guides.
MEGATRON: Mapping[str, str] = {
    "train_type": "tuner_type",
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "ep_degree": "expert_model_parallel_size",
    "cp_degree": "context_parallel_size",
    "save": "output_dir",
    "save_interval": "save_steps",
    "log_interval": "logging_steps",
    "eval_interval": "eval_steps",
    "max_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "load_safetensors": "leave it out: model takes safetensors as they are",
    "use_flash_attn": "write attention_backend: flash",
    "max_packed_length": "write packing: true and packing_length",
    "max_steps": "train_iters",
    "learning_rate": "lr",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "leave it out: it follows from global_batch_size and micro_batch_size",
    "save_only_model": "write no_save_optim: true",
    "gradient_checkpointing": "write recompute_granularity: full, selective or none",
    "deepspeed": "leave it out: Megatron shards by itself",
    "resume_from_checkpoint": "write mcore_model: <checkpoint> and finetune: false (saved with no_save_optim: false)",
    "tensorboard_output_dir": "tensorboard_dir",
}


def explain(command: str, name: str) -> str | None:
    """What became of an old argument name of ``command``; ``None`` where nothing is known."""
    new = (MEGATRON if command.startswith("megatron") else SWIFT).get(name)
    if new is None:
        return None
    return new if " " in new else f"is called {new} since"
