"""Read configs of prime-rl and write ours: one table of keys, and what needs more than a table.

Every layout that prime-rl has published is brought to the keys of its newest one (RENAMED), then each key is
looked up in TABLE. Invariant: no key is dropped without a note that names it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_config import BaseConfig

from ..ops.errors import UsageError, printable
from .evaluation import EvalConfig
from .loader import Tree, merge, model_in, read_file, to_toml
from .run import RunConfig
from .serving import ServeConfig
from .sft import SftConfig

TABLE = """
# The run
max_steps | max_steps
seq_len | training.seq_len, engine.max_model_len | each
model.name | model.name
model.vlm.* | - | | models are trained on text alone
model.trust_remote_code | - | off false | code that comes with a model is never run
tokenizer.* | - | | tokenizer and chat template are the model's own
run.name | name
run.dir | - | | a run is in output_dir/name
output_dir | output_dir
clean | clean
seed | seed
log.level | log.level | level
log.json_logging | log.json_lines
log.* | . | | one log file a node, and one line a step
ckpt | . | | checkpoints are always written
ckpt.interval | checkpoint.interval
ckpt.keep_last | checkpoint.keep_last
ckpt.keep_interval | checkpoint.keep_interval
ckpt.output_dir | - | | checkpoints are in output_dir/name
ckpt.skip_* | - | off false | a checkpoint is whole, and read whole
ckpt.* | . | | adapters are always exported by themselves; checkpoint.weights_interval exports weights
resume | resume | section
resume.step | resume.step | resume_step | -1 is the newest: `resume = true`
resume.dir | resume.dir
monitors.wandb | monitors.wandb | section
monitors.wandb.project | monitors.wandb.project
monitors.wandb.entity | monitors.wandb.entity
monitors.wandb.name | monitors.wandb.name
monitors.wandb.group | monitors.wandb.group
monitors.wandb.tags | monitors.wandb.tags
monitors.wandb.offline | monitors.wandb.offline
monitors.wandb.* | - | | metrics go there; samples are read by `primerl-node rollouts`
monitors.prime | - | | nearest: monitors.wandb, .tensorboard or .trackio
monitors.prime.* | - | | nearest: monitors.wandb, .tensorboard or .trackio
monitors.file.* | . | | metrics.jsonl is always written
heartbeat.* | - | | ask `primerl-node status --json`
metrics_server.* | - | | ask `primerl-node status --json`
weight_broadcast.* | . | | nodes fetch signed deltas from each other: no shared disk
rollout_transport.* | . | | workers send signed rollouts to the trainer
slurm.* | - | | job scripts to edit are in scripts/slurm
env_vars | - | table | set variables in the shell that starts the node
max_concurrent_runs | - | | a trainer has one run: start another trainer
dry_run | . | | say --dry-run
# GPUs
deployment.type | | raw deployment | single_node: `primerl-node rl`; multi_node: `train`, and `join` on each
    inference node
deployment.num_train_gpus | launch.trainer_gpus | raw train_gpus | 1 and 1 are left out; `sft`:
    training.fsdp.ranks
deployment.num_infer_gpus | launch.inference_gpus | raw infer_gpus
deployment.gpus_per_node | training.fsdp.ranks | raw gpus_per_node
deployment.num_train_nodes | ~ training.fsdp.nodes | raw train_nodes | set training.fsdp.rendezvous, too,
    and start the ranks that the trainer prints
deployment.num_infer_nodes | - | | start `primerl-node join` on each inference node
deployment.num_infer_replicas | - | | start `primerl-node join` on each inference node
deployment.nodes_per_fsdp_group | training.fsdp.replicas | raw nodes_per_group | num_train_nodes /
    nodes_per_fsdp_group
deployment.num_gpus | . | | engine.tp x engine.dp, counted by itself
inference.deployment.* | - | | start `primerl-node join` on each node; no engine is split in prefill and
    decode
deployment.* | - | | prefill and decode in two engines would take a new version at different moments
deployment.trainer_gpu_ids | launch.trainer_gpus | gpu_names
deployment.inference_gpu_ids | launch.inference_gpus | gpu_names
# Trainer
trainer.model.seq_len | training.seq_len
trainer.model.ac | training.activation_checkpointing | table checkpointing | of each layer, full or
    selective; prime-rl's default is full, ours none
trainer.model.ac_offloading | - | table off null | no activations in the host's memory; nearest:
    training.activation_checkpointing
trainer.model.compile | training.compile | table switch
trainer.model.fsdp_cpu_offload | - | off false | nearest: training.optimizer_offload
trainer.model.optim_cpu_offload | training.optimizer_offload
trainer.model.full_offload | ~ training.optimizer_offload | table raw full_offload | moments alone are in
    the host's memory; masters and gradients stay on the GPU
trainer.model.reshard_after_forward | training.fsdp.reshard_after_forward
trainer.model.dp_replicate | training.fsdp.replicas
trainer.model.ep | training.expert_parallel | raw ep | all ranks share the experts, or none
trainer.model.cp | training.context_parallel
trainer.model.cp_style | | off "ulysses" | heads are divided among ranks (ulysses); there is no ring
trainer.model.impl | . | | layers are transformers' own, attention and head ours
trainer.model.attn | . | | the fastest kernel that agrees with plain attention
trainer.model.optimization_dtype | - | off "float32" | masters and moments are fp32; training.dtype is that
    of forward and backward
trainer.model.reduce_dtype | - | off "float32" | gradients are added in fp32
trainer.model.fused_lm_head_token_chunk_size | training.head_chunk | head_chunk
trainer.model.freeze_moe_router | training.freeze_router
trainer.model.moe_* | . | | transformers' grouped matrix products
trainer.model.ep_comm_backend | . | | torch's
trainer.model.deepep_* | . | | torch's all-to-all, without DeepEP
trainer.model.conversion_dir | . | | nothing is converted
trainer.model.quantization.* | - | | trained in bfloat16 or float32
trainer.model.fp8 | - | off false | trained in bfloat16 or float32
trainer.model.index_cache.* | - | | sparse attention is not trained
trainer.model.debug.* | - | | nearest: [model.create], a small model made here
trainer.model.lora | training.lora | section
trainer.model.lora.rank | training.lora.rank
trainer.model.lora.alpha | training.lora.alpha
trainer.model.lora.target_modules | training.lora.target_modules | lora_modules
trainer.model.lora.dropout | - | off 0 0.0 | adapters drop nothing
trainer.model.lora.modules_to_save | - | off [] | adapters alone are trained
trainer.loss.type | training.loss.type | map default=dppo_kl ipo=ipo custom=custom sft=ce | others:
    docs/algorithms.md
trainer.loss.dppo_mask_low | training.loss.dppo_mask_low
trainer.loss.dppo_mask_high | training.loss.dppo_mask_high
trainer.loss.adv_tau | training.loss.adv_tau
trainer.loss.kl_tau | training.loss.kl_tau
trainer.loss.ipo_threshold | training.loss.ipo_threshold
trainer.loss.import_path | training.loss.custom | import_path
trainer.loss.kwargs | training.loss.custom_args | table
trainer.loss.* | - | | see docs/algorithms.md for the options that there are
trainer.optim.type | training.optimizer | map adamw=adamw muon=muon | the optimizers are adamw and muon
trainer.optim.lr | training.lr
trainer.optim.weight_decay | training.weight_decay
trainer.optim.max_norm | training.max_norm
trainer.optim.betas1 | training.betas | raw beta1
trainer.optim.betas2 | training.betas | raw beta2
trainer.optim.mu | training.muon_momentum
trainer.optim.* | - | | of sgd: the optimizers are adamw and muon
trainer.scheduler.type | training.scheduler
trainer.scheduler.warmup_steps | training.warmup_steps
trainer.scheduler.min_lr | training.min_lr_ratio | raw min_lr | min_lr / lr
trainer.scheduler.decay_steps | - | | the rate falls from the warm-up to max_steps
trainer.data.fake.* | - | | no fake batches: `python scripts/bench/trainer.py`
trainer.dist_timeout_seconds | training.fsdp.timeout_s
trainer.enable_router_replay | training.enable_router_replay
trainer.enable_token_export | - | off false | nearest: rollouts.keep, `primerl-node rollouts`
trainer.matmul_precision | . | | TF32 where a GPU has it
trainer.gc.* | . | | Python's own
trainer.memory_profiler_path | - | | `primerl-node doctor` plans the memory
trainer.trace_path | - | | no profiler is attached
# Orchestrator
orchestrator.batch_size | rollouts.groups_per_batch | raw batch_size | batch_size / group_size, rounded up
orchestrator.token_batch_size | - | | a batch is counted in groups
orchestrator.group_size | rollouts.group_size
orchestrator.max_off_policy_steps | rollouts.max_off_policy_steps
orchestrator.max_async_level | ~ rollouts.max_off_policy_steps | | it bounds the age of a rollout when it is
    trained
