"""Time a step of TRL's GRPOTrainer on fixed work: one JSON line. Runs in an environment of its own (make .venv-trl).

No KL term, no clipping that binds, dr_grpo's sum, constant learning rate, lengths forced by `min_new_tokens`."""
import json, statistics, tempfile, time
from shapes import arguments, model, prompts, quiet, tokenizer, turn

p = arguments(__doc__); p.add_argument('--continuous', action='store_true', help='generate by continuous batching')
a = p.parse_args(); quiet(a.threads)

import torch, transformers, trl
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

gpu = a.device!='cpu'; torch.set_num_threads(a.threads)
config = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=not gpu, bf16=gpu, fp16=False, gradient_checkpointing=False,
    per_device_train_batch_size=a.group*a.prompts, gradient_accumulation_steps=1, num_generations=a.group, max_completion_length=a.tokens,
    temperature=1., top_p=1., top_k=0, beta=0., num_iterations=1, epsilon=1e6, loss_type='dr_grpo', scale_rewards='none',
    learning_rate=4e-5, adam_beta1=.9, adam_beta2=.95, adam_epsilon=1e-8, weight_decay=0., max_grad_norm=0., lr_scheduler_type='constant', warmup_steps=0,
    max_steps=a.warmup+a.steps, logging_steps=1, save_strategy='no', report_to='none', seed=0, shuffle_dataset=False, disable_dropout=True,
    remove_unused_columns=False, generation_kwargs={'min_new_tokens':a.tokens}, **({'use_transformers_continuous_batching':True} if a.continuous else {}))
steps, gen, cpu = [], [], []
def now():
    if gpu: torch.cuda.synchronize()
    return time.perf_counter()
class Clock(TrainerCallback):
    def on_step_begin(self, *_, **__): turn(); cpu.append(time.process_time()); steps.append(now())
    def on_step_end(self, *_, **__): steps[-1] = now()-steps[-1]; cpu[-1] = time.process_time()-cpu[-1]

trainer = GRPOTrainer(model=model(a.size, a.device, 1), reward_funcs=lambda completions, **_: [c.count('1')/len(c) if c else 0. for c in completions], args=config,
    train_dataset=Dataset.from_list([dict(prompt=x) for x in prompts(1024, a.prompt_tokens)]), processing_class=tokenizer(), callbacks=[Clock()],
    peft_config=LoraConfig(r=a.lora, lora_alpha=a.lora, lora_dropout=0., target_modules='all-linear', task_type='CAUSAL_LM'))
inner = trainer._generate
def timed(*x, **k):
    t = now(); out = inner(*x, **k); gen.append(now()-t); return out
trainer._generate = timed
trainer.train()
print(json.dumps(dict(side='trl', **vars(a), trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__, step_s=statistics.median(steps[a.warmup:]),
    sample_s=statistics.median(gen[a.warmup:]), steps_s=steps[a.warmup:], cpu_s=statistics.median(cpu[a.warmup:]), peak_gib=torch.cuda.max_memory_allocated()/2**30 if gpu else None)))
