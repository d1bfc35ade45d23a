"""Command lines as guides show them → recipes."""

from __future__ import annotations

import contextlib
import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_provider.config import ConfigError, Recipe
from swift_provider.config.loading import parse
from swift_provider.importing.recipe import Imported, import_recipe
from swift_provider.importing.shell import Command, ShellError, commands_of


def imported(script: str) -> Imported:
    result = import_recipe(script, name="r", cluster="two")
    assert yaml.safe_load(result.yaml()) == result.recipe
    return result


def args_of(script: str) -> dict[str, Any]:
    result = imported(script)
    assert result.faults == []
    recipe = parse(Recipe, result.yaml(), "r.yaml", {})
    return dict(recipe.swift.args)


# 多机多卡：每台机器上运行同样的命令，只有 NODE_RANK 不同
TWO_NODES = r"""
#!/bin/bash
# 主节点
nnodes=2
nproc_per_node=8

export NCCL_SOCKET_IFNAME=eth0
export NCCL_IB_DISABLE=0
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NNODES=$nnodes \
NODE_RANK=0 \
MASTER_ADDR=127.0.0.1 \
MASTER_PORT=29500 \
NPROC_PER_NODE=$nproc_per_node \
MODELSCOPE_CACHE='/mnt/nas/cache' \
swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --train_type full \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#20000' \
              'swift/self-cognition#500' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node / $nnodes) \
    --eval_steps 100 \
    # --packing true \
    --save_total_limit 2 \
    --output_dir output \
    --system '你是一个 "有用" 的助手 #1' \
    --deepspeed zero2 > train.log 2>&1 &
"""


def test_two_nodes_by_environment() -> None:
    result = imported(TWO_NODES)
    assert result.faults == []
    recipe = result.recipe
    assert recipe["swift"]["env"] == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "0",
        "MODELSCOPE_CACHE": "/mnt/nas/cache",
    }
    assert recipe["swift"]["args"] == {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "tuner_type": "full",
        "dataset": ["AI-ModelScope/alpaca-gpt4-data-zh#20000", "swift/self-cognition#500"],
        "torch_dtype": "bfloat16",
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-5,
        "gradient_accumulation_steps": 2,
        "eval_steps": 100,
        "system": '你是一个 "有用" 的助手 #1',
        "deepspeed": "zero2",
    }
    assert recipe["checkpoints"] == {"keep_last": 2}
    notes = "\n".join(result.notes)
    for said in ("train_type: is called tuner_type", "MASTER_ADDR=127.0.0.1: left out", "output_dir output: left out"):
        assert said in notes
    assert "slots and gpus" in notes


def test_deepspeed_with_a_hostfile() -> None:
    result = imported(
        "deepspeed --hostfile=./hostfile --include 'node1:0,1@node2' --master_port 29501 --no_local_rank \\\n"
        "  swift/cli/sft.py --model /models/Qwen2.5-7B --dataset /data/train.jsonl \\\n"
        "  --sft_type lora --lora_target_modules ALL --dtype bf16 --deepspeed default-zero3 --batch_size 2"
    )
    assert result.faults == []
    assert result.recipe["swift"]["args"] == {
        "model": "/models/Qwen2.5-7B",
        "dataset": ["/data/train.jsonl"],
        "tuner_type": "lora",
        "target_modules": ["all-linear"],
        "torch_dtype": "bfloat16",
        "deepspeed": "zero3",
        "per_device_train_batch_size": 2,
    }
    notes = "\n".join(result.notes)
    assert "swift-provider hostfile import ./hostfile" in notes
    assert "parameter nodes: ['node1:0,1@node2']" in notes
    assert "--deepspeed default-zero3: is deepspeed: zero3 today" in notes


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nproc_per_node=8 --nnodes=$WORLD_SIZE --node_rank $RANK --master_addr=$ADDR swift/cli/sft.py",
        "python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 swift/cli/sft.py",
        "NNODES=$WORLD_SIZE NODE_RANK=$RANK swift sft",
        "torchrun --standalone --nproc_per_node 8 -m swift.cli.sft",
        "deepspeed --hostfile h --module swift.train sft",
        "deepspeed --num_gpus 8 --module swift.cli.sft",
        "accelerate launch --dynamo_backend no --machine_rank 0 --num_machines 2 --multi_gpu swift/cli/sft.py",
        "nohup python -u src/llm_sft.py",
        "PYTHONPATH=../../.. CUDA_VISIBLE_DEVICES=0,1 nohup python3 -m swift.cli.main sft",
        "srun -N 2 --gres=gpu:8 swift sft",
        "cd /root/ms-swift && source activate swift && /opt/conda/bin/swift sft",
        "ssh node1 'true'; time sudo swift sft",
        "if [ 1 ]; then swift sft",
    ],
)
def test_every_way_to_start_it(start: str) -> None:
    args = args_of(f"{start} --model /m --dataset /d.jsonl --max_steps=10 --seed -1 --packing --bf16 true")
    assert args == {"model": "/m", "dataset": ["/d.jsonl"], "max_steps": 10, "seed": -1, "packing": True, "bf16": True}


