"The Tinker wire, spoken by the real SDK (this one and 0.33) to the real server over loopback."
import json, os, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
os.environ['OMP_NUM_THREADS'] = '1'; os.environ['TINKER_TELEMETRY'] = '0'
import httpx, numpy as np, pytest, tinker, torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
import wire_flow
from wire_flow import ADAM, KEY, PROMPT, bare, flow, is_loss, now, params, rl_datum, seqs, sides, text
from rxnb.connect import connect, save_adapter
from rxnb.decode import SampleRequest
from rxnb.engine import RANDOM_KINDS, random_model
from rxnb.serve import serve

root = Path(__file__).parents[1]
torch.set_num_threads(1)

@pytest.fixture(scope='session')
def models(tmp_path_factory):
    made = {}
    def get(kind):
        if kind not in made: made[kind] = random_model(kind, tmp_path_factory.mktemp('models')/kind)
        return made[kind]
    return get

@pytest.fixture(scope='session')
def server(models):
    with serve(models('qwen3'), device='cpu') as s: s.name = str(models('qwen3')); yield s

@pytest.fixture
def service(server):
    sc = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
    yield sc
    sc.close('success').result()

def trainer(sc, server, **kw): return now(sc.create_lora_training_client(base_model=server.name, rank=4, **{'seed': 0, **kw}))

def rolled(sc, server):
    "A trainer, its first sampler, and eight datums sampled from it."
    tc = trainer(sc, server); s = now(sc.create_sampling_client(model_path=tc.save_weights_for_sampler('v0').result().path))
    rolls = seqs(s.sample(text(PROMPT), 8, params(seed=1)).result())
    return tc,s,[rl_datum(t, lp, 1. if i%2 else -1.) for i,(t,lp) in enumerate(rolls)]

# ---- the contract
@pytest.mark.parametrize('kind', RANDOM_KINDS)
def test_flow_of_this_sdk(models, kind):
    with serve(models(kind), device='cpu') as s: flow(s.base_url, str(models(kind)))

def test_flow_of_sdk_033(server):
    "The same flow by an older SDK in another environment; and it sees the same numbers."
    py = Path(os.environ.get('RXNB_SDK33_PYTHON') or root/'.venv-sdk33/bin/python')
    if not py.exists(): pytest.fail(f'there is no {py}: make .venv-sdk33, or set RXNB_SDK33_PYTHON to a Python that has tinker 0.33.0 and torch')
    r = subprocess.run([py, root/'tests/wire_flow.py', server.base_url, server.name], capture_output=True, text=True, timeout=300)
    assert r.returncode==0, r.stderr[-3000:]
    old,new = json.loads(r.stdout.splitlines()[-1]),flow(server.base_url, server.name)
    assert old.pop('sdk')=='0.33.0' and new.pop('sdk')==tinker.__version__
    assert json.loads(json.dumps(new))==old

# ---- sampling
def test_company_changes_nothing(service, server):
    "Same seed, same tokens and log-probabilities, alone or among 32."
    s = now(service.create_sampling_client(base_model=server.name))
    ask = lambda i: s.sample(text(PROMPT[:4+i%7]), 1+i%2, params(6+i%5, seed=i))
    alone = [seqs(ask(i).result()) for i in range(32)]
    assert [seqs(f.result()) for f in [ask(i) for i in range(32)]]==alone
    free = [seqs(f.result())[0][0] for f in [s.sample(text(PROMPT), 1, params(12, stop=[])) for _ in range(8)]] # twelve tokens each, so that chance makes no two of them equal
    assert len(set(map(tuple, free)))==8     # without a seed each request gets its own

