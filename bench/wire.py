"""What a training call costs beside the engine: the SDK, the wire, the server, and the loss where the client computes it. The engine answers at once.

16 x 8 rollouts of 128 + 256 tokens; medians, to nbs/results/benchmarks/wire.json."""
import argparse, json, statistics, tempfile, time
from pathlib import Path
from types import SimpleNamespace as NS
from shapes import machine, quiet, tokenizer

p = argparse.ArgumentParser(description=__doc__); p.add_argument('--calls', type=int, default=7); a = p.parse_args(); quiet(1)

import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
import rxnb.engine as engine
from rxnb.connect import connect, made_by
from rxnb.losses import loss_params, torch_loss
from rxnb.rollouts import make_datum, token_columns
from rxnb.train import submit_loss

LOSSES, P, T, N = ('importance_sampling', 'custom', 'centered_mc'), 128, 256, 128
folder = tempfile.mkdtemp(); tokenizer().save_pretrained(folder)
LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=4096)).save_pretrained(folder)
inside = []

def answer(self, lora, data, loss_fn, loss_config=None, backward=True):
    "The engine's checks of what it is given, and an answer."
    began, params = time.perf_counter(), engine.builtin_params(loss_fn, loss_config)
    items = [engine._check_datum(self, i, d, loss_fn, params) for i,d in enumerate(data)]
    out = [np.full(len(x.tokens) if x.flat else x.targets.shape, -1., np.float32) for x in items]
    if backward: lora.grads = {n: torch.zeros_like(x) for n,x in lora.params.items()}
    inside.append(time.perf_counter()-began)
    return out, {'loss:sum': 0., 'live_tokens:sum': 1.}

def weighed(self, lora, data, weigh, backward=True):
    "The same, where the loss is an uploaded one: it runs, but counts with what is not the engine."
    out,said = answer(self, lora, [engine._unweighed(d) for d in data], 'cross_entropy', backward=backward)
    weigh(range(len(data)), out); return out, said
engine.Engine.forward_backward, engine.Engine.forward_backward_by = answer, weighed

service = connect(base_model=folder, device='cpu'); client = made_by(service, service.create_lora_training_client(base_model=folder, rank=4, seed=0, train_unembed=False)); rng = np.random.default_rng(0)
ids = lambda *s: rng.integers(3, 64, s)
rollouts = lambda k: [NS(prompt_tokens=tuple(ids(P).tolist()), tokens=tuple(ids(T).tolist()), logps=tuple((-rng.random(T)).tolist()), others=(ids(T, k), np.full((T, k), -4., np.float32)) if k else None) for _ in range(N)]

def call(loss, columns):
    if loss!='custom': return submit_loss(client, columns, loss, loss_params(loss, **({'k':8} if loss=='centered_mc' else {})))
    return client.forward_backward_custom([make_datum(c, side=False) for c in columns], torch_loss('importance_sampling', *[[c[k] for c in columns] for k in ('sampler_logp','advantage','mask')]))

rows = []
for loss in LOSSES:
    columns, took = [token_columns(r, x) for r,x in zip(rollouts(8 if loss=='centered_mc' else 0), rng.normal(size=N))], []
    for _ in range(a.calls+1):
        inside.clear(); began = time.perf_counter(); call(loss, columns).result(); took.append((time.perf_counter()-began, sum(inside)))
    rows.append(dict(loss=loss, targets=columns[0]['targets'][0].size, call_s=statistics.median(t for t,_ in took[1:]), in_engine_s=statistics.median(e for _,e in took[1:])))
    print({k: round(v, 3) if isinstance(v, float) else v for k,v in rows[-1].items()}, flush=True)
out = Path(__file__).resolve().parents[1]/'nbs/results/benchmarks/wire.json'
out.write_text(json.dumps(dict(machine=machine(), calls=a.calls, rows=rows), indent=1)+'\n')
