"""One client's way through the whole wire, for any SDK from 0.32 to 0.38: python wire_flow.py BASE_URL BASE_MODEL
Needs tinker, torch and numpy only, so that another environment can run it. Prints one JSON line of what it saw."""
import json, os, sys, tempfile
os.environ['TINKER_TELEMETRY'] = '0'
import numpy as np, tinker, torch
from tinker import types

PROMPT = list(b'2+3=5; 4+4=8; 1+6=')
KEY = 'tml-local'
ADAM = types.AdamParams(learning_rate=1e-2, beta1=.9, beta2=.95, eps=1e-8, weight_decay=.01, grad_clip_norm=1.)

def now(x): return x.result() if hasattr(x, 'result') else x   # clients up to 0.37, futures since
def text(ids): return types.ModelInput.from_ints(list(ids))
def params(n=8, **kw): return types.SamplingParams(max_tokens=n, **{'temperature': 1., **kw})
def seqs(r): return [(list(map(int, s.tokens)), [float(x) for x in s.logprobs]) for s in r.sequences]

def rl_datum(tokens, logprobs, advantage):
    "True shifted targets; no advantage on the prompt."
    full = PROMPT+tokens; pre = len(PROMPT)-1
    return types.Datum(model_input=text(full[:-1]), loss_fn_inputs=dict(target_tokens=np.array(full[1:], np.int64),
        logprobs=np.array([0.]*pre+logprobs, np.float32), advantages=np.array([0.]*pre+[advantage]*len(tokens), np.float32)))

def is_loss(sides):
    "Importance sampling with its tensors in a closure, as every SDK takes it."
    def loss(data, logps):
        L = -sum((torch.exp(lp-torch.tensor(q))*torch.tensor(A)).sum() for lp,(q,A) in zip(logps, sides, strict=True))
        return L,{'custom_is': float(L.detach())}
    return loss

def sides(data): return [(d.loss_fn_inputs['logprobs'].to_numpy(), d.loss_fn_inputs['advantages'].to_numpy()) for d in data]
def bare(data): return [types.Datum(model_input=d.model_input, loss_fn_inputs=dict(target_tokens=d.loss_fn_inputs['target_tokens'])) for d in data]
def centered(data, logps): return sum((-x[:,0]+x[:,1:].mean(1)).sum() for x in logps),{}

def fails(f, error, *words):
    try: f()
    except error as e:
        assert all(w in str(e) for w in words) and str(getattr(e, 'category', 'user')).lower().endswith('user'), (e, e.category)
        return type(e).__name__
    raise AssertionError(f'{words}: no error')