def test_megatron_of_the_third_version() -> None:
    result = imported(
        "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=8 \\\nmegatron sft \\\n"
        "  --load_safetensors true --save_safetensors true --model Qwen/Qwen3-30B-A3B --dataset /d.jsonl \\\n"
        "  --tp_degree 2 --ep_degree 8 --max_epochs 1 --save_interval 200 --save megatron_output/x \\\n"
        "  --use_flash_attn true --max_packed_length 8192 --num_workers 4"
    )
    assert result.recipe["swift"]["command"] == "megatron sft"
    assert result.recipe["swift"]["env"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert result.recipe["swift"]["args"] == {
        "save_safetensors": True,
        "model": "Qwen/Qwen3-30B-A3B",
        "dataset": ["/d.jsonl"],
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 8,
        "num_train_epochs": 1,
        "save_steps": 200,
        "attention_backend": "flash",
        "packing": True,
        "packing_length": 8192,
        "dataloader_num_workers": 4,
    }
    assert "load_safetensors true: is needed no more today" in "\n".join(result.notes)


def test_seed_flags_of_older_guides() -> None:
    result = imported(
        "swift sft --model m --dataset d --use_flash_attn true --log_to_wandb true --tensorboard_output_dir /tb"
        " --max_packed_length 4096"
    )
    assert result.faults == []
    assert result.recipe["swift"]["args"] == {
        "model": "m",
        "dataset": ["d"],
        "attn_impl": "flash_attn",
        "report_to": ["wandb"],
        "logging_dir": "/tb",
        "packing": True,
        "packing_length": 4096,
    }


START = "--model Qwen/Qwen2.5-7B-Instruct --dataset /d.jsonl"
BASE = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": ["/d.jsonl"]}


@pytest.mark.parametrize(
    ("script", "command", "args"),
    [
        (f"swift sft {START} --train_type lora", "sft", {"tuner_type": "lora"}),
        (
            f"NPROC_PER_NODE=8 NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 \\\nswift sft {START} \\\n"
            " --deepspeed zero3",
            "sft",
            {"deepspeed": "zero3"},
        ),
        (
            "torchrun --nproc_per_node 8 --nnodes 2 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500"
            f" swift/cli/sft.py {START} --sft_type full",
            "sft",
            {"tuner_type": "full"},
        ),
        (
            f"deepspeed --hostfile hostfile --master_port 29501 swift/cli/sft.py {START} --deepspeed default-zero2"
            " --tensorboard_output_dir /tb",
            "sft",
            {"deepspeed": "zero2", "logging_dir": "/tb"},
        ),
        (
            f"python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 swift/cli/pt.py {START} --streaming true"
            " --max_steps 100 --packing True --attn_impl flash_attn",
            "pt",
            {"streaming": True, "max_steps": 100, "packing": True, "attn_impl": "flash_attn"},
        ),
        (
            f"CUDA_VISIBLE_DEVICES=0,1,2,3 \\\nswift rlhf --rlhf_type dpo \\\n {START} --beta 0.1 --train_type lora",
            "rlhf",
            {"rlhf_type": "dpo", "beta": 0.1, "tuner_type": "lora"},
        ),
        (
            f"NPROC_PER_NODE=8 NNODES=2 NODE_RANK=0 megatron sft {START} --tp_degree 2 --pp_degree 4 --packing True"
            " --max_epochs 1 --save_interval 100 --save out --no_save_optim false",
            "megatron sft",
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "packing": True,
                "num_train_epochs": 1,
                "save_steps": 100,
                "no_save_optim": False,
            },
        ),
        (
            f"megatron rlhf --rlhf_type dpo {START} --context_parallel_size 2 --use_flash_attn true",
            "megatron rlhf",
            {"rlhf_type": "dpo", "context_parallel_size": 2, "attention_backend": "flash"},
        ),
        (
            f"torchrun --nproc_per_node 8 swift/cli/_megatron/sft.py {START} --ep_degree 4",
            "megatron sft",
            {"expert_model_parallel_size": 4},
        ),
        (
            f"swift sft {START} --sft_type lora --tuner_backend swift --template_type AUTO --dtype AUTO"
            " --train_dataset_sample -1 --lora_target_modules ALL --use_flash_attn false --save_total_limit 2",
            "sft",
            {"tuner_type": "lora", "target_modules": ["all-linear"]},
        ),
        (
            f"swift sft {START} --max_packed_length 4096 --use_flash_attn true --log_to_wandb True",
            "sft",
            {"packing": True, "packing_length": 4096, "attn_impl": "flash_attn", "report_to": ["wandb"]},
        ),
    ],
)
def test_commands_of_multi_node_guides(script: str, command: str, args: dict[str, Any]) -> None:
    result = imported(script)
    assert result.faults == []
    assert result.recipe["swift"]["command"] == command
    assert result.recipe["swift"]["args"] == {**BASE, **args}


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        ("--tp_degree 2", "only the megatron commands know it: tensor_model_parallel_size of `megatron sft`"),
        ("--check_dataset_strategy warning", "leave it out: rows that cannot be used are always told"),
        ("--train_dataset_sample 5000", "write dataset: [path#count]"),
        ("--dataset data/train.jsonl", "write the absolute path that it has on the nodes"),
        ("--deepspeed zero4", None),  # a value, which the plan refuses
        ("--max_steps lots", "swift.args.max_steps: must be a whole number (got 'lots')"),
        ("--lora_ranks 8", "did you mean 'lora_rank'?"),
    ],
)
def test_what_cannot_be_taken_over_is_explained(flag: str, fault: str | None) -> None:
    faults = imported(f"swift sft {START} {flag}").faults
    assert len(faults) == (fault is not None)
    assert fault is None or fault in faults[0]


