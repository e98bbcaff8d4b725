"""Time a step of our loop on fixed work: one JSON line a lag. The SDK, the embedded server and the engine, as in a run.

With a lag of 1 or more the sampling of the next step is asked for before this one trains."""
import json, statistics, tempfile, threading, time
from types import SimpleNamespace as NS
from shapes import arguments, machine, model, prompts, quiet, tokenizer, turn

p = arguments(__doc__)
p.add_argument('--lags', default='0', help='with commas; empty: none')
p.add_argument('--alternate', type=int, default=0, help='rounds of losses in turn on the same rollouts')
p.add_argument('--losses', default='importance_sampling,custom,centered_mc', help='of rxnb.losses, or custom, with commas; the first is the measure')
p.add_argument('--devices', help='what trains; the same as --device')
p.add_argument('--sample-devices', help='what samples, with commas; left out: what trains')
a = p.parse_args(); quiet(a.threads); a.device = a.devices or a.device

import numpy as np, torch, transformers
torch.set_num_threads(a.threads)
from tinker import types
from rxnb.connect import connect, made_by, resolve
from rxnb.losses import loss_params, torch_loss
from rxnb.rollouts import make_datum, token_columns
from rxnb.train import checked_loss, no_gradient_frac, submit_loss, trainer_logps

gpu = a.device!='cpu'
folder = tempfile.mkdtemp(); tok = tokenizer(); tok.save_pretrained(folder)
made = threading.Thread(target=lambda: model(a.size, a.device, None).save_pretrained(folder)); made.start(); made.join()   # no end token: lengths are forced; a thread that ends takes its OpenMP team along
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

def custom(client, columns):
    "Importance sampling as a custom loss: the endpoint does not know it."
    return client.forward_backward_custom([make_datum(c, side=False) for c in columns], torch_loss('importance_sampling', *[[c[k] for c in columns] for k in ('sampler_logp','advantage','mask')]))

def learn(client, rollouts, loss, rng):
    params = {} if loss=='custom' else loss_params(loss, **({'k':8} if loss.startswith('centered') else {}))
    for r in rollouts: r.others = (rng.integers(3, 64, (len(r.tokens), 8)), np.full((len(r.tokens), 8), -4., np.float32)) if loss.startswith('centered') else None   # drawn anew: only time is asked for
    columns = [token_columns(r, x) for r,x in zip(rollouts, rng.normal(size=len(rollouts)))]
    began = time.perf_counter(); out = (custom(client, columns) if loss=='custom' else submit_loss(client, columns, loss, params)).result(); took = time.perf_counter()-began
    checked_loss(out, columns); no_gradient_frac(out, columns, 'importance_sampling' if loss=='custom' else loss, params)
    d = np.abs(np.concatenate([(x if x.ndim==1 else x[:,0])[c['mask']==1]-(c['sampler_logp'] if x.ndim==1 else c['sampler_logp'][:,0])[c['mask']==1] for x,c in zip(trainer_logps(out, columns), columns)]))
    norm = client.optim_step(adam).result().metrics['unclipped_grad_l2:mean']
    return dict(loss_s=took, gap_max_nats=float(d.max()), gap_mean_nats=float(d.mean()), grad_norm=norm)

def run(lag, loss):
    client = made_by(service, service.create_lora_training_client(base_model=folder, rank=a.lora, seed=0, train_unembed=False)); rng = np.random.default_rng(0)
    save = lambda v: resolve(service.create_sampling_client(model_path=client.save_weights_for_sampler(f'v{v}').result().path))
    samplers, rows = [save(0)], []
    ask = lambda step: Sampling(samplers[max(0, step-lag)], step)
    sampling = ask(0) if lag else None
    for step in range(a.warmup+a.steps):
        turn(); cpu = time.process_time(); began = rows[-1]['end'] if lag and rows else time.perf_counter()
        mine = sampling if lag else ask(step); rollouts = mine.read(); ready = time.perf_counter()
        if lag: sampling = ask(step+1)
        did = learn(client, rollouts, loss, rng); samplers.append(save(step+1)); trained = time.perf_counter()
        rows.append(dict(end=trained, cpu_s=time.process_time()-cpu, step_s=trained-began, sample_s=mine.took, train_s=trained-ready, **did))
    if lag: sampling.read()
    rows = rows[a.warmup:]; steps = [r['step_s'] for r in rows]
    med = lambda k: statistics.median(r[k] for r in rows)
    return dict(side='rxnb', machine=machine(gpu), **vars(a), lag=lag, torch=torch.__version__, transformers=transformers.__version__, step_s=statistics.median(steps), sample_s=med('sample_s'), train_s=med('train_s'), cpu_s=med('cpu_s'), loss_s=med('loss_s'), steps_s=steps, gap=None if lag else [max(r[k] for r in rows) for k in ('gap_max_nats', 'gap_mean_nats')],
                peak_gib=[torch.cuda.max_memory_allocated(i)/2**30 for i in range(torch.cuda.device_count())] if gpu else None)

def alternate(losses):
    "Median seconds of forward and backward for each loss, and their ratios to the first, round by round."
    client = made_by(service, service.create_lora_training_client(base_model=folder, rank=a.lora, seed=0, train_unembed=False)); rng = np.random.default_rng(0)
    rollouts = Sampling(resolve(service.create_sampling_client(model_path=client.save_weights_for_sampler('v0').result().path)), 0).read()
    rows = [{l: learn(client, rollouts, l, np.random.default_rng(n)) for l in losses} for n in range(a.warmup+a.alternate)][a.warmup:]
    return dict(side='rxnb', machine=machine(gpu), **vars(a), torch=torch.__version__, transformers=transformers.__version__, loss_s={l: statistics.median(r[l]['loss_s'] for r in rows) for l in losses},
        ratio={l: statistics.median(r[l]['loss_s']/r[losses[0]]['loss_s'] for r in rows) for l in losses}, grad_norm={l: [r[l]['grad_norm'] for r in rows] for l in losses}, rounds_s=[{l: r[l]['loss_s'] for l in losses} for r in rows])

for lag in map(int, a.lags.split(',')) if a.lags else (): print(json.dumps(run(lag, 'importance_sampling')), flush=True)
if a.alternate: print(json.dumps(alternate(a.losses.split(','))), flush=True)
