"""The engine alone: sampling, and forward and backward. On a GPU two shapes of random weights, to nbs/results/benchmarks/gpu.json; elsewhere the packaged model, to cpu.json.

Only time is asked for, so lengths are forced by empty stop lists. `first_s` is the first call, with its compilations and captures; the others are medians of the calls after it."""
import argparse, gc, json, os, statistics, tempfile, time
from pathlib import Path
os.environ.setdefault('OMP_NUM_THREADS', '1'); os.environ.update(HF_HUB_OFFLINE='1', TRANSFORMERS_OFFLINE='1')

import numpy as np, torch, transformers
from rxnb.decode import SampleRequest
from rxnb.engine import AdamConfig, Datum, Engine
from rxnb.serve import find_model
from shapes import machine

GPU = torch.cuda.is_available()
folder = Path(__file__).resolve().parents[1]/'nbs/results/benchmarks'
SHAPES = {
    '135M Llama': (transformers.LlamaConfig, dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)),
    '0.6B Qwen3': (transformers.Qwen3Config, dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128))}
COPY = 4.3e12   # bytes a second that a copy reaches on an H200

def build(name, **kw):
    "An engine with random weights of a shape."
    cls, shape = SHAPES[name]; path = tempfile.mkdtemp(); torch.manual_seed(0)
    cfg = cls(max_position_embeddings=8192, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, **shape)
    with torch.device('cuda' if GPU else 'cpu'): transformers.AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16).save_pretrained(path)
    return Engine(path, **kw)

def adapter(engine, rank=32, std=.002):
    "LoRA on all linear layers that does something."
    lora = engine.init_lora(rank, seed=0); g = torch.Generator(engine.device).manual_seed(1)
    with torch.no_grad():
        for n,p in lora.params.items():
            if n.endswith('lora_B'): p.normal_(0, std, generator=g)
    return lora

def timed(f, n=5):
    "Seconds of the first call, median seconds of the next n, peak GiB, last result."
    ts, wait = [], torch.cuda.synchronize if GPU else lambda: None
    for _ in range(n+1):
        if GPU: wait(); torch.cuda.reset_peak_memory_stats()
        t = time.perf_counter(); out = f(); wait(); ts.append(time.perf_counter()-t)
    return ts[0], statistics.median(ts[1:]), torch.cuda.max_memory_allocated()/2**30 if GPU else None, out

def asks(V, prompts, group, prompt_tokens, new_tokens):
    r = np.random.default_rng(0)
    return [SampleRequest(r.integers(3, V, prompt_tokens).tolist(), group, new_tokens, 1., i, stop_ids=[]) for i in range(prompts)]

def decode_row(e, lora, prompts=16, group=8, prompt_tokens=128, new_tokens=256, n=5):
    "Tokens a second of sampling, and the least time of a token step: weights, adapters and the mean cache read once."
    snap, reqs = e.snapshot(lora), asks(e.vocab_size, prompts, group, prompt_tokens, new_tokens)
    first, s, gib, out = timed(lambda: e.sample(snap, reqs, max_rows=1024), n); tokens = sum(len(q.tokens) for r in out for q in r.sequences)
    c, b, rows = e.config, 2, prompts*group
    weights = sum(p.numel() for p in e.model.parameters())*b+(sum(p.numel() for p in lora.params.values())*b if lora else 0)
    cache = 2*c.num_hidden_layers*c.num_key_value_heads*e.model.get_decoder().layers[0].self_attn.head_dim*b*rows*(prompt_tokens+new_tokens/2)
    return dict(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, lora=bool(lora), first_s=first, s=s, tok_per_s=tokens/s, step_ms=1e3*s/new_tokens,
                floor_ms=1e3*(weights+cache)/COPY, peak_gib=gib), reqs, out

def train_row(e, lora, B=32, N=512, live=1., n=5):
    "Seconds of forward and backward of B sequences of N tokens, of which a part enters the loss, and of the optimizer."
    r = np.random.default_rng(0); data = []
    for _ in range(B):
        f, on = r.integers(3, e.vocab_size, N+1), np.arange(N)>=N*(1-live)
        data.append(Datum(f[:-1], dict(target_tokens=f[1:], logprobs=-np.log(e.vocab_size)*on, advantages=on*r.normal())))
    def run(): lora.grads = None; return e.forward_backward(lora, data, 'cispo')
    first, s, gib, _ = timed(run, n); out = dict(sequences=B, tokens=N, loss_share=live, first_s=first, s=s, tok_per_s=B*N/s, peak_gib=gib, recompute=e.recompute)
    _, both, _, _ = timed(lambda: (run(), e.optim_step(lora, AdamConfig(1e-6, .9, .95, 1e-8, 0., 0.)))); out['optim_s'] = both-s
    return out