def test_sixteen_clients_get_their_own_answers(server):
    "Each client's answers are those that the engine gives to its requests alone."
    engine = server.app.backends[server.name].engine
    def request(c, i): return dict(prompt=PROMPT[:3+(c+i)%9]+[40+c], num_samples=1+i%2, max_tokens=5+i, temperature=1., seed=100*c+i)
    def client(c):
        sc = tinker.ServiceClient(base_url=server.base_url, api_key=KEY)
        s = now(sc.create_sampling_client(base_model=server.name))
        fs = [s.sample(text(r['prompt']), r['num_samples'], params(r['max_tokens'], seed=r['seed'])) for r in (request(c, i) for i in range(4))]
        out = [seqs(f.result()) for f in fs]; sc.close('success').result()
        return out
    with ThreadPoolExecutor(16) as ex: got = list(ex.map(client, range(16)))
    for c in range(16):
        for i in range(4):
            want = engine.sample(engine.snapshot(None), [SampleRequest(**request(c, i))])[0].sequences
            assert [t for t,_ in got[c][i]]==[list(map(int, s.tokens)) for s in want], (c, i)
            np.testing.assert_array_equal([lp for _,l in got[c][i] for lp in l], np.concatenate([s.logprobs for s in want]))

def test_a_sampler_is_frozen(service, server):
    "Bit for bit over three steps. It is taken after a step: before one, B is zero and hides what A does."
    tc,_,data = rolled(service, server)
    def learn(): fb = tc.forward_backward(data, 'importance_sampling'); tc.optim_step(ADAM).result(); return fb.result().metrics['loss:sum']
    learn(); named = now(service.create_sampling_client(model_path=tc.save_weights_for_sampler('v1').result().path)); unnamed = now(tc.save_weights_and_get_sampling_client())
    look = lambda: [(s.compute_logprobs(text(PROMPT)).result(), seqs(s.sample(text(PROMPT), 4, params(seed=5)).result())) for s in (named, unnamed)]
    before = look(); assert before[0]==before[1]
    moved = [(learn(), look()) for _ in range(3)]
    assert all(l==before for _,l in moved) and len({m for m,_ in moved})==3

def test_two_models_do_not_meet(service, server):
    a,b = trainer(service, server, seed=1),trainer(service, server, seed=1); _,_,data = rolled(service, server)
    for _ in range(2): a.forward_backward(data, 'importance_sampling').result(); a.optim_step(ADAM).result()
    first = lambda t: t.forward(data, 'importance_sampling').result().loss_fn_outputs[0]['logprobs'].tolist()
    assert first(a)!=first(b)==first(trainer(service, server, seed=1))

def test_trained_and_deleted_samplers(service, server):
    tc,s,_ = rolled(service, server); path = tc.save_weights_for_sampler('gone').result().path
    gone = now(service.create_sampling_client(model_path=path)); gone.compute_logprobs(text(PROMPT)).result()
    service._rest_client().delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError, match='gone'): gone.compute_logprobs(text(PROMPT)).result()
    assert [c.tinker_path for c in service._rest_client().list_checkpoints(tc.model_id).result().checkpoints]==[f'tinker://{tc.model_id}/sampler_weights/v0']
    s.compute_logprobs(text(PROMPT)).result()

# ---- training
def test_a_state_loads_into_a_living_model(service, server):
    "The way of SDKs up to 0.37, still there in this one."
    tc,_,data = rolled(service, server)
    look = lambda: tc.forward(data, 'importance_sampling').result().loss_fn_outputs[0]['logprobs'].tolist()
    def learn(): tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result(); return look()
    learn(); state,was = tc.save_state('s').result().path,look(); then = learn()
    with pytest.warns(FutureWarning): tc.load_state_with_optimizer(state).result()
    assert look()==was and learn()==then
    with pytest.warns(FutureWarning): tc.load_state(state).result()
    assert look()==was and learn()!=then
    other = now(service.create_lora_training_client(base_model=server.name, rank=2))
    with pytest.raises(tinker.RequestFailedError, match='does not fit'), pytest.warns(FutureWarning): other.load_state(state).result()

traces = pytest.mark.skipif(not hasattr(tinker.ServiceClient, 'create_custom_loss'), reason='came with SDK 0.36')

def nll(logprobs, weights):
    loss = -(logprobs*weights).sum()
    return loss,{'custom/nll:sum': loss}
