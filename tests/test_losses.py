"Every loss three times: written here in plain loops from its equation, as the package's reference and torch form, and as the endpoint computes it, through the real SDK."
import math, os
from dataclasses import replace
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import numpy as np, pytest, tinker, torch
from tinker import types
from rxnb.connect import resolve
from rxnb.engine import random_model
from rxnb.losses import LOSSES, dry_run, loss_params, same_gradient, token_loss, torch_loss
from rxnb.rollouts import Rollout, make_datum, token_columns, with_others
from rxnb.serve import serve
from rxnb.train import checked_loss, no_gradient_frac, submit_loss, takes_columns, trainer_logps

torch.set_num_threads(1)
K,SEED = 8,0
WIDE = dict(clip_low_threshold=.8, clip_high_threshold=1.2)
ways = [('reinforce',{}), ('importance_sampling',{}), ('truncated',{'cap':2.}), ('tis',{'cap':2.}), ('cispo',dict(clip_low_threshold=.5, clip_high_threshold=2.)), ('ppo',WIDE), ('dro',{'beta':.05}),
    ('icepop',dict(lo=.5, hi=2.)), ('gspo',WIDE), ('flash',{'delta':.003}), *[('centered_mc',p) for p in (dict(k=K), dict(k=K, correction='tis', cap=2.), dict(k=K, auxiliary='top20'))],
    *[('centered_topk',dict(k=K, **p)) for p in ({}, dict(correction='tis', cap=2.), dict(correction='mis', lo=.5, hi=2.))]]
each_way = pytest.mark.parametrize('name,params', ways, ids=lambda x: x if isinstance(x, str) else '-'.join(map(str, x.values())))

def test_every_loss_is_here(): assert {n for n,_ in ways}==set(LOSSES)

# ---- plain loops
def f_of(r, correction='none', cap=None, lo=None, hi=None): return {'none': 1., 'tis': min(r, cap or 0), 'mis': r if (lo or 0)<=r<=(hi or 0) else 0.}[correction]

def token_gradient(name, r, log_r, A, p):
    "d loss / d log p of one token, from its equation."
    lo,hi = p.get('clip_low_threshold'),p.get('clip_high_threshold')
    if name=='reinforce': return -A
    if name=='importance_sampling': return -r*A
    if name=='truncated': return -r*A if r<p['cap'] else 0.
    if name=='tis': return -min(r, p['cap'])*A
    if name=='cispo': return -max(lo, min(hi, r))*A
    if name=='ppo': return 0. if (A>0 and r>hi) or (A<0 and r<lo) else -r*A
    if name=='dro': return -(A-p['beta']*log_r)
    if name=='icepop': return -r*A if p['lo']<=r<=p['hi'] else 0.
    raise KeyError(name)

def sequence_gradient(name, lp, q, A, B, p):
    "d loss / d log p of the tokens of one sequence of B, from the equation."
    T = len(lp)
    if name=='gspo':
        s,a = math.exp(sum(x-y for x,y in zip(lp, q))/T),A[0]
        return [0. if (a>0 and s>p['clip_high_threshold']) or (a<0 and s<p['clip_low_threshold']) else -s*a/T]*T
    if name=='flash':
        keep = lambda x: min(max(math.exp(x), 1e-6), 1-1e-6)
        d = [keep(y)*math.log(keep(y)/keep(x))+(1-keep(y))*math.log((1-keep(y))/(1-keep(x))) for x,y in zip(lp, q)]
        return [-math.exp(x-y)*a/(B*T) if sum(d)/T<=p['delta'] else 0. for x,y,a in zip(lp, q, A)]
    return [token_gradient(name, math.exp(x-y), x-y, a, p) for x,y,a in zip(lp, q, A)]