orchestrator.seq_len | engine.max_model_len
orchestrator.concurrency.initial_inflight | ~ engine.concurrency.initial_inflight | | of each worker, not of
    all together
orchestrator.concurrency.min_inflight | ~ engine.concurrency.min_inflight | | of each worker, not of all
    together
orchestrator.concurrency.max_inflight | ~ engine.concurrency.max_inflight | | of each worker, not of all
    together
orchestrator.oversampling_factor | - | | workers run ahead as far as they are fast
orchestrator.tasks_per_minute | - | | no task is held back
orchestrator.algo.type | training.advantage, training.loss.type | algorithm | grpo, max_rl; opd is
    training.loss.type reverse_kl
orchestrator.algo.length_penalty.type | training.advantage | raw length_penalty | linear is grpo_length
orchestrator.algo.length_penalty.num_output_tokens_weight | training.length_penalty.num_output_tokens_weight
orchestrator.algo.length_penalty.num_input_tokens_weight | training.length_penalty.num_input_tokens_weight
orchestrator.algo.length_penalty.num_turns_weight | training.length_penalty.num_turns_weight
orchestrator.algo.teacher.name | ~ training.loss.reference | | download it: a teacher is a directory here,
    and computes in the trainer
orchestrator.algo.teacher.* | . | | a teacher computes in the trainer
orchestrator.algo.sampling.* | - | | rollouts are always the policy's own
orchestrator.algo.* | - | | of an algorithm that is not here (docs/algorithms.md)
orchestrator.advantage.* | - | off false | see docs/algorithms.md
orchestrator.train.filter_zero_advantages | training.filter_zero_advantages
orchestrator.filters | training.filter_zero_advantages | filters | the filter zero_advantage; there is none
    of gibberish or repetition
orchestrator.buffer.online_difficulty_filtering | training.filter_zero_advantages
orchestrator.buffer.* | - | | tasks are leased in order; only groups without a signal are left out
orchestrator.train.sampling.temperature | sampling.temperature
orchestrator.train.sampling.max_completion_tokens | sampling.max_tokens | raw max_tokens | without it, what
    the longest sequence leaves
orchestrator.train.sampling.* | - | | the seed of a lease fixes each token: temperature alone is free
orchestrator.renderer.name | . | | prompts are made by the model's chat template
orchestrator.renderer.* | - | | prompts are made by the model's chat template
orchestrator.eval.interval | evaluation.interval
orchestrator.eval.num_examples | evaluation.environments[].prompts | raw prompts
orchestrator.eval.group_size | evaluation.environments[].samples | raw samples
orchestrator.eval.sampling.* | - | | evaluations beside training sample as it does
orchestrator.eval.* | - | | the first version and the last are always evaluated
orchestrator.val.interval | evaluation.interval
orchestrator.val.num_examples | evaluation.prompts
orchestrator.val.* | - | | see evaluation
orchestrator.model.lora.name | . | | adapters have no name
orchestrator.model.lora.* | - | | one run has one adapter: [training.lora]
orchestrator.client.* | . | | workers dial the trainer, by its ticket
orchestrator.env_server_base_port | . | | each node has its own environment
orchestrator.collect_inference_metrics | . | | workers report by themselves
orchestrator.inference_metrics_roles | . | | workers report by themselves
orchestrator.num_train_workers | . | | packing is the trainer's
orchestrator.pad_to_multiple_of | . | | packing is the trainer's
orchestrator.use_token_client | . | | requests are always tokens
orchestrator.trajectory_strategy | . | | a broken prefix starts a new sample
orchestrator.pool_size | . | | an environment has one process
# Environments (`[[orchestrator.train.source]]`, `[[orchestrator.eval.source]]`)
source.env.taskset.id | environment.id | | without owner and `-v1`; bundled or installed on every node
    (docs/environments.md)
source.env.taskset.* | environment.args
source.name | environments[].name, evaluation.environments[].name
source.ratio | environments[].ratio | | of several
source.group_size | rollouts.group_size, environments[].group_size, evaluation.environments[].samples
source.num_examples | evaluation.environments[].prompts
source.interval | evaluation.environments[].interval
source.curriculum | training.curriculum.gates | gate | one curriculum for all environments; the sampler
    difficulty_pool needs num_tasks beside it (training.curriculum.sampler)
source.algo | - | | one algorithm a run; nearest: environments[].advantage
source.sampling | - | | one temperature a run; nearest: environments[].sampling.max_tokens
source.env.AGENT.harness.id | | off "null" | null alone: no agent of its own runs beside the model
source.env.AGENT.runtime.type | | off "subprocess" | subprocess alone, in the node's sandbox: nodes start no
    containers
source.env.AGENT.timeout.* | - | | nearest: environment.timeout_s, for the environment's own code between
    two turns
source.env.AGENT.* | - | | no agent of its own runs beside the model
source.* | - | | environments run in a process of each node (docs/environments.md)
# Inference
inference.vllm.max_model_len | engine.max_model_len | raw max_model_len
inference.vllm.tensor_parallel_size | engine.tp
inference.vllm.pipeline_parallel_size | engine.pp
inference.vllm.data_parallel_size | engine.dp
inference.vllm.data_parallel_* | . | | engines have no ports between them
inference.vllm.max_num_seqs | engine.max_batch
inference.vllm.dtype | engine.dtype | map auto=bfloat16 bfloat16=bfloat16 float32=float32 | bfloat16 (auto)
    or float32
inference.vllm.api_server_count | . | | requests come from the node itself
inference.vllm.seed | . | | the lease's seed fixes each token
inference.vllm.enable_lora | . | | adapters are merged into the engine's weights
inference.vllm.max_lora* | . | | adapters are merged into the engine's weights
inference.vllm.max_cpu_loras | . | | adapters are merged into the engine's weights
inference.vllm.lora_target_modules | . | | adapters are merged into the engine's weights
inference.vllm.tool_call_parser | api.tool_call_parser | | of `inference`; a run calls no tools
inference.vllm.reasoning_parser | api.reasoning_parser | | of `inference`; a run keeps thoughts as text
inference.vllm.enable_auto_tool_choice | . | | see api.tool_call_parser
inference.vllm.trust_remote_code | - | off false | code that comes with a model is never run
inference.vllm.chat_template | - | | the model's own is used
inference.vllm.quantization | - | off null | every run audits, and other numbers would fail every audit
inference.vllm.enable_eplb | - | off false | experts stay where an update finds them
inference.vllm.enable_dbo | - | off false | every run audits, and other numbers would fail every audit
inference.vllm.enable_return_routed_experts | . | | training.enable_router_replay switches it on in every worker
inference.vllm.rope_scaling | - | | the run's model decides that
inference.vllm.* | engine.vllm.* | | all other arguments of vLLM's engine
inference.server.host | api.host
inference.server.port | api.port
inference.server.* | . | | the node watches its engine
inference.router.* | . | | leases go to whoever has room; `inference` has one engine
inference.backend_port | . | | engines listen on no port
inference.use_deep_gemm | - | off false | every run audits, and other numbers would fail every audit
inference.enable_fp32_lm_head | - | off false | every run audits, and other numbers would fail every audit
inference.kv_cache_offload.* | - | | nearest: engine.vllm.kv_offloading_backend = "native"
inference.use_pd_kv_transfer | . | | no engine is split in prefill and decode
# Supervised fine-tuning (`sft`)
data.name | data.hub | | or data.files, where it is a path
data.subsets | data.subset | only_one
data.splits | data.split | only_one
data.batch_size | batch_size
data.seq_len | training.seq_len
data.shuffle | data.shuffle
data.seed | seed
data.type | | off "sft" | sft alone: no fake data, give data.files
data.fake.* | - | | no fake data: give data.files
data.probabilities | - | | one data set
data.stopping_strategy | - | | one data set
data.micro_batch_size | . | | rows are packed into training.seq_len
data.num_workers | . | | rows are read beside the steps
data.pack_function | . | | rows are packed into training.seq_len
data.loss_mask | data.loss_roles | table roles
renderer.name | data.renderer | renderer | default is template
renderer.* | - | | the renderer's own defaults
val.interval | validation.interval
val.data.splits | validation.split | only_one
val.* | - | | nearest: validation.files, .split or .fraction
eval.* | - | | measure its weights afterwards: `primerl-node eval`
# Evaluation (`evals`)
eval.model | endpoints[].model
eval.client.base_url | endpoints[].url
eval.client.api_key_var | endpoints[].key_variable
eval.client.extra_body | endpoints[].options
eval.concurrency.max_inflight | endpoints[].concurrency
eval.sampling.max_completion_tokens | sampling.max_tokens
eval.sampling.extra_body | endpoints[].options
eval.num_examples | environments[].prompts
eval.group_size | environments[].samples
# Of 2025, trainer (`src/zeroband/train.py`)
train_2025.model.name | model.name
train_2025.optim.batch_size | rollouts.groups_per_batch | raw batch_size
train_2025.optim.step_per_rollout | - | | one step a batch, made while others are trained:
    rollouts.max_off_policy_steps