RANKS = dict(logprobs=1, weights=1)
one = lambda **kw: types.Datum(model_input=text([1,2,3]), loss_fn_inputs=dict(dict(target_tokens=np.array([2,3,4]), weights=np.array([1,2,.5], np.float32)), **kw))

@traces
def test_a_traced_loss_runs_on_the_server(service, server):
    tc = trainer(service, server); handle = service.create_custom_loss(nll, input_ranks=RANKS).result(); lora = server.app.models[tc.model_id].lora
    assert handle.loss_id in server.app.losses
    def grad(f):
        lora.grads = None; m = f().result().metrics; g = torch.cat([x.flatten() for x in lora.grads.values()]); lora.grads = None
        return m,g
    (a,g),(b,h) = (grad(f) for f in (lambda: tc.forward_backward_custom([one(), one()], handle), lambda: tc.forward_backward([one(), one()], 'cross_entropy')))
    assert abs(a['loss:sum']-b['loss:sum'])<1e-4 and abs(a['custom/nll:sum']-a['loss:sum'])<1e-4 and torch.equal(g, h) and bool(g.any())

@traces
def test_what_a_traced_loss_may_not(service, server):
    "An operation that is not on the list, a loss of another session, and one that is not finite; the client goes on."
    tc = trainer(service, server)
    def dropped(logprobs, weights): return torch.nn.functional.dropout(logprobs, .5).sum(), {}
    with pytest.raises(tinker.BadRequestError, match='dropout'): service.create_custom_loss(dropped, input_ranks=RANKS).result()
    def blown(logprobs, weights): return (-logprobs*1e30).exp().sum(), {}
    handle = service.create_custom_loss(blown, input_ranks=RANKS).result()
    with pytest.raises(tinker.RequestFailedError, match='datum 0: blown or its derivative is not finite'): tc.forward_backward_custom([one()], handle).result()
    assert server.app.models[tc.model_id].lora.grads is None
    other = tinker.ServiceClient(base_url=server.base_url, api_key=KEY); theirs = trainer(other, server)
    for config in (dict(loss_id=handle.loss_id), {}):
        with pytest.raises(tinker.RequestFailedError, match='no loss'): theirs.forward_backward([one()], 'custom', config).result()
    for c in (tc, theirs): assert c.forward([one()], 'cross_entropy').result(timeout=30).metrics['loss:sum']>0

@traces
def test_a_session_takes_its_losses_along(server):
    s = tinker.ServiceClient(base_url=server.base_url, api_key=KEY); handle = s.create_custom_loss(nll, input_ranks=RANKS).result()
    session = handle.loss_id.split(':')[0]; assert handle.loss_id in server.app.losses
    server.app.drop(session); assert handle.loss_id not in server.app.losses

def test_custom_gradient_is_the_built_in_one(service, server):
    tc,_,data = rolled(service, server); lora = server.app.models[tc.model_id].lora
    def grad(f):
        lora.grads = None; f().result(); g = torch.cat([x.double().flatten() for x in lora.grads.values()]); lora.grads = None
        return g
    a = grad(lambda: tc.forward_backward(data, 'importance_sampling')); b = grad(lambda: tc.forward_backward_custom(bare(data), is_loss(sides(data))))
    tc.forward(data, 'importance_sampling').result(); assert lora.grads is None     # looking is not learning
    assert float(a.norm())>0 and float(a@b/(a.norm()*b.norm()))>=.99999 and float((a-b).abs().max())<1e-5

def test_a_bad_datum_leaves_no_gradient(service, server):
    tc,_,data = rolled(service, server)
    bad = types.Datum(model_input=text([1,2]), loss_fn_inputs=dict(target_tokens=np.array([1,9999]), weights=np.ones(2, np.float32)))
    with pytest.raises(tinker.RequestFailedError, match='datum 1'):
        tc.forward_backward([types.Datum(model_input=text([1,2]), loss_fn_inputs=dict(target_tokens=np.array([1,2]), weights=np.ones(2, np.float32))), bad], 'cross_entropy').result()
    assert server.app.models[tc.model_id].lora.grads is None