def gap(e, lora, reqs, out, n=32):
    "Sampler against trainer on sampled tokens: largest and mean difference in nats."
    pairs = [(q, s) for q,x in zip(reqs, out) for s in x.sequences][::4][:n]; full = [np.array([*q.prompt, *s.tokens]) for q,s in pairs]
    lps = e.forward_backward(lora, [Datum(f[:-1], dict(target_tokens=f[1:])) for f in full], 'cross_entropy', backward=False)[0]
    d = np.concatenate([np.abs(lp[len(q.prompt)-1:]-s.logprobs) for lp,(q,s) in zip(lps, pairs)])
    return dict(max_nats=float(d.max()), mean_nats=float(d.mean()))

def on_gpu():
    rows = dict(machine=machine(), torch=torch.__version__, transformers=transformers.__version__, cuda=torch.version.cuda, decode=[], train=[], micro=[], gap=[])
    for name in SHAPES:
        t = time.perf_counter(); e = build(name); loaded = time.perf_counter()-t; lora = adapter(e)
        def note(kind, row): rows[kind].append(dict(model=name, **row)); print(kind, rows[kind][-1], flush=True)
        for live in (1., .5): note('train', train_row(e, lora, live=live))
        if name=='0.6B Qwen3':
            for N in (1024, 2048, 4096, 8192): note('train', train_row(e, lora, B=16384//N, N=N, n=3))
            held = e.micro_tokens, e.halves
            for m in (None, 8192, 12288, 16384, 24576):
                e.micro_tokens, e.halves = (m, False) if m else held
                for B,N,live in ((32, 512, 1.), (128, 384, 2/3)): note('micro', dict(micro_tokens=m, **train_row(e, lora, B=B, N=N, live=live, n=5)))
            e.micro_tokens, e.halves = held
        row, reqs, out = decode_row(e, lora); note('decode', dict(row, load_s=loaded)); note('gap', gap(e, lora, reqs, out))
        note('decode', decode_row(e, None)[0])
        for prompts in (4, 32, 64): note('decode', decode_row(e, lora, prompts=prompts, n=2)[0])
        note('decode', decode_row(e, lora, prompts=4, prompt_tokens=1024, new_tokens=512, n=2)[0])
        del e, lora, reqs, out; gc.collect(); torch.cuda.empty_cache()
    return rows

def on_cpu(n):
    "A training step of 64 sequences of about 45 tokens on the packaged model, and its sampling: 8 x 8 x 17 tokens."
    before, e = os.getloadavg()[0], Engine(find_model('tiny_arith')[1], device='cpu'); lora, r, data = e.init_lora(32, seed=0), np.random.default_rng(0), []
    for _ in range(64):
        N = int(r.integers(38, 52)); f = r.integers(3, e.vocab_size, N+1); on = np.arange(N)>=N-17
        data.append(Datum(f[:-1], dict(target_tokens=f[1:], logprobs=-3.*on, advantages=on*r.normal())))
    reqs = [SampleRequest(d.tokens[:28].tolist(), 8, 17, 1., i, stop_ids=[]) for i,d in enumerate(data[:8])]
    def train(): e.forward_backward(lora, data, 'importance_sampling'); e.optim_step(lora, AdamConfig(1e-4, .9, .95, 1e-8, 0., 0.))
    return dict(machine=machine(), capability=torch.backends.cpu.get_cpu_capability(), threads=torch.get_num_threads(), load=before, torch=torch.__version__,
        train_s=timed(train, n)[1], sample_s=timed(lambda: e.sample(e.snapshot(lora), reqs), n)[1])

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--calls', type=int, default=7, help='timed calls on a CPU')
    p.add_argument('--out', type=Path, default=folder)
    a = p.parse_args(); a.out.mkdir(parents=True, exist_ok=True)
    found = on_gpu() if GPU else on_cpu(a.calls)
    (a.out/('gpu.json' if GPU else 'cpu.json')).write_text(json.dumps(found, indent=1)+'\n')
    if not GPU: print(json.dumps(found))