def centered_gradient(name, lp, q, A, p):
    "d loss / d log p of the sampled and the K other tokens of one position."
    f = lambda r: f_of(r, *[p[k] for k in ('correction',)], **{k: p[k] for k in ('cap','lo','hi') if k in p})
    own = -A*f(math.exp(lp[0]-q[0]))
    if name=='centered_mc': return [own, *[A*f(math.exp(x-y))/len(lp[1:]) for x,y in zip(lp[1:], q[1:])]]
    P,Q = [math.exp(x) for x in lp[1:]], [math.exp(y) for y in q[1:]]
    rho = max(1-sum(Q), 1e-6)/max(1-sum(P), 1e-6)
    return [own, *[A*(y*f(x/y)-rho*f(1/rho)*x) for x,y in zip(P, Q)]]

def by_loops(name, rows, p):
    "Gradients of all sequences: rows of (log p, log q, A, mask)."
    out = []
    for lp,q,A,mask in rows:
        at,g = [t for t in range(len(A)) if mask[t]], np.zeros(np.shape(lp))
        if np.ndim(lp)==2:
            for t in at: g[t] = centered_gradient(name, list(lp[t]), list(q[t]), A[t], p)
        else: g[at] = sequence_gradient(name, *[[float(x[t]) for t in at] for x in (lp, q, A)], len(rows), p)
        out.append(g)
    return out

def random_rows(n, wide, seed):
    "Sequences whose ratios lie on both sides of every threshold; the others of a position have probabilities that sum to less than 1."
    rng,rows = np.random.default_rng(seed), []
    for _ in range(n):
        T = int(rng.integers(2, 30)); q = np.log(rng.dirichlet(np.ones(K+2), T)[:,:K+1] if wide else rng.uniform(.05, .9, T))
        lp = np.minimum(q+rng.normal(scale=.8 if rng.random()<.7 else .02, size=q.shape)-(.5 if wide else 0), -1e-3)
        if wide: lp[:,1:] = np.log(.97*np.exp(lp[:,1:])/np.maximum(np.exp(lp[:,1:]).sum(1, keepdims=True), .97))
        rows.append((lp, q, np.full(T, rng.normal()), (rng.random(T)<.8)|(np.arange(T)==0)))
    return rows

def flat(xs): return np.concatenate([np.ravel(x) for x in xs])
def joined(rows): return [np.concatenate(x) for x in zip(*rows)], np.repeat(np.arange(len(rows)), [len(r[2]) for r in rows])

@each_way
def test_reference_against_loops(name, params):
    p = loss_params(name, **params)
    for seed in range(20):
        rows = random_rows(12, 'k' in p, seed)
        (lp,q,A,mask),of = joined(rows)
        _,g = token_loss(name, lp, q, A, mask, of, **params)
        want = np.concatenate(by_loops(name, rows, p))
        np.testing.assert_allclose(g, want, rtol=1e-12, atol=1e-14)

@each_way
def test_torch_against_reference(name, params):
    rows = random_rows(30, 'k' in LOSSES[name].params, 100)
    (lp,q,A,mask),of = joined(rows)
    ts = [torch.tensor(r[0], requires_grad=True) for r in rows]
    L,_ = torch_loss(name, [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], **params)(None, ts)
    L.backward()
    loss,g = token_loss(name, lp, q, A, mask, of, **params)
    assert float(L.detach())==pytest.approx(loss, rel=1e-9)
    np.testing.assert_allclose(flat(t.grad.numpy() for t in ts), g.ravel(), rtol=1e-9, atol=1e-12)

def test_flash_drops_at_its_threshold():
    "Just above its own divergence a sequence is kept, just below it is dropped, in both forms; the divergence is the sampler's from the trainer, not the other way round."
    clamp = lambda x: min(max(math.exp(x), 1e-6), 1-1e-6)
    for lp,q,A,_ in random_rows(40, False, 7):
        P,Q = [[clamp(v) for v in x] for x in (lp, q)]
        D = sum(b*math.log(b/a)+(1-b)*math.log((1-b)/(1-a)) for a,b in zip(P, Q))/len(P)
        for delta,kept in ((D*(1+1e-6), True), (D*(1-1e-6), False)):
            assert bool(token_loss('flash', lp, q, A, delta=delta)[1].any())==kept
            assert bool(torch_loss('flash', [q], [A], delta=delta)(None, [torch.tensor(lp)])[0]!=0)==kept