def test_states_survive_the_server(models, tmp_path):
    "What was saved in a folder is there when another server starts on it, and what was not is not."
    name = str(models('llama')); look = lambda s: s.compute_logprobs(text(PROMPT)).result()
    with serve(name, device='cpu', checkpoint_dir=tmp_path) as s:
        s.name = name; sc = tinker.ServiceClient(base_url=s.base_url, api_key=KEY); tc,_,data = rolled(sc, s)
        tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result()
        sampler,state = tc.save_weights_for_sampler('v1').result().path,tc.save_state('s1').result().path
        was = look(now(sc.create_sampling_client(model_path=sampler)))
        tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result()
        then = tc.forward(data, 'importance_sampling').result().loss_fn_outputs[0]['logprobs'].tolist()
        sc.close('success').result()
    assert sorted(p.relative_to(tmp_path).parts[1:] for p in tmp_path.rglob('*.*'))==[('sampler_weights','v0.safetensors'), ('sampler_weights','v1.safetensors'), ('weights','s1.safetensors')]
    with serve(name, device='cpu', checkpoint_dir=tmp_path) as s:
        sc = tinker.ServiceClient(base_url=s.base_url, api_key=KEY)
        assert look(now(sc.create_sampling_client(model_path=sampler)))==was
        tc = now(sc.create_training_client_from_state_with_optimizer(state))
        tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result()
        assert tc.forward(data, 'importance_sampling').result().loss_fn_outputs[0]['logprobs'].tolist()==then
        sc.close('success').result()

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['qwen3', 'llama'])
def test_peft_reads_an_exported_adapter(models, tmp_path, kind):
    "Log-probabilities by transformers and PEFT, another program in another environment, are the sampler's."
    py = Path(os.environ.get('RXNB_COOKBOOK_PYTHON') or root/'.venv-cookbook/bin/python')
    if not py.exists(): pytest.fail(f'there is no {py}: make .venv-cookbook, or set RXNB_COOKBOOK_PYTHON to a Python that has peft')
    with serve(models(kind), device='cpu', checkpoint_dir=tmp_path/'ck') as s:
        s.name = str(models(kind)); sc = tinker.ServiceClient(base_url=s.base_url, api_key=KEY); tc,_,data = rolled(sc, s)
        for _ in range(3): tc.forward_backward(data, 'importance_sampling').result(); tc.optim_step(ADAM).result()
        assert set(save_adapter(sc, tc, tmp_path/'adapter', 'x'))=={'adapter_config.json', 'adapter_model.safetensors'}
        want = [x for x in (now(tc.save_weights_and_get_sampling_client())).compute_logprobs(text(PROMPT)).result()[1:]]
        sc.close('success').result()
    r = subprocess.run([py, root/'tests/peft_reads.py', models(kind), tmp_path/'adapter', json.dumps(PROMPT)], capture_output=True, text=True, timeout=120, env={k: v for k,v in os.environ.items() if k!='PYTHONPATH'})
    assert r.returncode==0, r.stderr[-3000:]
    base,got = json.loads(r.stdout.splitlines()[-1])
    np.testing.assert_allclose(got, want, atol=2e-5); assert np.abs(np.array(base)-got).max()>.1

# ---- several of everything
def test_two_base_models_in_one_server(models):
    "Each client gets the model it asked for; a checkpoint goes back to its own."
    names = [str(models(k)) for k in ('qwen3', 'llama')]
    with serve(names, device='cpu') as s:
        sc = tinker.ServiceClient(base_url=s.base_url, api_key=KEY); seen = {}
        for n in names:
            tc = now(sc.create_lora_training_client(base_model=n, rank=2, seed=0)); assert tc.get_info().model_data.model_name==n
            state = tc.save_state('s').result().path; again = now(sc.create_training_client_from_state(state)); assert again.get_info().model_data.model_name==n
            seen[n] = [now(f()).compute_logprobs(text(PROMPT)).result() for f in (lambda: sc.create_sampling_client(base_model=n), lambda: sc.create_sampling_client(model_path=tc.save_weights_for_sampler('v').result().path))]
            assert seen[n][0]==seen[n][1]
        assert seen[names[0]]!=seen[names[1]]
        sc.close('success').result()
    alone = {}
    for n in names:
        with serve(n, device='cpu') as s:
            sc = tinker.ServiceClient(base_url=s.base_url, api_key=KEY); alone[n] = now(sc.create_sampling_client(base_model=n)).compute_logprobs(text(PROMPT)).result(); sc.close('success').result()
    assert alone=={n: v[0] for n,v in seen.items()}