train_2025.optim.optim.lr | training.lr
train_2025.optim.optim.weight_decay | training.weight_decay
train_2025.optim.optim.betas1 | training.betas | raw beta1
train_2025.optim.optim.betas2 | training.betas | raw beta2
train_2025.optim.grad_norm_clip | training.max_norm
train_2025.optim.warmup_steps | training.warmup_steps
train_2025.optim.total_steps | max_steps
train_2025.stop_after_steps | max_steps
train_2025.max_async_level | rollouts.max_off_policy_steps
train_2025.train.micro_bs | . | | rows are packed into training.seq_len
train_2025.train.ac_ckpt | training.activation_checkpointing | checkpointing
train_2025.train.reshard_after_forward | training.fsdp.reshard_after_forward
train_2025.train.torch_compile | training.compile
train_2025.train.* | . | | layers are transformers' own, attention and head ours
train_2025.data.seq_length | training.seq_len, engine.max_model_len | each
train_2025.data.ignore_zero_advantages | training.filter_zero_advantages
train_2025.data.fake | - | off false | no fake batches: `python scripts/bench/trainer.py`
train_2025.data.* | . | | workers send signed rollouts to the trainer
train_2025.ckpt.* | . | | checkpoints are always written, weights travel by themselves
train_2025.collate_mode | . | | rows are packed into training.seq_len
train_2025.normalize_batch_to_token_count | . | | losses are means over tokens
train_2025.recompute_logprobs | . | | workers' logprobs are proved
train_2025.grpo.off_policy.type | training.loss.type | map clip=grpo_two_sided ratio=reinforce |
    grpo_two_sided is the default; others: docs/algorithms.md
train_2025.grpo.off_policy.epsilon_low | training.loss.clip_low
train_2025.grpo.off_policy.epsilon_high | training.loss.clip_high
train_2025.grpo.off_policy.clip_ratio | training.loss.clip_ratio_max
train_2025.grpo.kl_coef | training.loss.ref_kl_tau
train_2025.grpo.* | - | off 0 | there is no bonus for entropy
train_2025.monitor.* | - | | metrics are in outputs/NAME/metrics.jsonl alone
train_2025.project | - | | metrics are in outputs/NAME/metrics.jsonl alone
train_2025.wandb | . | | metrics are in outputs/NAME/metrics.jsonl alone
# Of 2025, worker (`src/zeroband/infer.py`)
infer_2025.model.name | model.name
infer_2025.model.max_model_len | engine.max_model_len | raw max_model_len
infer_2025.model.enforce_eager | engine.vllm.enforce_eager
infer_2025.model.* | - | | prompts are made by the model's chat template
infer_2025.data.name | environment.id, environment.args | raw dataset | simple-math, intellect-math, or
    math-env with its columns
infer_2025.data.difficulty_filtering | environment.args | table raw difficulty | difficulty_key,
    min_avg_reward, max_avg_reward
infer_2025.data.* | - | | the whole data set is asked
infer_2025.rewards.len_reward | environment.args.len_reward | table raw len_reward
infer_2025.rewards.* | - | off true | rewards are computed, and again by the trainer
infer_2025.max_batch_size | engine.max_batch
infer_2025.batch_size | - | | the engine decides: engine.max_batch bounds it
infer_2025.sampling.n | rollouts.group_size
infer_2025.sampling.temperature | sampling.temperature
infer_2025.sampling.max_tokens | sampling.max_tokens | raw max_tokens
infer_2025.sampling.* | - | off 0 1.0 -1 | the seed of a lease fixes each token: temperature alone is free
infer_2025.parallel.tp | engine.tp
infer_2025.parallel.dp | engine.dp
infer_2025.parallel.pp.* | - | | a worker's own: `primerl-node join --pp.rank`
infer_2025.max_steps | max_steps | each
infer_2025.toploc.* | . | | every rollout is proved (docs/proofs.md)
infer_2025.toploc | . | | every rollout is proved (docs/proofs.md)
infer_2025.rl.* | . | | weights travel by themselves
infer_2025.rl | . | | weights travel by themselves
infer_2025.rollout_path | . | | workers send signed rollouts to the trainer
infer_2025.clean_rollout_path | . | | workers send signed rollouts to the trainer
infer_2025.output_path | . | | workers send signed rollouts to the trainer
infer_2025.max_samples | - | | the whole data set is asked
infer_2025.syn2 | - | | rollouts without a trainer are not made
infer_2025.use_tqdm | . | | there is a live view
infer_2025.monitor.* | - | | metrics are in outputs/NAME/metrics.jsonl alone
"""
"""prime-rl's key | ours | how its value is converted | remark; a line that is indented goes on.

`.*` is for all keys below that have no line of their own. Ours is `-` where there is no counterpart, `.` where
none is needed, and begins with `~` where the nearest does not do quite the same. The third column: _reader.
"""

OLDER_NAMES = """
trainer_gpu_ids | deployment.trainer_gpu_ids
inference_gpu_ids | deployment.inference_gpu_ids
clean_output_dir | clean
ckpt.resume_step | resume.step
wandb.* | monitors.wandb.*
orchestrator.prime_monitor.* | monitors.prime.*
orchestrator.prime_monitor | monitors.prime
max_async_level | orchestrator.max_async_level
trainer.max_async_level | orchestrator.max_async_level
orchestrator.rollouts_per_example | orchestrator.group_size
orchestrator.max_inflight_episodes | orchestrator.concurrency.max_inflight
orchestrator.max_inflight_rollouts | orchestrator.concurrency.max_inflight
orchestrator.max_concurrent | orchestrator.concurrency.max_inflight
orchestrator.sampling.max_tokens | orchestrator.train.sampling.max_completion_tokens
orchestrator.sampling.* | orchestrator.train.sampling.*
orchestrator.eval.rollouts_per_example | orchestrator.eval.group_size
orchestrator.advantage.type | orchestrator.algo.type
orchestrator.training_mode | orchestrator.algo.type
orchestrator.teacher.model.name | orchestrator.algo.teacher.name
orchestrator.teacher.* | orchestrator.algo.teacher.*
orchestrator.teacher_rollout_model.* | orchestrator.algo.sampling.source.*
orchestrator.post_batch_filters | orchestrator.filters
orchestrator.pre_batch_filters | orchestrator.filters
orchestrator.student.model.name | orchestrator.model.name
orchestrator.model.client.* | orchestrator.client.*
orchestrator.lora_name | orchestrator.model.lora.name
orchestrator.optim.lr | trainer.optim.lr
inference.vllm_extra.* | inference.vllm.*
inference.model.* | inference.vllm.*
inference.parallel.tp | inference.vllm.tensor_parallel_size
inference.parallel.dp | inference.vllm.data_parallel_size
inference.api_server_count | inference.vllm.api_server_count
inference.dtype | inference.vllm.dtype
inference.enable_dbo | inference.vllm.enable_dbo
inference.enable_eplb | inference.vllm.enable_eplb
inference.enable_expert_parallel | inference.vllm.enable_expert_parallel
inference.enable_lora | inference.vllm.enable_lora
inference.enable_prefix_caching | inference.vllm.enable_prefix_caching
inference.enable_return_routed_experts | inference.vllm.enable_return_routed_experts
inference.gpu_memory_utilization | inference.vllm.gpu_memory_utilization
inference.max_lora_rank | inference.vllm.max_lora_rank
inference.max_loras | inference.vllm.max_loras
inference.quantization | inference.vllm.quantization
inference.seed | inference.vllm.seed
train_2025.model_name | train_2025.model.name
infer_2025.model_name | infer_2025.model.name
infer_2025.max_model_len | infer_2025.model.max_model_len
infer_2025.enforce_eager | infer_2025.model.enforce_eager
infer_2025.dataset | infer_2025.data.name
infer_2025.difficulty_filtering | infer_2025.data.difficulty_filtering
infer_2025.len_reward | infer_2025.rewards.len_reward
infer_2025.tp | infer_2025.parallel.tp
infer_2025.dp | infer_2025.parallel.dp
"""
"""Older names of keys | the newest."""

Component = Literal[
    "rl", "trainer", "orchestrator", "inference", "sft", "eval", "train_2025", "infer_2025"
]
Kind = Literal["same", "differs", "needless", "missing"]
COMMANDS: Mapping[str, type[BaseConfig]] = {
    "rl": RunConfig,
    "train": RunConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
    "inference": ServeConfig,
}
"""What is written, by the command that reads it."""
MANY_STEPS = 1_000_000
"""For prime-rl's runs without max_steps, which end by hand."""
GPUS_PER_NODE = 8
"""prime-rl's default."""
MAX_NOTE = 400
"""Characters of a note."""
WHOLE = "table"
"""In the third column: a table or `None` is one value of this key."""