# ---- through the SDK
KEY,PROMPT = 'tml-local',list(b'2+3=5; 4+4=8; 1+6=')

@pytest.fixture(scope='module')
def server(tmp_path_factory):
    with serve(random_model('qwen3', tmp_path_factory.mktemp('models')/'qwen3'), device='cpu') as s: yield s

@pytest.fixture(scope='module')
def service(server):
    sc = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
    yield sc
    sc.close('success').result()

class Trainer:
    "A training client whose gradient can be read."
    def __init__(self, server, service):
        self.server = server
        self.client = resolve(service.create_lora_training_client(base_model=next(iter(server.app.backends)), rank=4, seed=SEED))
        self.lora = server.app.models[self.client.get_info().model_id].lora
    def gradient(self, submit):
        self.lora.grads = None; out = submit().result()
        g = torch.cat([x.double().flatten() for x in self.lora.grads.values()]).numpy(); self.lora.grads = None
        return out,g

@pytest.fixture(scope='module')
def trainer(server, service):
    "After one step, so that both matrices of the adapter have a gradient."
    t = Trainer(server, service)
    d = types.Datum(model_input=types.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs=dict(target_tokens=np.array(PROMPT[1:]), weights=np.ones(len(PROMPT)-1, np.float32)))
    t.client.forward_backward([d], 'cross_entropy').result()
    t.client.optim_step(types.AdamParams(learning_rate=1e-2, beta1=.9, beta2=.95, eps=1e-8)).result()
    return t

@pytest.fixture(scope='module')
def batch(server, service, trainer):
    "Eight rollouts of the trainer's own sampler, and the same with other tokens; the sampler's log-probabilities are then moved, so that ratios lie on both sides of every threshold."
    sampler = resolve(service.create_sampling_client(model_path=trainer.client.save_weights_for_sampler('losses').result().path))
    r = sampler.sample(types.ModelInput.from_ints(PROMPT), 8, types.SamplingParams(max_tokens=12, temperature=1., seed=3, stop=[])).result()
    rolls = [Rollout(str(i), tuple(PROMPT), tuple(map(int, s.tokens)), tuple(map(float, s.logprobs)), 'length', '', None, 0., None) for i,s in enumerate(r.sequences)]
    rng,A = np.random.default_rng(SEED), [1., -.5, .7, -.3, 1.2, .4, -.9, .8]
    scale = [.8, .8, .05, .8, .05, .8, .05, .8]
    wide = {how: with_others(sampler, rolls, how, K, (SEED, 0)) for how in ('draws','top20','topk')}
    def moved(rolls):
        cols = [token_columns(r, a) for r,a in zip(rolls, A)]
        out = trainer.client.forward([make_datum(c, side=False) for c in cols], 'cross_entropy').result()
        for o,c in zip(out.loss_fn_outputs, cols): np.testing.assert_allclose(o['logprobs'].to_numpy()[c['mask']==1], c['sampler_logp'][c['mask']==1], atol=1e-4) # each token stands at its own position
        for c,s in zip(cols, scale): c['sampler_logp'] = np.where((c['mask']==1).reshape(-1, *[1]*(c['targets'].ndim-1)), c['sampler_logp']+rng.normal(scale=s, size=c['targets'].shape), 0).astype(np.float32)
        return cols
    return {None: moved(rolls), **{how: moved(rs) for how,rs in wide.items()}}

def columns_for(batch, name, params): return batch[loss_params(name, **params).get('auxiliary')]
def reference(name, params, logps, columns):
    each,of = (lambda k: np.concatenate([c[k] for c in columns])), np.repeat(np.arange(len(columns)), [len(c['mask']) for c in columns])
    loss,g = token_loss(name, np.concatenate(logps), each('sampler_logp'), each('advantage'), each('mask'), of, **params)
    return loss, np.split(g, np.cumsum([len(c['mask']) for c in columns])[:-1])