def test_a_checkpoint_goes_when_its_time_is_over(service, server, monkeypatch):
    tc,_,_ = rolled(service, server); state = tc.save_state('short', ttl_seconds=3600).result().path; kept = tc.save_state('long').result().path
    real = time.time; monkeypatch.setattr(time, 'time', lambda: real()+3601)
    with pytest.raises(tinker.NotFoundError, match='short'): now(service.create_training_client_from_state(state)).get_info()
    now(service.create_training_client_from_state(kept)).get_info()
    monkeypatch.undo()
    for ttl in (0, -5, 10**10):
        with pytest.raises(tinker.RequestFailedError, match='ttl_seconds'): tc.save_state(f't{abs(ttl)}', ttl_seconds=ttl).result()

def test_links_to_files_are_signed(models, tmp_path):
    "An export is fetched by a link that holds for an hour, and by nothing else; with a token the link needs none."
    with serve(models('llama'), device='cpu', token='tml-secret') as s:
        sc = tinker.ServiceClient(base_url=s.base_url, api_key='tml-secret'); tc = now(sc.create_lora_training_client(base_model=str(models('llama')), rank=2))
        path = tc.save_weights_external('x').result().path; urls = sc._rest_client().get_external_weights_urls(path).result().urls; url = urls['adapter_config.json']
        get = lambda u: httpx.get(u, trust_env=False).status_code
        assert get(url)==200 and get(url.split('?')[0])==401 and get(url.replace('config', 'konfig'))==401 and get(url[:-1]+('0' if url[-1]!='0' else '1'))==401
        assert get(url.replace('expires=', 'expires=9'))==401 and get(url.replace('/files/', '/checkpoints/'))==401
        sc.close('success').result()

# ---- the wire itself
class Raw:
    "A client by plain HTTP."
    def __init__(self, server):
        self.http = httpx.Client(base_url=server.base_url+'/api/v1/', timeout=60); self.session = self.post('create_session', {})[1]['session_id']
    def post(self, path, j=None, **kw):
        r = self.http.post(path, json=j, **kw)
        return r.status_code,r.json() if 'json' in r.headers['content-type'] else r.content
    def result(self, promise): return self.post('retrieve_future', dict(request_id=promise['request_id']))[1]
    def model(self, server, n=0, **kw):
        return self.post('create_model', dict(session_id=self.session, model_seq_id=n, base_model=server.name, lora_config=dict(rank=4, seed=0, **kw)))
    def fb(self, model, seq, tokens=(1,2,3)):
        d = types.Datum(model_input=text(tokens), loss_fn_inputs=dict(target_tokens=np.array(tokens), weights=np.ones(len(tokens), np.float32)))
        r = types.ForwardBackwardRequest(model_id=model, seq_id=seq, forward_backward_input=types.ForwardBackwardInput(data=[d], loss_fn='cross_entropy'))
        return self.post('forward_backward', content=forward_backward_request_to_proto(r).SerializeToString())

