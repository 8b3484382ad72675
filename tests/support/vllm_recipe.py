"""A run of two steps on a policy that vLLM can load: 64 features, heads of 32."""

import yaml

RECIPE = yaml.safe_load("""
name: on-vllm
steps: 2
device: cpu
model:
  fresh: {hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, head_dim: 32, intermediate_size: 64, max_positions: 64}
  tokenizer: characters
task: {kind: running_sum, min_digits: 1, max_digits: 3, train_size: 200, heldout_size: 32, warm_start_size: 512}
warm_start: {steps: 60, batch: 32, lr: 0.003, evaluate_every: 60, problems: 16}
rollout: {prompts: 16, samples: 8, max_tokens: 6, slots: 64, engine: vllm}
algorithm: {correction: token_tis}
optimizer: {lr: 0.001, updates_per_batch: 2}
evaluation: {every: 2, problems: 16, samples: 2}
checkpoint: {every: 2}
trackers: []
""")