def test_variables_of_the_script() -> None:
    args = args_of(
        'MODEL="/models/my model"\nEXTRA="--max_steps 5 --seed 1"\nDATA=${DATA:-/d.jsonl}\n'
        'swift sft --model "$MODEL" --dataset ${DATA}#10 $EXTRA --per_device_train_batch_size $((16 / 8))'
    )
    assert args == {
        "model": "/models/my model",
        "dataset": ["/d.jsonl#10"],
        "max_steps": 5,
        "seed": 1,
        "per_device_train_batch_size": 2,
    }


def test_what_is_left_to_mend_is_said() -> None:
    result = imported(
        "export WANDB_API_KEY=abcdef0123\nexport DIR=$(pwd)\nswift sft args.yaml --model $MODEL_PATH"
        " --dataset data/train.jsonl --lerning_rate 1 --deepspeed scripts/ds.json --train_dataset_sample 5"
        " --max_steps x"
    )
    faults = "\n".join(result.faults)
    for said in (
        "args.yaml: an argument file is not read",
        "--model $MODEL_PATH: nothing here says what the variable stands for",
        "model: is needed",
        "data/train.jsonl: write the absolute path",
        "did you mean 'learning_rate'",
        "write dataset: [path#count]",
        "max_steps: must be a whole number",
    ):
        assert said in faults
    assert "WANDB_API_KEY: left out, it looks like a secret" in "\n".join(result.notes)
    assert "abcdef0123" not in result.yaml() + "".join(result.notes) + faults
    assert "DIR=$(pwd): left out" in "\n".join(result.notes)
    assert result.recipe["swift"]["args"]["deepspeed"] == "ds.json"


def test_one_command_per_node_is_one_recipe() -> None:
    one = "NODE_RANK={} NNODES=2 swift sft --model m --dataset d\n"
    result = imported(one.format(0) + one.format(1))
    assert result.faults == []
    assert result.notes[0].startswith("2 commands found: took the same command")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("", "holds no training"),
        ("swift infer --model m", "holds no training"),
        ("ls -l\n", "holds no training"),
        ("swift sft --system 'a\n", "line 1: the quote ' does not end"),
        ('swift "', 'the quote " does not end'),
    ],
)
def test_what_is_no_training(script: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        import_recipe(script, name="r", cluster="c")


def test_the_shell_is_read_and_never_run() -> None:
    [command] = commands_of("A=1 B='x y' run \"a $A `date` $(rm -rf /)\" b\\ c 2>/dev/null >>log <in # end\n")
    assert command == Command(["run", "a $A `date` $(rm -rf /)", "b c"], {"A": "1", "B": "x y"})
    assert [c.words for c in commands_of("a;b&&c||d|e\nf&")] == [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]
    assert commands_of("a\xa0b\u3000c\r\n") == [Command(["a", "b", "c"])]


@given(
    st.lists(st.text(st.characters(blacklist_characters="\0\r\xa0\u3000", blacklist_categories=("Cs",)), min_size=1))
)
@settings(max_examples=300)
def test_quoted_words_come_back(words: list[str]) -> None:
    words = [word for word in words if "\n" not in word]
    found = commands_of("run " + shlex.join(words))
    assert found == [Command(["run", *words])]


@given(st.text(alphabet="ab=$(){}'\"\\ \n;&|><#`-12~*", max_size=60))
@settings(max_examples=500)
def test_any_text_is_split_or_refused(text: str) -> None:
    with contextlib.suppress(ShellError):
        commands_of(text)