def test_sent_twice_is_done_once(server):
    raw = Raw(server); a,b = raw.model(server),raw.model(server)
    assert a==b and a[0]==200; m = raw.result(a[1])['model_id']; lora = server.app.models[m].lora
    assert raw.model(server, train_mlp=False)[0]==409
    one = raw.fb(m, 1); raw.result(one[1]); g = {k: v.clone() for k,v in lora.grads.items()}
    assert raw.fb(m, 1)==one and raw.result(one[1])==raw.result(one[1])
    assert all(torch.equal(v, lora.grads[k]) for k,v in g.items())
    status,o = raw.fb(m, 1, (3,2,1)); assert status==409 and 'seq_id 1' in o['detail']
    step = dict(model_id=m, seq_id=2, adam_params=ADAM.model_dump()); p = [raw.post('optim_step', step) for _ in range(3)]
    assert p[0]==p[1]==p[2] and raw.result(p[0][1])['metrics'] and lora.step==1
    assert raw.post('optim_step', {**step, 'adam_params': {**step['adam_params'], 'eps': 1.}})[0]==409
    s = raw.post('create_sampling_session', dict(session_id=raw.session, sampling_session_seq_id=0, base_model=server.name))[1]['sampling_session_id']
    ask = dict(sampling_session_id=s, seq_id=0, num_samples=2, prompt=dict(chunks=[dict(type='encoded_text', tokens=PROMPT)]), sampling_params=dict(max_tokens=4))
    x,y = raw.post('asample', ask),raw.post('asample', ask)
    assert x==y and len(x[1]['sample_sequence_ids'])==2 and raw.result(x[1])==raw.result(y[1])
    assert raw.post('asample', {**ask, 'num_samples': 1})[0]==409

def test_operations_run_in_the_order_of_their_numbers(server):
    raw = Raw(server); m = raw.result(raw.model(server)[1])['model_id']; lora = server.app.models[m].lora
    step = raw.post('optim_step', dict(model_id=m, seq_id=2, adam_params=ADAM.model_dump()))[1]
    assert lora.step==0 and lora.grads is None
    raw.result(raw.fb(m, 1)[1])
    assert 'metrics' in raw.result(step) and lora.step==1
    lost = raw.post('optim_step', dict(model_id=m, seq_id=9, adam_params=ADAM.model_dump()))[1]; server.app.models[m].order.gap_s = 0
    o = raw.result(lost); assert o['category']=='user' and 'seq_id 9 waits for seq_id 3' in o['error']

def test_refusals_name_the_cause(server):
    raw = Raw(server); m = raw.result(raw.model(server)[1])['model_id']
    for seq,(path,change,words) in enumerate((('optim_step', dict(adam_params=dict(learning_rate=1)), 'beta1 is missing'), ('optim_step', dict(optimizer_params=dict(type='dimuon')), 'dimuon'),
        ('save_weights', dict(path='../x'), 'checkpoint name'), ('save_weights', {}, 'checkpoint name'), ('save_weights_for_sampler', dict(kind='inflight', sampling_session_seq_id=3), 'inflight'),
        ('load_weights', dict(path='tinker://x/weights/y', optimizer=True), 'no checkpoint'), ('load_weights', dict(path='tinker://x/sampler_weights/y', optimizer=True), 'save_state')), 1):
        status,p = raw.post(path, dict(model_id=m, seq_id=seq, **change)); o = raw.result(p)
        assert status==200 and o['category']=='user' and words in o['error'], o
    for path,j,status,words in (('load_weights', dict(session_id=raw.session, model_seq_id=5, path='tinker://x/weights/y', optimizer=True), 404, 'no checkpoint'),
        ('weights_info', dict(tinker_path='tinker://x/weights/y'), 404, 'no checkpoint'), ('create_model', dict(session_id='x', model_seq_id=0, base_model=server.name, lora_config=dict(rank=1)), 404, 'no session'),
        ('create_model', dict(session_id=raw.session, model_seq_id=9, base_model=server.name), 400, 'lora_config'), ('optim_step', dict(model_id=m), 400, 'seq_id'), ('copy_weights', {}, 400, 'source_path'), ('no_such_route', {}, 404, 'not offered')):
        s,o = raw.post(path, j); assert s==status and words in o['detail'], (path, s, o)
    o = raw.result(raw.model(server, n=7, train_mlp=False, train_attn=False, train_unembed=False)[1]); assert o['category']=='user' and 'adapt' in o['error']
    z = raw.http.post('forward_backward', content=b'junk', headers={'Content-Encoding': 'zstd'}); assert z.status_code==400 and 'zstd' in z.json()['detail']

