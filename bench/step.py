"""Time a step of our loop on fixed work: one JSON line a lag. The SDK, the embedded server and the engine, as in a run.

With a lag of 1 or more the sampling of the next step is asked for before this one trains."""
import json, statistics, tempfile, time
from types import SimpleNamespace as NS
from shapes import arguments, model, prompts, quiet, tokenizer

p = arguments(__doc__)
p.add_argument('--lags', default='0', help='with commas')
p.add_argument('--losses', default='importance_sampling', help='of rxnb.losses, with commas; centered_mc asks for K tokens more')
p.add_argument('--alternate', type=int, default=0, help='instead: the losses in turn on the same rollouts, so many times')
p.add_argument('--devices', help='what trains; the same as --device')
p.add_argument('--sample-devices', help='what samples, with commas; left out: what trains')
a = p.parse_args(); quiet(a.threads); a.device = a.devices or a.device

import numpy as np, torch, transformers
torch.set_num_threads(a.threads)
from tinker import types
from rxnb.connect import connect, resolve
from rxnb.losses import loss_params
from rxnb.rollouts import token_columns
from rxnb.train import checked_loss, no_gradient_frac, submit_loss

gpu = a.device!='cpu'
folder = tempfile.mkdtemp(); model(a.size, a.device, None).save_pretrained(folder); tok = tokenizer(); tok.save_pretrained(folder)   # no end token: lengths are forced
service = connect(base_model=folder, device=a.device, sample_devices=a.sample_devices and a.sample_devices.split(','))
every = [tok.encode(x) for x in prompts(1024, a.prompt_tokens)]
adam = types.AdamParams(learning_rate=4e-5, beta1=.9, beta2=.95, eps=1e-8, weight_decay=0., grad_clip_norm=0.)

class Sampling:
    "The rollouts of a step: asked for now, read later; `took` is the time until the last one came."
    def __init__(self, sampler, step):
        self.asked, self.prompts = time.perf_counter(), [every[(step*a.prompts+i)%len(every)] for i in range(a.prompts)]
        self.ended = self.asked
        params = lambda i: types.SamplingParams(max_tokens=a.tokens, temperature=1., seed=step*a.prompts+i)
        self.futures = [sampler.sample(prompt=types.ModelInput.from_ints(x), num_samples=a.group, sampling_params=params(i)) for i,x in enumerate(self.prompts)]
        for f in self.futures: f.future().add_done_callback(self.note)
    def note(self, _): self.ended = max(self.ended, time.perf_counter())
    def read(self):
        out = [NS(prompt_tokens=tuple(x), tokens=tuple(s.tokens), logps=tuple(s.logprobs), others=None, text=tok.decode(s.tokens)) for x,f in zip(self.prompts, self.futures) for s in f.result().sequences]
        assert all(len(r.tokens)==a.tokens for r in out), 'a length was not forced'
        return out
    @property
    def took(self): return self.ended-self.asked

def with_others(rollouts, K, rng):
    "Other tokens at each position, drawn anew: only time is asked for."
    for r in rollouts: r.others = rng.integers(3, 64, (len(r.tokens), K)), np.full((len(r.tokens), K), -4., np.float32)

def learn(client, rollouts, loss, rng):
    params = loss_params(loss, **({'k':8} if loss.startswith('centered') else {}))
    if loss.startswith('centered'): with_others(rollouts, 8, rng)
    else:
        for r in rollouts: r.others = None
    columns = [token_columns(r, x) for r,x in zip(rollouts, rng.normal(size=len(rollouts)))]
    began = time.perf_counter(); out = submit_loss(client, columns, loss, params).result(); took = time.perf_counter()-began
    checked_loss(out, columns); no_gradient_frac(out, columns, loss, params)
    client.optim_step(adam).result()
    return took

def run(lag, loss):
    client = resolve(service.create_lora_training_client(base_model=folder, rank=a.lora, seed=0, train_unembed=False)); rng = np.random.default_rng(0)
    save = lambda v: resolve(service.create_sampling_client(model_path=client.save_weights_for_sampler(f'v{v}').result().path))
    samplers, rows, sampling = [save(0)], [], None
    ask = lambda step: Sampling(samplers[max(0, step-lag)], step)
    sampling = ask(0)
    for step in range(a.warmup+a.steps):
        began = time.perf_counter(); mine = sampling; rollouts = mine.read(); ready = time.perf_counter()
        if lag: sampling = ask(step+1)
        fb = learn(client, rollouts, loss, rng); samplers.append(save(step+1)); trained = time.perf_counter()
        if not lag: sampling = ask(step+1)
        rows.append(dict(end=trained, sample_s=mine.took, train_s=trained-ready, loss_s=fb))
    sampling.read()
    ends = [r['end'] for r in rows]; steps = [y-x for x,y in zip(ends, ends[1:])][a.warmup-1:]; rows = rows[a.warmup:]
    med = lambda k: statistics.median(r[k] for r in rows)
    return dict(side='rxnb', **vars(a), lag=lag, loss=loss, torch=torch.__version__, transformers=transformers.__version__, step_s=statistics.median(steps), sample_s=med('sample_s'), train_s=med('train_s'), loss_s=med('loss_s'), steps_s=steps,
                peak_gib=torch.cuda.max_memory_allocated()/2**30 if gpu else None)

def alternate(losses):
    "Median seconds of forward and backward for each loss, and their ratios to the first, round by round."
    client = resolve(service.create_lora_training_client(base_model=folder, rank=a.lora, seed=0, train_unembed=False)); rng = np.random.default_rng(0)
    rollouts = Sampling(resolve(service.create_sampling_client(model_path=client.save_weights_for_sampler('v0').result().path)), 0).read()
    rows = [{l: learn(client, rollouts, l, rng) for l in losses} for _ in range(a.warmup+a.alternate)][a.warmup:]
    return dict(side='rxnb', **vars(a), torch=torch.__version__, transformers=transformers.__version__, loss_s={l: statistics.median(r[l] for r in rows) for l in losses},
        ratio={l: statistics.median(r[l]/r[losses[0]] for r in rows) for l in losses}, rounds_s=rows)

if a.alternate: print(json.dumps(alternate(a.losses.split(','))))
else: [print(json.dumps(run(lag, loss)), flush=True) for loss in a.losses.split(',') for lag in map(int, a.lags.split(','))]