def flow(base_url, base_model, seed=0):
    "Everything in order; raises AssertionError at the first thing that is not as it should be."
    sc = tinker.ServiceClient(base_url=base_url, api_key=KEY)
    tc = now(sc.create_lora_training_client(base_model=base_model, rank=4, seed=seed)); info = tc.get_info()
    assert info.model_data.model_name==base_model and info.lora_rank==4, info

    s0 = now(sc.create_sampling_client(model_path=tc.save_weights_for_sampler('v0').result().path))
    rolls = [seqs(s0.sample(text(PROMPT), 1, params(seed=i)).result())[0] for i in range(4)]+seqs(s0.sample(text(PROMPT), 4, params(seed=9)).result())
    data = [rl_datum(t, lp, 1. if i%2 else -1.) for i,(t,lp) in enumerate(rolls)]

    fb = tc.forward_backward(data, 'importance_sampling').result(); pre = len(PROMPT)-1
    gap = max(float(np.abs(o['logprobs'].to_numpy()[pre:]-np.array(lp)).max()) for o,(_,lp) in zip(fb.loss_fn_outputs, rolls, strict=True))
    assert gap<=1e-4, gap
    fc = tc.forward_backward_custom(bare(data), is_loss(sides(data))).result()
    assert abs(fc.metrics['loss:sum']-fb.metrics['loss:sum'])<1e-3, (fc.metrics, fb.metrics)
    step = tc.optim_step(ADAM).result()

    p1 = tc.save_weights_for_sampler('v1').result().path; s1 = now(sc.create_sampling_client(model_path=p1))
    eph = now(tc.save_weights_and_get_sampling_client())
    greedy = [seqs(s.sample(text(PROMPT), 1, params(temperature=0)).result())[0] for s in (s0, s1, eph)]
    assert greedy[0]!=greedy[1] and greedy[1]==greedy[2], greedy
    lp = [s.compute_logprobs(text(PROMPT)).result() for s in (s0, s1)]
    assert lp[0][0] is None and len(lp[0])==len(PROMPT) and lp[0]!=lp[1]
    last = s1.compute_logprobs(text(PROMPT), prompt_logprobs_last_n=3).result()
    assert last[:-3]==[None]*(len(PROMPT)-3) and np.allclose(last[-3:], lp[1][-3:], atol=1e-5), last

    top = s1.sample(text(PROMPT), 1, params(1), include_prompt_logprobs=True, topk_prompt_logprobs=20).result().topk_prompt_logprobs
    assert top[0] is None and len(top[1])==20 and top[1][0][1]>=top[1][-1][1]
    alt = s1.sample(text(PROMPT), 1, params(1, seed=2), prompt_alt_tokens_k=8).result().prompt_alt_tokens
    assert list(alt.tokens.shape)==[len(PROMPT)-1, 8]==list(alt.logprobs.shape)
    ids = np.full((len(PROMPT)-1, 2), -1, np.int64); ids[3,1] = PROMPT[4]
    for t in (types.TensorData.from_numpy(ids), types.TensorData.from_torch_sparse(torch.tensor(ids), pad_value=-1)):
        got = s1.sample(text(PROMPT), 1, params(1), target_prompt_logprobs=t).result().target_prompt_logprobs.to_torch().to_dense().numpy()
        assert abs(got[3,1]-lp[1][4])<1e-4, (got[3], lp[1][4])

    tokens,logps = rolls[0]; T = len(PROMPT)+len(tokens)-1
    two = np.tile(np.array((PROMPT+tokens)[1:])[:,None], (1, 9)); two[:,1:] = np.arange(40, 48)
    f2 = tc.forward_backward_custom([types.Datum(model_input=text((PROMPT+tokens)[:-1]), loss_fn_inputs=dict(target_tokens=two))], centered).result()
    assert list(f2.loss_fn_outputs[0]['logprobs'].shape)==[T, 9]
    w = torch.zeros(T, 9); w[-1,3] = 1.   # mostly zeros: the SDK sends it as CSR rows
    ce = types.Datum(model_input=text((PROMPT+tokens)[:-1]), loss_fn_inputs=dict(target_tokens=two, weights=types.TensorData.from_torch_sparse(w)))
    one = tc.forward(data=[ce], loss_fn='cross_entropy').result()
    assert abs(one.metrics['loss:sum']+one.loss_fn_outputs[0]['logprobs'].to_numpy()[-1,3])<1e-5

    state = tc.save_state('ck').result().path
    t2 = now(sc.create_training_client_from_state_with_optimizer(state)); t3 = now(sc.create_training_client_from_state(state))
    same = [[o['logprobs'].tolist() for o in t.forward(data, 'importance_sampling').result().loss_fn_outputs] for t in (tc, t2, t3)]
    assert same[0]==same[1]==same[2] and t2.model_id!=tc.model_id
    errors = dict(
        loss=fails(lambda: tc.forward_backward(data, 'nope').result(), tinker.RequestFailedError, 'nope', 'importance_sampling'),
        shape=fails(lambda: tc.forward_backward([types.Datum(model_input=text([1,2]), loss_fn_inputs=dict(target_tokens=np.array([1,2,3])))], 'cross_entropy').result(), tinker.RequestFailedError, 'target_tokens'),
        taken=fails(lambda: tc.save_state('ck').result(), tinker.RequestFailedError, 'overwrite'),
        sampler=fails(lambda: tc.save_weights_for_sampler('v0').result(), tinker.RequestFailedError, 'never change'),
        kind=fails(lambda: now(sc.create_sampling_client(model_path=state)).get_base_model(), tinker.BadRequestError, 'save_weights_for_sampler'),
        none=fails(lambda: now(sc.create_sampling_client(model_path=p1+'x')).get_base_model(), tinker.NotFoundError, p1+'x'),
        model=fails(lambda: now(sc.create_lora_training_client(base_model='gpt-0')).get_info(), tinker.NotFoundError, 'gpt-0'),
        tokens=fails(lambda: s1.sample(text(PROMPT), 1, types.SamplingParams()).result(), tinker.BadRequestError, 'max_tokens'))
    assert tc.save_state('ck', overwrite=True).result().path==state   # a failed request uses up its turn, so the client goes on
    tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result()
    out = dict(sdk=tinker.__version__, rolls=rolls, greedy=greedy, logprobs=lp[1][1:], loss=fb.metrics['loss:sum'], norm=step.metrics, gap=gap, errors=errors)
    sc.close('success').result()
    return out

if __name__=='__main__': print(json.dumps(flow(*sys.argv[1:])))