def test_an_engine_that_breaks_says_so(server, monkeypatch):
    def broken(*a, **k): raise RuntimeError('out of order')
    raw = Raw(server); m = raw.result(raw.model(server)[1])['model_id']; monkeypatch.setattr(type(server.app.backends[server.name].engine), 'optim_step', broken)
    o = raw.result(raw.post('optim_step', dict(model_id=m, seq_id=1, adam_params=ADAM.model_dump()))[1])
    assert o==dict(error='RuntimeError: out of order', category='server')

def test_compressed_bodies(server):
    import zstandard
    raw = Raw(server); m = raw.result(raw.model(server)[1])['model_id']
    d = types.Datum(model_input=text([1,2]), loss_fn_inputs=dict(target_tokens=np.array([2,3]), weights=np.ones(2, np.float32)))
    body = forward_backward_request_to_proto(types.ForwardBackwardRequest(model_id=m, seq_id=1, forward_backward_input=types.ForwardBackwardInput(data=[d], loss_fn='cross_entropy'))).SerializeToString()
    plain = raw.post('forward_backward', content=body)
    assert raw.post('forward_backward', content=zstandard.ZstdCompressor().compress(body), headers={'Content-Encoding': 'zstd'})==plain
    assert isinstance(raw.result(plain[1]), bytes)

# ---- endpoints and processes
def test_listens_on_this_machine_only(server):
    assert server.socket.getsockname()[0]=='127.0.0.1'
    if sys.platform=='linux':     # the whole of 127/8 is this machine there: another address of it must not answer
        with pytest.raises(ConnectionRefusedError): socket.create_connection(('127.0.0.2', server.port), 5)

def trickle(sock):
    "Answer with a byte each half second, so that no timeout of a single read ever fires."
    c,_ = sock.accept()
    for b in b'HTTP/1.1 200 OK'+b' '*100: c.send(bytes([b])); time.sleep(.5)

@pytest.mark.parametrize('kind', ['refused', 'silent', 'slow', 'no name', 'no TLS'])
def test_a_dead_host_is_named_within_ten_seconds(server, kind):
    with socket.create_server(('127.0.0.1', 0)) as deaf, socket.create_server(('127.0.0.1', 0)) as closed:
        url = dict(refused=f'http://127.0.0.1:{closed.getsockname()[1]}', silent=(silent := f'http://127.0.0.1:{deaf.getsockname()[1]}'), slow=silent, **{'no name': 'http://nobody.invalid:80', 'no TLS': server.base_url.replace('http', 'https')})[kind]
        if kind=='slow': threading.Thread(target=trickle, args=(deaf,), daemon=True).start()
        closed.close(); out = []
        def go():
            try: connect(url, 'x')
            except Exception as e: out.append(e)
        t = threading.Thread(target=go, daemon=True); t.start(); t.join(10)
    assert out and isinstance(out[0], ConnectionError) and url in str(out[0]), out

def test_the_command_line(models):
    p = subprocess.Popen([sys.executable, '-m', 'rxnb.serve', '--base-model', models('llama'), '--device', 'cpu'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        url = p.stdout.readline().strip()
        sc = connect(url, str(models('llama'))); now(sc.create_sampling_client(base_model=str(models('llama')))).compute_logprobs(text(PROMPT)).result()
        sc.close('success').result()
    finally: p.terminate(); err = p.communicate(timeout=20)[1]
    assert p.returncode==0 and 'Traceback' not in err, err
    r = subprocess.run([sys.executable, '-m', 'rxnb.serve', '--base-model', 'tiny_nothing'], capture_output=True, text=True, cwd=root)
    assert r.returncode==1 and "no base model 'tiny_nothing'" in r.stderr

def test_nothing_is_left(models):
    "A closed server leaves no thread and no promise behind."
    before = set(threading.enumerate())
    with serve(models('llama'), device='cpu') as s: Raw(s)
    assert not [t for t in set(threading.enumerate())-before if t.name.startswith('rxnb')]
    with pytest.raises(httpx.ConnectError): httpx.get(s.base_url)