class Unconvertible(Exception):
    """A value without a counterpart of a key that has one; the text says why, if the remark does not."""


class Several(dict[str, Any]):
    """Keys of ours that one key of prime-rl's sets, where none of its own does. `_name` is for finish_*()."""


class Rule(NamedTuple):
    """One line of TABLE."""

    key: str
    kind: Kind
    ours: str
    remark: str
    convert: Callable[[Any], Any] | None
    whole: bool


# -- values ----------------------------------------------------------------------------------------


def _checkpointing(value: Any) -> str:
    if value is None or value is False:
        return "none"
    mode = value.get("mode", "full") if isinstance(value, Mapping) else "full"
    return "selective" if mode == "selective" else "full"


def _switch(value: Any) -> bool:
    """An optional section is on if it is there."""
    return value is not None and value is not False


def _section(value: Any) -> Tree:
    del value
    return {}


def _lora_modules(value: Any) -> list[str]:
    names = [name for name in _list(value) if name != "experts"]
    if not names:
        raise Unconvertible("adapters are for linear layers, by the last part of their names")
    return names


def _list(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else [value]


def _only_one(value: Any) -> Any:
    found = _list(value)
    if len(found) != 1:
        raise Unconvertible("one of one data set: write the others into files")
    return found[0]


def _import_path(value: Any) -> str:
    module, _, name = str(value).rpartition(".")
    return f"{module}:{name}"


def _head_chunk(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return value
    raise Unconvertible("logits are always made in pieces")


def _gate(value: Any) -> Any:
    gates = value.get("gates", {})
    rest = [name for name, gate in gates.items() if gate.get("type") != "advantage_range"]
    if rest or set(value) - {"gates"}:
        raise Unconvertible("")
    return gates


def _filters(value: Any) -> Any:
    filters = [cast(Tree, one) for one in _list(value) if isinstance(one, dict)]
    if [one for one in filters if one.get("type") != "zero_advantage"]:
        raise Unconvertible("")
    return Several({"training.filter_zero_advantages": any(one.get("enforce") for one in filters)})


def _level(value: Any) -> str:
    level = str(value).lower()
    nearest = {"trace": "debug", "success": "info", "warn": "warning", "critical": "error"}
    return nearest.get(level, level)


def _renderer(value: Any) -> Any:
    return "template" if value == "default" else value


def _roles(value: Any) -> list[str]:
    return [role for role, learned in value.items() if learned]


def _resume_step(value: Any) -> Any:
    return Several({"resume": {}}) if value == -1 else value


def _gpu_names(value: Any) -> str:
    return "".join(f"{one}," for one in _list(value))


ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "grpo": {"training.advantage": "grpo"},
    "max_rl": {"training.advantage": "max_rl"},
    "opd": {"training.loss.type": "reverse_kl"},
    "echo": {"training.advantage": "grpo", "training.loss.echo_alpha": 0.1},
}
OTHER_ALGORITHMS = {
    "sft": "trained as grpo: rollouts are the policy's own; primerl-node sft learns those of others",
    "opsd": "trained as grpo: a teacher reads what the student read (training.loss.reference)",
    "rae": "trained as grpo: one agent plays a rollout",
    "hierarchical_grpo": "trained as grpo: one agent plays a rollout",
}


def _algorithm(value: Any) -> Any:
    name = "grpo" if value in ("default", "rl") else str(value)
    if name not in ALGORITHMS:
        raise Unconvertible(OTHER_ALGORITHMS.get(name, "trained as grpo"))
    return Several(ALGORITHMS[name])


CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "algorithm": _algorithm,
    "checkpointing": _checkpointing,
    "filters": _filters,
    "gate": _gate,
    "gpu_names": _gpu_names,
    "head_chunk": _head_chunk,
    "import_path": _import_path,
    "level": _level,
    "lora_modules": _lora_modules,
    "only_one": _only_one,
    "renderer": _renderer,
    "resume_step": _resume_step,
    "roles": _roles,
    "section": _section,
    "switch": _switch,
}


# -- the table -------------------------------------------------------------------------------------


def _reader(how: str, ours: str) -> Callable[[Any], Any] | None:
    """The converter that a third column names.

    `raw NAME` keeps the value under that name, `each` sets all keys of ours, `map A=B ..` translates,
    `off V ..` loses nothing if the value is one of these, in JSON; other words are CONVERTERS.
    """
    word, _, rest = how.partition(" ")
    if not word:
        return None
    if word == "raw":
        return lambda value: Several({f"_{rest}": value})
    if word == "each":
        return lambda value: Several(dict.fromkeys(ours.split(", "), value))
    if word == "map":
        return _translator(dict(pair.split("=") for pair in rest.split()))
    if word == "off":
        return _nothing_but([json.loads(one) for one in rest.split()])
    return CONVERTERS[word]