@each_way
def test_endpoint_against_reference(trainer, batch, name, params):
    "Loss to 1e-5, and the gradient by the adapter's parameters to a cosine of 0.99999."
    columns = columns_for(batch, name, params)
    out,got = trainer.gradient(lambda: submit_loss(trainer.client, columns, name, params))
    loss,g = reference(name, params, trainer_logps(out, columns), columns)
    assert out.metrics['loss:sum']==pytest.approx(loss, rel=1e-5)
    _,stats = checked_loss(out, columns)
    assert .05<stats['ratio_above_2_frac']<.95 and .05<stats['ratio_below_half_frac']<.95
    linear = [types.Datum(model_input=types.ModelInput.from_ints(c['tokens'].tolist()), loss_fn_inputs=dict(target_tokens=c['targets'], weights=(-w).astype(np.float32))) for c,w in zip(columns, g)]
    _,want = trainer.gradient(lambda: trainer.client.forward_backward(linear, 'cross_entropy'))
    m = same_gradient(got, want, rtol=1e-4, min_cosine=.99999)
    assert m.ok, m
    silent = no_gradient_frac(out, columns, name, params)
    assert (0<silent<1)==(name in ('truncated','ppo','icepop','gspo','flash') or params.get('correction')=='mis')

def test_others_are_told_apart(trainer, batch):
    "The auxiliary tokens do move the gradient: without them, or with those of another position, it is another."
    columns = batch['draws']; get = lambda cols: trainer.gradient(lambda: submit_loss(trainer.client, cols, 'centered_mc', {}))[1]
    right = get(columns)
    alone = trainer.gradient(lambda: submit_loss(trainer.client, [dict(c, targets=c['targets'][:,0], sampler_logp=c['sampler_logp'][:,0]) for c in columns], 'reinforce', {}))[1]
    shifted = get([dict(c, targets=np.column_stack([c['targets'][:,:1], np.roll(c['targets'][:,1:], 1, axis=0)])) for c in columns])
    assert all(same_gradient(right, x, rtol=1., min_cosine=-1.).relative_difference>.05 for x in (alone, shifted))

@pytest.mark.parametrize('name,params', [('centered_mc',{}), ('centered_topk',dict(k=K, correction='tis'))])
def test_nine_datums_make_one_gradient(server, service, trainer, batch, monkeypatch, name, params):
    "An endpoint that refuses targets [T, K] gets one datum for each column, and the client that asked goes on."
    columns = columns_for(batch, name, params)
    one,g1 = trainer.gradient(lambda: submit_loss(trainer.client, columns, name, params))
    engine = type(next(iter(server.app.backends.values())).engine); real = engine.forward_backward
    def narrow(self, lora, data, *a, **kw):
        if any(np.ndim(d.inputs['target_tokens'])==2 for d in data): raise ValueError('target_tokens must be model_input shifted by one')
        return real(self, lora, data, *a, **kw)
    monkeypatch.setattr(engine, 'forward_backward', narrow)
    t = Trainer(server, service); t.lora.params.update(trainer.lora.params)
    nine,g9 = t.gradient(lambda: submit_loss(t.client, columns, name, params))
    assert not takes_columns(t.client, None) and len(nine.loss_fn_outputs)==(1+K)*len(one.loss_fn_outputs)
    m = same_gradient(g1, g9, rtol=1e-5, min_cosine=.99999); assert m.ok, m
    assert checked_loss(nine, columns)[0]==pytest.approx(checked_loss(one, columns)[0], rel=1e-6)
    for a,b in zip(trainer_logps(one, columns), trainer_logps(nine, columns)): np.testing.assert_allclose(a, b, atol=1e-5)
    assert checked_loss(nine, columns)[1]['datums_per_rollout']==1+K

@pytest.mark.parametrize('name', ['importance_sampling', 'truncated', 'gspo'])
def test_split_calls_accumulate(trainer, batch, name):
    "Eight datums in one call or in two: one gradient, for every loss that is a sum over sequences."
    columns = batch[None]; p = WIDE if name=='gspo' else {}
    _,whole = trainer.gradient(lambda: submit_loss(trainer.client, columns, name, p))
    def halves(): submit_loss(trainer.client, columns[:4], name, p).result(); return submit_loss(trainer.client, columns[4:], name, p)
    _,parts = trainer.gradient(halves)
    assert same_gradient(whole, parts, rtol=1e-4, min_cosine=.99999).ok

@pytest.mark.parametrize('name', ['importance_sampling', 'tis', 'truncated', 'icepop', 'gspo', 'flash', 'centered_mc'])
def test_an_overflow_stops_before_the_optimizer(server, service, batch, name):
    "Caps, masks and dropped sequences would all hide it."
    t = Trainer(server, service); columns = [dict(c, sampler_logp=c['sampler_logp'].copy()) for c in columns_for(batch, name, {})]
    columns[2]['sampler_logp'][-1] = -800.
    with pytest.raises((FloatingPointError, tinker.RequestFailedError), match='datum 2'): submit_loss(t.client, columns, name, {}).result()
    assert t.lora.grads is None and t.lora.step==0

def test_a_datum_without_a_gradient(server, service, batch, monkeypatch):
    "Found before anything is sent; the SDK itself finds it when the client is lost."
    t = Trainer(server, service); columns = batch[None][:2]; data = [make_datum(c, side=False) for c in columns]
    forgets = lambda data, logps: (-logps[0].sum(), {})
    with pytest.raises(ValueError, match='datum 1 gets no gradient'): dry_run(forgets, data, [c['sampler_logp'] for c in columns])
    assert t.client.forward(data, 'cross_entropy').result()
    with pytest.raises(ValueError, match='No gradient computed'): t.client.forward_backward_custom(data, forgets).result()
    t = Trainer(server, service)
    monkeypatch.setitem(LOSSES, 'forgetful', replace(LOSSES['truncated'], torch=lambda logp, ratio, log_ratio, A, cap: -(logp.detach()*A)))
    with pytest.raises(ValueError, match='datum 0 gets no gradient'): submit_loss(t.client, columns, 'forgetful', {})
    assert t.client.forward(data, 'cross_entropy').result() # nothing was sent, so the client goes on
    empty = [dict(c, mask=c['mask']*(i!=1)) for i,c in enumerate(columns)]
    with pytest.raises(ValueError, match='datum 1 has no token'): submit_loss(t.client, empty, 'truncated', {})

def test_loss_zero_is_no_alarm_and_gradient_zero_is(trainer, batch):
    "At ratio 1 with centred advantages the loss is 0 and the gradient is not; an endpoint that loses the advantages has no gradient."
    out,_ = trainer.gradient(lambda: submit_loss(trainer.client, batch[None], 'importance_sampling', {}))
    columns = [dict(c, sampler_logp=np.where(c['mask']==1, lp, 0).astype(np.float32), advantage=c['mask']*np.float32(a/c['mask'].sum())) for c,lp,a in zip(batch[None][:2], trainer_logps(out, batch[None]), (.5,-.5))]
    out,g = trainer.gradient(lambda: submit_loss(trainer.client, columns, 'importance_sampling', {}))
    assert abs(out.metrics['loss:sum'])<1e-5 and np.linalg.norm(g)>1e-2
    lost = [dict(c, advantage=np.zeros_like(c['advantage'])) for c in columns]
    _,zero = trainer.gradient(lambda: submit_loss(trainer.client, lost, 'importance_sampling', {}))
    assert not same_gradient(g, zero, rtol=1e9, min_cosine=-1.).ok