def _translator(choices: Mapping[Any, Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value not in choices:
            raise Unconvertible("")
        return choices[value]

    return convert


def _nothing_but(neutral: list[Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value not in neutral:
            raise Unconvertible("")
        return Several()

    return convert


def _sections() -> dict[str, list[Rule]]:
    """The rules of TABLE by its headings."""
    found: dict[str, list[Rule]] = {}
    rules: list[Rule] = []
    for line in re.sub(r"\n +", " ", TABLE.strip()).splitlines():
        if line.startswith("# "):
            rules = found.setdefault(line[2:], [])
            continue
        cells = [cell.strip() for cell in line.split("|")]
        key, ours, how, remark = [*cells, "", "", ""][:4]
        kinds: Mapping[str, Kind] = {"-": "missing", ".": "needless", "~": "differs"}
        kind: Kind = kinds.get(ours[:1], "same")
        ours = ours if kind == "same" else ours[1:].strip()
        whole = how.startswith(WHOLE)
        convert = _reader(how.removeprefix(WHOLE).strip(), ours)
        rules.append(Rule(key, kind, ours, remark, convert, whole))
    return found


SECTIONS = _sections()
RULES: Mapping[str, Rule] = {rule.key: rule for rules in SECTIONS.values() for rule in rules}
RENAMED = [line.split(" | ") for line in OLDER_NAMES.strip().splitlines()]


def key_table() -> str:
    """All keys as Markdown, for the documentation."""
    marks = {"needless": "not needed: ", "differs": "not the same: ", "missing": "", "same": ""}
    lines: list[str] = []
    for title, rules in SECTIONS.items():
        lines += [f"### {title}", "", "| prime-rl | here | |", "|---|---|---|"]
        for rule in rules:
            ours = ", ".join(f"`{one}`" for one in rule.ours.split(", ") if one)
            ours = "-" if rule.kind == "missing" else ours
            lines.append(f"| `{rule.key}` | {ours} | {marks[rule.kind]}{rule.remark} |")
        lines.append("")
    lines += ["### Older names", "", "| older | newest |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED]
    return "\n".join(lines) + "\n"


# -- conversion ------------------------------------------------------------------------------------

SHARED = frozenset(
    """clean clean_output_dir ckpt deployment dry_run env_vars heartbeat log max_concurrent_runs max_steps
    metrics_server monitors output_dir resume rollout_transport run seed slurm tokenizer wandb
    weight_broadcast""".split()
)
"""Sections and keys that each component may say for itself; a run has them once."""
SHARED_MODEL = ("model.name", "model.vlm", "model.trust_remote_code")
LEARNER = frozenset(
    """dist_timeout_seconds enable_token_export gc loss matmul_precision memory_profiler_path model optim
    scheduler trace_path""".split()
)
"""Sections of sft.toml that are a trainer's."""
ENVIRONMENTS: Mapping[str, frozenset[str]] = {
    "reverse-text": frozenset({"seed", "min_len", "max_len"}),
    "alphabet-sort": frozenset(
        """seed min_turns max_turns min_names_per_turn max_names_per_turn
        task.similarity_power task.power_per_turn""".split()
    ),
    "math-env": frozenset(
        """seed dataset_name dataset_subset dataset_split dataset_revision dataset_shuffle dataset_seed
        question_key answer_key difficulty_key min_avg_reward max_avg_reward instruction_prompt
        len_reward""".split()
    ),
}
"""Bundled environments that prime-rl has, too, and the options of ours."""
OF_THE_TASK = frozenset({"similarity_power", "power_per_turn"})
"""Options that older releases had beside the others."""
NEAREST = {"wordle": "word-game", "gsm8k": "math-env with dataset_name openai/gsm8k"}
"""Bundled environments of the same kind."""
GENESYS = {
    "justus27/math-hendrycks-genesys-format": "simple-math",
    "PrimeIntellect/INTELLECT-2-only-math": "intellect-math",
}
WITH_LENGTHS = frozenset({"PrimeIntellect/INTELLECT-2-only-math"})
"""Their environment has target lengths, which prime-rl had only where they were asked for."""
GENESYS_COLUMNS = {
    "question_key": "prompt",
    "answer_key": "verification_info.ground_truth",
    "instruction_prompt": "",
}
"""The columns of the data sets of 2025."""


@dataclass(frozen=True)
class ImportNote:
    """What became of one key that was not simply converted."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_short(self.value)}"
        return printable(f"{self.key}{shown}: {self.reason}", MAX_NOTE)


@dataclass
class ImportedConfig:
    """A config of ours, and what it does not have of prime-rl's."""

    command: str
    """That reads it."""
    values: Tree = field(default_factory=dict[str, Any])
    missing: list[ImportNote] = field(default_factory=list[ImportNote])
    """Keys without a counterpart."""
    differs: list[ImportNote] = field(default_factory=list[ImportNote])
    """Keys whose counterpart does not do quite the same, and what prime-rl's defaults became."""
    needless: list[ImportNote] = field(default_factory=list[ImportNote])

    def toml(self, sources: Sequence[str], path: str) -> str:
        """The file, with what is missing as comments at its end."""
        head = [
            f"# Converted from prime-rl's {printable(', '.join(sources), MAX_NOTE)} by `primerl-node import`.",
            f"# primerl-node {self.command} @ {printable(path, MAX_NOTE)}",
            "",
        ]
        tail = [f"# {line}" for line in self.report()]
        return "\n".join([*head, to_toml(self.values), *tail]).rstrip() + "\n"

    def report(self) -> list[str]:
        """Everything that was not simply converted, line by line."""
        lines: list[str] = []
        for title, notes in (
            ("No counterpart:", self.missing),
            ("Converted, but not the same:", self.differs),
        ):
            if notes:
                lines += [title, *(f"  {note}" for note in notes)]
        if self.needless:
            keys = ", ".join(printable(note.key, MAX_NOTE) for note in self.needless)
            lines.append(f"Not needed here: {keys}")
        return lines


def read_configs(paths: Sequence[Path]) -> ImportedConfig:
    """Convert the files of one run of prime-rl, later ones over earlier ones.

    Raises UsageError: unreadable, not a config of prime-rl, or files of different programs.
    """
    trees: dict[Component, Tree] = {}
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no such file: {path}")
        tree = read_file(path)
        kind = component(tree, path.stem)
        if kind == "rl" and set(tree) <= SHARED and trees:
            kind = next(iter(trees))  # laid over whichever file came before
        if kind is None:
            raise UsageError(
                f"{path} is no config of prime-rl's rl, sft, trainer, orchestrator, inference or evals"
            )
        trees[kind] = merge(trees.get(kind, {}), tree)
    try:
        return _Conversion(trees, _title(paths[0])).result()
    except RecursionError as error:
        raise UsageError(f"{paths[-1]} has tables in tables without end: correct it") from error


def component(tree: Tree, stem: str) -> Component | None:
    """Whose config it is, by its keys, and by its name where these say nothing; None if nobody's."""
    keys = set(tree)
    data, train, optim = (_table(tree, name) for name in ("data", "train", "optim"))
    if keys & {"trainer", "orchestrator"}:
        return "rl"
    if {"micro_bs", "ac_ckpt"} & set(train) or {"optim", "step_per_rollout"} & set(optim):
        return "train_2025"
    worker = {
        "max_batch_size",
        "rewards",
        "syn2",
        "toploc",
        "clean_rollout_path",
        "rollout_path",
        "rl",
    }
    if keys & worker or {"model_name", "dataset"} <= keys:
        return "infer_2025"
    if keys & {
        "train",
        "source",
        "env",
        "group_size",
        "rollouts_per_example",
        "max_off_policy_steps",
    }:
        lists = isinstance(tree.get("env"), list) and not keys & {"batch_size", "train", "buffer"}
        if lists or "num_examples" in keys:
            return "eval"
        return None if set(tree) == {"env"} else "orchestrator"
    if "client" in keys or "client" in _table(tree, "eval") or isinstance(tree.get("model"), str):
        return "eval"
    if (data and "fake" not in data) or "sft" in stem:
        return "sft"
    if "sampling" in keys:
        return "orchestrator" if keys & {"batch_size", "max_async_level"} else "infer_2025"
    learns = {"optim", "scheduler", "loss", "data", "max_concurrent_runs", "dist_timeout_seconds"}
    if keys & learns or {"seq_len", "ac", "lora", "compile"} & set(_table(tree, "model")):
        return "trainer"
    if keys & {"inference"} or "train" in stem or (keys and keys <= SHARED):
        return "rl"
    known = {rule.split(".")[1] for rule in RULES if rule.startswith("inference.")}
    old = {name.split(".")[1] for name, _ in RENAMED if name.startswith("inference.")}
    return "inference" if keys & (known | old | {"model"}) else None


def _table(tree: Mapping[str, Any], name: str) -> Tree:
    value = tree.get(name)
    return cast(Tree, value) if isinstance(value, dict) else {}


def _title(path: Path) -> str:
    """A name for the run: the file's, or its directory's where that says more."""
    plain = path.stem.lower() in ("rl", "sft", "start", "resume", "train", "orch", "infer")
    name = path.resolve().parent.name if plain else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "imported"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _rule(name: str) -> Rule | None:
    """The rule of a key: its own, else the longest that covers it."""
    covering = (rule for key, rule in RULES.items() if key[-1] == "*" and name.startswith(key[:-1]))
    return RULES.get(name) or max(covering, key=lambda rule: len(rule.key), default=None)


def _renamed(name: str) -> str:
    """The newest name of a key."""
    for old, new in RENAMED:
        if name == old:
            return new
        if old.endswith("*") and name.startswith(old[:-1]):
            return _renamed(new[:-1] + name[len(old) - 1 :])
    return name


class _Conversion:
    """One conversion: keys of ours as they are set, and notes."""

    def __init__(self, trees: Mapping[Component, Tree], title: str) -> None:
        self._trees = trees
        self._title = title
        self._ours: dict[str, Any] = {}
        self._raw: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        self._config = ImportedConfig(_command(set(trees)))

    def result(self) -> ImportedConfig:
        """Convert all. Raises UsageError."""
        if self._config.command == "eval":
            self._evaluation(merge(self._trees.get("inference", {}), self._trees["eval"]))
        else:
            self._run()
        self._validate()
        return self._config

    # -- keys --------------------------------------------------------------------------------------

    def _run(self) -> None:
        flat = [one for kind, tree in self._trees.items() for one in self._flatten(kind, tree)]
        # a trainer's own keys come before those that are for all, and these before an engine's
        first = {"trainer": 0, "orchestrator": 1, "inference": 3}
        flat.sort(key=lambda one: first.get(one[0], 2))
        for _, shown, name, value in flat:
            self._key(shown, name, value)
        train, evaluated = self._sources()
        self._environments(train)
        self._evaluated(evaluated)
        _FINISH[self._config.command](self)

    def _flatten(
        self, kind: Component, tree: Mapping[str, Any], path: str = ""
    ) -> Iterator[tuple[str, str, str, Any]]:
        """(component, key as it is written, its newest name, value) of all but the sources."""
        for key, value in tree.items():
            shown = f"{path}{key}"
            owner = shown.partition(".")[0] if kind == "rl" else kind
            name = _canonical(kind, shown.replace("-", "_"))
            if name in SOURCES:
                continue
            rule = RULES.get(name)
            if isinstance(value, dict) and not (rule and (rule.whole or not value)):
                inside = cast(Tree, value)
                if not inside and not any(one.startswith(f"{name}.") for one in RULES):
                    yield owner, shown, name, value
                yield from self._flatten(kind, inside, f"{shown}.")
            else:
                yield owner, shown, name, None if value == "None" else value

    def _key(self, shown: str, name: str, value: Any) -> None:
        after = self._config.command == "sft" and name.startswith("eval.")
        rule = RULES["eval.*"] if after else _rule(name)
        if rule is None:
            self._note("missing", shown, value, "not known to be a key of prime-rl's")
            return
        if value is None and not rule.whole:
            return
        self._apply(rule, shown, name, value)

    def _apply(self, rule: Rule, shown: str, name: str, value: Any) -> None:
        ours = rule.ours
        if ours.endswith("*"):
            ours = ours[:-1] + name[len(rule.key) - 1 :]
        try:
            converted = rule.convert(value) if rule.convert else value
        except Unconvertible as error:
            self._note("missing", shown, value, str(error) or rule.remark)
            return
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"{shown} = {_short(value)} is no value that prime-rl has") from error
        if isinstance(converted, Several):
            self._set_several(shown, converted)
            if rule.kind == "differs" and value not in (None, False):
                self._note("differs", shown, value, rule.remark)
        elif rule.kind in ("needless", "missing"):
            self._note(rule.kind, shown, value, rule.remark)
        elif not has_key(COMMANDS[self._config.command], ours):
            elsewhere = f"`primerl-node {self._config.command}` has no {ours}"
            self._note("missing", shown, value, rule.remark or elsewhere)
        elif self._set(ours, converted, shown, value) and rule.kind == "differs":
            self._note("differs", shown, value, f"{ours}: {rule.remark}")

    def _set_several(self, shown: str, values: Several) -> None:
        for key, value in values.items():
            if key.startswith("_"):
                self._raw.setdefault(key[1:], value)
            elif key not in self._ours:
                self._ours[key] = value
                self._origin[key] = shown

    def _set(self, ours: str, value: Any, shown: str, given: Any) -> bool:
        if ours in self._ours and self._ours[ours] != value:
            self._note("missing", shown, given, f"{self._origin[ours]} says otherwise")
            return False
        self._ours[ours] = value
        self._origin[ours] = shown
        return True

    def _default(self, ours: str, value: Any) -> None:
        """What prime-rl does without this key."""
        self._ours.setdefault(ours, value)

    def _note(
        self, kind: Literal["missing", "differs", "needless"], key: str, value: Any, reason: str
    ) -> None:
        note, notes = ImportNote(key, value, reason), getattr(self._config, kind)
        if note not in notes:  # several files may say the same
            notes.append(note)

    # -- environments ------------------------------------------------------------------------------

    def _sources(self) -> tuple[list["_Source"], list["_Source"]]:
        """Sources to train on, and to evaluate."""
        found: dict[str, list[_Source]] = {"train": [], "eval": []}
        for kind, tree in self._trees.items():
            if kind not in ("rl", "orchestrator"):
                continue
            inner = _table(tree, "orchestrator") if kind == "rl" else tree
            start = "orchestrator." if kind == "rl" else ""
            for use, section, key in (
                ("train", "", "env"),
                ("train", "train", "env"),
                ("train", "train", "source"),
                ("eval", "eval", "env"),
                ("eval", "eval", "source"),
            ):
                where = _table(inner, section) if section else inner
                path = f"{start}{section}{'.' if section else ''}{key}"
                found[use] += [
                    _Source(f"{path}[{number}]", one)
                    for number, one in enumerate(_tables(path, where.get(key, [])))
                ]
        return found["train"], found["eval"]

    def _environments(self, sources: list["_Source"]) -> None:
        """The environments of a run: [environment], or [[environments]] where there are several."""
        if self._config.command not in ("rl", "train"):
            return
        if len(sources) > 1:
            self._ours["environments"] = [self._trained(one) for one in sources]
            return
        if not sources:
            if "dataset" in self._raw:
                self._dataset()
            elif "environment.id" not in self._ours:
                self._note("differs", "environment", None, "no environment is named: reverse-text")
            return
        first = sources[0]
        self._ours["environment.id"] = self._environment_id(first)
        if args := self._environment_args(first):
            self._ours["environment.args"] = args
        self._source_keys(first, {"group_size": "rollouts.group_size"})

    def _trained(self, source: "_Source") -> Tree:
        """One of several environments."""
        made: Tree = {"id": self._environment_id(source)}
        if args := self._environment_args(source):
            made["args"] = args
        for key in ("name", "ratio", "group_size"):
            if source.values.get(key) is not None:
                made[key] = source.values[key]
        self._source_keys(source, {})
        return made

    def _evaluated(self, sources: list["_Source"]) -> None:
        """The environments that are evaluated beside training."""
        if sources and self._config.command in ("rl", "train"):
            self._ours["evaluation.environments"] = [self._played(one) for one in sources]

    def _played(self, source: "_Source") -> Tree:
        """One environment of an evaluation."""
        made: Tree = {"id": self._environment_id(source)}
        if args := self._environment_args(source):
            made["args"] = args
        name = source.values.get("name")
        if name and name != made["id"]:
            made["name"] = name
        old = source.values.get("rollouts_per_example")
        samples = source.values.get("group_size", old or self._raw.get("samples", 1))
        prompts = source.values.get("num_examples", self._raw.get("prompts", -1))
        made["samples"] = samples
        if source.values.get("interval") and self._config.command in ("rl", "train"):
            made["interval"] = source.values["interval"]
        if prompts is not None and prompts != -1:
            made["prompts"] = prompts
        self._source_keys(source, {})
        return made

    def _environment_id(self, source: "_Source") -> str:
        name = source.id.rpartition("/")[2]
        plain = re.sub(r"[-_]v1$", "", name).replace("_", "-")
        if plain in ENVIRONMENTS:
            return plain
        if not name:
            raise UsageError(f"{source.path} names no environment: give env.taskset.id")
        near = NEAREST.get(plain)
        nearest = f"; bundled: {near}" if near else ""
        self._note(
            "differs",
            source.path,
            source.id,
            f"not bundled: install its package on every node (docs/environments.md){nearest}",
        )
        return name

    def _environment_args(self, source: "_Source") -> Tree:
        """The options of a taskset; of a bundled one those that ours has."""
        args = dict(source.args)
        plain = re.sub(r"[-_]v1$", "", source.id.rpartition("/")[2]).replace("_", "-")
        known = ENVIRONMENTS.get(plain)
        if known is None:
            return args
        task = dict(_table(args, "task"))
        task |= {key: args.pop(key) for key in OF_THE_TASK & set(args) if f"task.{key}" in known}
        args.pop("task", None)
        kept = {key: value for key, value in args.items() if key in known}
        inner = {key: value for key, value in task.items() if f"task.{key}" in known}
        for key, value in (*args.items(), *((f"task.{name}", one) for name, one in task.items())):
            if key not in known:
                self._note(
                    "missing", f"{source.path}.{key}", value, f"{plain} has no such option here"
                )
        return {**kept, "task": inner} if inner else kept

    def _source_keys(self, source: "_Source", several: Mapping[str, str]) -> None:
        """What a source says beside its taskset."""
        used = {"name", "num_examples", "rollouts_per_example", "group_size", "ratio", "interval"}
        for key, value in source.values.items():
            shown = f"{source.path}.{key}"
            if key in several:
                self._set_several(shown, Several({several[key]: value}))
            elif key not in used:
                rule = RULES.get(f"source.{key}") or RULES["source.*"]
                self._apply(rule, shown, f"source.{key}", value)
        if len(source.agents) > 1:
            self._note(
                "missing",
                f"{source.path}.env",
                ", ".join(source.agents),
                "one agent plays a rollout",
            )
        for agent, options in source.agents.items():
            for path, value in _leaves(options):
                rule = _rule(f"source.env.AGENT.{path}")
                if rule is not None and value not in (None, "None"):
                    self._apply(rule, f"{source.path}.{agent}.{path}", rule.key, value)

    def _dataset(self) -> None:
        """The data set of a worker of 2025 as an environment."""
        name = str(self._raw["dataset"])
        args: Tree = {}
        if name in GENESYS and ("len_reward" in self._raw) == (name in WITH_LENGTHS):
            self._ours["environment.id"] = GENESYS[name]
        elif "math" in name:
            self._ours["environment.id"] = "math-env"
            args = {"dataset_name": name, **GENESYS_COLUMNS}
        else:
            slug = re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].lower()).strip("-")
            self._ours["environment.id"] = slug
            self._note("missing", "data.name", name, f"no environment scores it: write {slug}")
            return
        lengths = self._raw.get("len_reward")
        if lengths is not None:
            args["len_reward"] = lengths
        bounds = _table(self._raw, "difficulty")
        for old, new in (
            ("solve_rate_field", "difficulty_key"),
            ("min_solve_rate", "min_avg_reward"),
            ("max_solve_rate", "max_avg_reward"),
        ):
            if old in bounds:
                args[new] = bounds[old]
        if args:
            self._ours["environment.args"] = args

    # -- what needs several keys -------------------------------------------------------------------

    def finish_run(self) -> None:
        """Batches, lengths, schedules and GPUs of a run."""
        self._default("name", self._title)
        self._default("engine.type", "vllm")
        self._default("engine.dtype", "bfloat16")
        self._default("evaluation.prompts", 0)  # before and after, which prime-rl does not
        if {"train_2025", "infer_2025"} & set(self._trees):
            self._default("training.advantage", "grpo_std")
            self._default("training.loss.type", "grpo_two_sided")
            self._default("training.lr", 4e-4 if "train_2025" in self._trees else 1e-6)
            self._default("rollouts.group_size", 8)
        self._batch()
        self._lengths()
        self._learner()
        self._gpus()
        if self._raw.get("length_penalty"):
            self._ours["training.advantage"] = "grpo_length"
        teacher = self._ours.get("training.loss.reference")
        if teacher is not None and self._ours.get("training.loss.type") != "reverse_kl":
            self._drop("training.loss.reference", "only opd has a teacher")

    def _batch(self) -> None:
        batch = _whole(self._raw.get("batch_size", 128), "batch_size")
        group = _whole(self._ours.get("rollouts.group_size", 1), "group_size")
        if group == 1:
            group = min(8, batch)
            self._ours["rollouts.group_size"] = group
            self._note(
                "differs",
                "group_size",
                1,
                f"rollouts.group_size = {group}: a rollout alone has no advantage over its group",
            )
        groups = math.ceil(batch / group)
        if groups * group != batch:
            why = f"{groups} groups of {group} are {groups * group} rollouts"
            self._note("differs", "batch_size", batch, why)
        self._ours["rollouts.groups_per_batch"] = groups
        if groups < 4:
            self._ours["rollouts.groups_per_lease"] = groups

    def _lengths(self) -> None:
        self._default("training.seq_len", 2048)
        row = _whole(self._ours["training.seq_len"], "seq_len")
        longest = [self._ours.get("engine.max_model_len"), self._raw.get("max_model_len"), row]
        most = min(_whole(one, "max_model_len") for one in longest if one is not None)
        self._ours["engine.max_model_len"] = most
        asked = self._raw.get("max_tokens")
        reply = most - 1 if asked is None else _whole(asked, "max_completion_tokens")
        if reply >= most:
            reply = most - 1
            why = f"sampling.max_tokens = {reply}: a prompt has a token at least"
            self._note("differs", "max_completion_tokens", asked, why)
        self._ours["sampling.max_tokens"] = reply

    def _learner(self) -> None:
        """Schedule, moments and the end of a run, of sft, too."""
        if _switch(self._raw.get("full_offload")):
            self._ours["training.optimizer_offload"] = True
        if "max_steps" not in self._ours:
            self._ours["max_steps"] = MANY_STEPS
            self._note("differs", "max_steps", None, f"{MANY_STEPS}: a run without it ends by hand")
        if self._ours.get("training.scheduler", "constant") != "constant":
            self._default("training.warmup_steps", 10)
            least, rate = self._raw.get("min_lr", 0.0), self._ours.get("training.lr", 1e-6)
            if not isinstance(least, int | float) or not isinstance(rate, int | float):
                raise UsageError(
                    f"min_lr and lr must be numbers, not {_short(least)}, {_short(rate)}"
                )
            self._ours["training.min_lr_ratio"] = least / rate if rate else 0.0
        elif "min_lr" in self._raw:
            self._note("needless", "scheduler.min_lr", self._raw["min_lr"], "the rate is constant")
        if "beta1" in self._raw or "beta2" in self._raw:
            betas = [self._raw.get("beta1", 0.9), self._raw.get("beta2", 0.999)]
            self._ours["training.betas"] = betas

    def _gpus(self) -> None:
        learns, generates = self._count("train_gpus", 1), self._raw.get("infer_gpus", 1)
        if self._raw.get("deployment") == "multi_node" or "train_nodes" in self._raw:
            self._config.command = "train"
            ranks, nodes = (
                self._count("gpus_per_node", GPUS_PER_NODE),
                self._count("train_nodes", 1),
            )
            self._ours |= {"training.backend": "fsdp", "training.fsdp.ranks": ranks}
            self._ours["training.fsdp.nodes"] = nodes
            if "nodes_per_group" in self._raw:
                parts = max(1, nodes // self._count("nodes_per_group", 1))
                self._ours["training.fsdp.replicas"] = parts
            learns = ranks * nodes
        elif (learns, generates) != (1, 1):
            self._default("launch.trainer_gpus", str(learns))
            self._default("launch.inference_gpus", str(generates))
        self._experts(learns)
        if self._ours.get("training.optimizer") == "muon" and learns > 1:
            self._drop("training.optimizer", "muon needs whole matrices, on one rank: adamw")

    def _count(self, name: str, default: int) -> int:
        return _whole(self._raw.get(name, default), name)

    def _experts(self, ranks: int) -> None:
        """Experts are shared by all ranks, or by none."""
        asked = self._raw.get("ep", 1)
        if asked in (1, "auto"):
            return
        self._ours["training.expert_parallel"] = ranks
        if asked != ranks:
            why = f"training.expert_parallel = {ranks}: all ranks share the experts, or none"
            self._note("differs", "model.ep", asked, why)

    def finish_sft(self) -> None:
        """Defaults of prime-rl's sft, and its GPUs."""
        self._default("name", self._title)
        self._default("batch_size", 128)
        self._default("training.seq_len", 128)
        self._default("training.lr", 1e-6)
        self._default("training.scheduler", "constant")
        name = self._ours.pop("data.hub", "PrimeIntellect/Reverse-Text-SFT")
        local = str(name).startswith(("/", "./", "../", "~")) or Path(str(name)).suffix
        self._ours["data.files" if local else "data.hub"] = [name] if local else name
        self._learner()
        ranks, nodes = self._count("train_gpus", 1), self._count("train_nodes", 1)
        if nodes > 1:
            ranks = self._count("gpus_per_node", GPUS_PER_NODE)
            self._ours["training.fsdp.nodes"] = nodes
        if ranks > 1:
            self._ours |= {"training.backend": "fsdp", "training.fsdp.ranks": ranks}
        self._experts(ranks * nodes)

    def finish_inference(self) -> None:
        """A server of one model."""
        self._default("engine.type", "vllm")
        self._default("engine.dtype", "bfloat16")
        self._default("model.name", "Qwen/Qwen3-0.6B")
        if (longest := self._raw.get("max_model_len")) is not None:
            self._ours["engine.max_model_len"] = longest

    def _evaluation(self, tree: Tree) -> None:
        """A standalone evaluation: a model behind an API, and environments."""
        inner = _table(tree, "eval") or tree
        model = tree.get("model", "Qwen/Qwen3-0.6B")
        model = model.get("name") if isinstance(model, Mapping) else model
        client = _table(inner, "client")
        url = _list(client.get("base_url", [])) or ["http://localhost:8000/v1"]
        endpoint: Tree = {"url": url[0], "model": model}
        if len(url) > 1:
            self._note("missing", "client.base_url", url, "an endpoint has one address")
        if key := client.get("api_key_var"):
            endpoint["key_variable"] = key
        sampling = _table(inner, "sampling")
        options = {**_table(client, "extra_body"), **_table(sampling, "extra_body")}
        if effort := sampling.get("reasoning_effort"):
            options["reasoning_effort"] = effort
        if options:
            endpoint["options"] = options
        at_once = _table(inner, "concurrency").get("max_inflight", inner.get("max_concurrent"))
        if at_once:
            endpoint["concurrency"] = at_once
        self._raw["prompts"] = inner.get("num_examples", -1)
        self._raw["samples"] = inner.get("group_size", inner.get("rollouts_per_example", 1))
        sources = _tables("source", inner.get("source", inner.get("env", [])))
        if not sources:
            raise UsageError(
                "no environment is named: give the file that has [[source]] or [[env]], too"
            )
        self._default("name", self._title)
        self._ours["endpoints"] = [endpoint]
        played = [_Source(f"source[{number}]", one) for number, one in enumerate(sources)]
        self._ours["environments"] = [self._played(one) for one in played]
        for old, new in (
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("max_completion_tokens", "max_tokens"),
            ("max_tokens", "max_tokens"),
        ):
            if old in sampling:
                self._ours[f"sampling.{new}"] = sampling[old]
        used = {"model", "eval", "client", "sampling", "concurrency", "max_concurrent", "env"}
        used |= {"source", "num_examples", "group_size", "rollouts_per_example", "max_steps"}
        for key in (set(tree) | set(inner)) - used:
            value = tree.get(key, inner.get(key))
            for path, one in _leaves({key: value}):
                self._key(path, _canonical("rl", path), one)

    # -- what comes out ----------------------------------------------------------------------------

    def _drop(self, ours: str, reason: str) -> None:
        value = self._ours.pop(ours)
        self._note("missing", self._origin.get(ours, ours), value, reason)

    def _validate(self) -> None:
        """Leave out values that are out of our bounds, with a note each. Raises UsageError for others."""
        cls = COMMANDS[self._config.command]
        while True:
            values: Tree = {}
            for key, value in self._ours.items():
                values = merge(values, _nest(key, value))
            try:
                cls.model_validate(values)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(str(part) for part in first["loc"])
                found = max(
                    (key for key in self._ours if f"{place}.".startswith(f"{key}.")),
                    key=len,
                    default="",
                )
                reason = str(first["msg"]).removeprefix("Value error, ")
                reason = reason.replace("Input should", "should", 1)
                shown = self._origin.get(found, found or place)
                mistake = first["type"].endswith(("_type", "_parsing", "from_float"))
                if not found or mistake:
                    said = f"{shown}: {reason}" if shown else reason
                    raise UsageError(f"{said}: correct it") from error
                self._drop(found, f"{found}: {reason}")
                continue
            self._config.values = _ordered(cls, values)
            return


class _Source:
    """One environment of prime-rl's, in whichever of its three layouts."""

    def __init__(self, path: str, values: Tree) -> None:
        self.path = path
        self.values = dict(values)
        self.args: Tree = {}
        self.agents: dict[str, Tree] = {}
        env = self.values.pop("env", None)
        taskset: Any = env.pop("taskset", {}) if isinstance(env := _copy(env), dict) else None
        if isinstance(env, dict):
            self.agents = {f"env.{name}": one for name, one in env.items() if isinstance(one, dict)}
        elif "taskset" in self.values:
            taskset = self.values.pop("taskset")
            harness = _copy(self.values.pop("harness", {}))
            agent = {"harness": harness, "timeout": self.values.pop("timeout", {})}
            agent["runtime"] = harness.pop("runtime", {}) if isinstance(harness, dict) else {}
            self.agents = {"env": agent}
        else:
            taskset = {"id": self.values.pop("id", "reverse-text"), **_table(values, "args")}
            self.values.pop("args", None)
        taskset = _copy(taskset)
        self.id = str(taskset.pop("id", "")) if isinstance(taskset, dict) else ""
        self.args = taskset if isinstance(taskset, dict) else {}
        self.values.pop("num_workers", None)
        self.values.pop("serve", None)


def _copy(value: Any) -> Any:
    return dict(cast(Tree, value)) if isinstance(value, dict) else value


SOURCES = frozenset(
    f"orchestrator.{name}"
    for name in ("env", "train.env", "train.source", "eval.env", "eval.source")
)


def _tables(path: str, value: Any) -> list[Tree]:
    """A list of tables. Raises UsageError if it is something else."""
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in items):
        raise UsageError(f"{path} must be a list of tables, [[{path}]]")
    return cast(list[Tree], items)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast(Mapping[str, Any], value), f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _nest(path: str, value: Any) -> Tree:
    for part in reversed(path.split(".")):
        value = {part: value}
    return cast(Tree, value)


def _ordered(cls: type[BaseModel], values: Tree) -> Tree:
    """Sections and keys as our reference lists them."""
    found: Tree = {}
    for key in [name for name in cls.model_fields if name in values]:
        annotation, value = cls.model_fields[key].annotation, values[key]
        section = None if get_origin(annotation) is dict else model_in(annotation)
        found[key] = _ordered(section, value) if section and isinstance(value, dict) else value
    return found


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} must be a whole number of at least 1, not {_short(value)}")
    return value


def has_key(cls: type[BaseConfig], key: str) -> bool:
    """Whether a config has this key; what is in a table of free keys is one."""
    section: Any = cls
    for part in key.split("."):
        if section is None:
            return True
        if part not in section.model_fields:
            return False
        section = model_in(section.model_fields[part].annotation)
    return True


def _canonical(kind: Component, path: str) -> str:
    """A key of one component's file as a key of the newest rl.toml."""
    if kind in ("trainer", "orchestrator", "inference", "train_2025", "infer_2025"):
        path = f"{kind}.{path}"
    elif kind == "sft" and path.partition(".")[0] in LEARNER:
        path = f"trainer.{path}"
    path = _renamed(path)
    owner, _, rest = path.partition(".")
    if owner in ("trainer", "orchestrator", "inference"):
        shared = rest.partition(".")[0] in SHARED and path not in RULES
        if owner == "inference" and rest.startswith("deployment"):
            return path
        if shared or any(f"{rest}.".startswith(f"{one}.") for one in SHARED_MODEL):
            return _renamed(rest)
    return "model.name" if path in ("inference.vllm.model", "inference.vllm.name") else path


def _command(kinds: set[Component]) -> str:
    """The command of ours that does it. Raises UsageError for files that do not belong together."""
    sets: tuple[tuple[set[Component], str], ...] = (
        ({"inference"}, "inference"),
        ({"rl", "trainer", "orchestrator", "inference"}, "rl"),
        ({"sft"}, "sft"),
        ({"eval", "inference"}, "eval"),
        ({"train_2025", "infer_2025"}, "rl"),
    )
    for group, command in sets:
        if kinds <= group:
            return command
    raise UsageError(
        f"files of {' and '.join(sorted(kinds))} are not one run: convert them one by one"
    )


_FINISH: Mapping[str, Callable[[_Conversion], None]] = {
    "rl": _Conversion.finish_run,
    "sft": _Conversion.finish_sft,
    "inference": _Conversion.finish_inference,
}
